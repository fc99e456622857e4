//! Inputs of a run, and whether removing a path would remove one of them, through any symlink or mount.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// Symlinks followed before a path counts as a loop, as in the kernel.
const MOST_LINKS: u32 = 40;
/// Folder levels that are scanned: inputs are in a model folder or in that of a checkpoint.
const DEPTH: u32 = 2;

/// A path that a run reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunInput {
    /// Its flag, for messages.
    pub flag: &'static str,
    /// The file or folder; of a folder, the files in it count too.
    pub path: PathBuf,
}

impl RunInput {
    /// The input of a flag.
    pub fn new(flag: &'static str, path: impl Into<PathBuf>) -> Self {
        Self { flag, path: path.into() }
    }
}

/// A file, or a folder with its contents.
#[derive(Debug)]
pub(crate) struct InputTree {
    pub(crate) path: PathBuf,
    /// Device and inode of everything in it that has no other hard link.
    identities: HashSet<(u64, u64)>,
}

impl InputTree {
    /// Scans a path, which has all symlinks resolved but the last.
    pub(crate) fn at(path: &Path) -> Self {
        let mut identities = HashSet::new();
        // The target of a symlink is not part of it.
        let depth = if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) { DEPTH } else { 0 };
        walk(path, depth, &mut |path| identities.extend(identity(path)));
        Self { path: path.to_owned(), identities }
    }

    /// Whether any part of an input is reached through this tree.
    pub(crate) fn holds(&self, input: &RunInput) -> bool {
        let mut found = false;
        walk(&input.path, DEPTH, &mut |path| {
            found = found
                || visited(path).iter().any(|step| {
                    step.starts_with(&self.path)
                        || identity(step).is_some_and(|found| self.identities.contains(&found))
                });
        });
        found
    }
}

/// Visits a path and, recursively, its contents.
fn walk(path: &Path, depth: u32, take: &mut dyn FnMut(&Path)) {
    take(path);
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        walk(&entry.path(), depth - 1, take);
    }
}

/// Device and inode, which identify a file through any path or bind mount. `None` for files with several hard links,
/// because another link keeps the contents.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    (found.is_dir() || found.nlink() == 1).then(|| (found.dev(), found.ino()))
}

/// Every file, folder and symlink that a path traverses, each by its resolved path.
fn visited(path: &Path) -> Vec<PathBuf> {
    let Ok(path) = std::path::absolute(path) else { return Vec::new() };
    let parts = |path: &Path| -> Vec<OsString> {
        let mut parts: Vec<OsString> = path.components().map(|part| part.as_os_str().to_owned()).collect();
        parts.reverse();
        parts
    };
    let (mut at, mut left, mut links, mut visited) = (PathBuf::new(), parts(&path), 0, Vec::new());
    while let Some(part) = left.pop() {
        match Path::new(&part).components().next() {
            Some(Component::ParentDir) => drop(at.pop()),
            Some(Component::Normal(name)) => {
                let next = at.join(name);
                visited.push(next.clone());
                match fs::read_link(&next) {
                    Ok(target) if links < MOST_LINKS => {
                        links += 1;
                        left.extend(parts(&target));
                    }
                    _ => at = next,
                }
            }
            // An absolute symlink target restarts at the root.
            Some(root @ Component::RootDir) => at = PathBuf::from(root.as_os_str()),
            _ => {}
        }
    }
    visited
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn holds(tree: &Path, input: &Path) -> bool {
        InputTree::at(tree).holds(&RunInput::new("--data", input))
    }

    #[test]
    fn inputs_are_found_through_symlinks_and_hard_links() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        for name in ["run/model", "models/m", "linked"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("run/model/config.json"), "{}").unwrap();
        fs::write(at("models/m/config.json"), "{}").unwrap();
        let tree = at("run/model/config.json");
        assert!(holds(&tree, &tree));
        assert!(holds(&tree, &at("run/model")), "a folder with it inside");
        assert!(holds(&tree, &at("run/../run/model")));
        assert!(!holds(&tree, &at("models/m")));
        // A symlink to the file, to its folder, a relative one, and one inside a folder.
        symlink(&tree, at("config.json")).unwrap();
        symlink(at("run/model"), at("by-link")).unwrap();
        symlink("../run/model/config.json", at("linked/config.json")).unwrap();
        for name in ["config.json", "by-link", "linked", "linked/config.json"] {
            assert!(holds(&tree, &at(name)), "{name}");
        }
        // A symlink that would itself be removed.
        symlink(at("models/m"), at("run/linked-model")).unwrap();
        assert!(holds(&at("run/linked-model"), &at("run/linked-model/config.json")));
        assert!(!holds(&at("run/linked-model"), &at("models/m")));
        // The other hard link survives.
        fs::hard_link(at("run/model/config.json"), at("models/other.json")).unwrap();
        assert!(!holds(&tree, &at("models/other.json")));
        assert!(holds(&tree, &tree));
        // A symlink loop terminates.
        symlink(at("circle"), at("circle")).unwrap();
        assert!(!holds(&tree, &at("circle")));
    }
}
