//! What a run reads by path, and whether removing something would take it away: by its name, or by any link to it.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// Links that are followed before a path counts as a circle, as in the kernel.
const MOST_LINKS: u32 = 40;
/// Folders inside each other that are looked into: what is read lies in a model's folder, or in the one of a checkpoint.
const DEPTH: u32 = 2;

/// Something that a run reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// The flag that names it, for messages.
    pub flag: &'static str,
    /// The file or folder; of a folder, the files in it count too.
    pub path: PathBuf,
}

impl Input {
    /// What a flag names.
    pub fn new(flag: &'static str, path: impl Into<PathBuf>) -> Self {
        Self { flag, path: path.into() }
    }
}

/// A file or folder with all that is in it.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) path: PathBuf,
    /// Device and inode of everything in it that has no other name.
    identities: HashSet<(u64, u64)>,
}

impl Tree {
    /// What is at a path, all links but the last resolved.
    pub(crate) fn at(path: &Path) -> Self {
        let mut identities = HashSet::new();
        // What a link leads to is not in it.
        let depth = if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) { DEPTH } else { 0 };
        walk(path, depth, &mut |path| identities.extend(identity(path)));
        Self { path: path.to_owned(), identities }
    }

    /// Whether anything of an input is reached through something in this tree.
    pub(crate) fn holds(&self, input: &Input) -> bool {
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

/// The path, and all in it where it is a folder.
fn walk(path: &Path, depth: u32, take: &mut dyn FnMut(&Path)) {
    take(path);
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        walk(&entry.path(), depth - 1, take);
    }
}

/// What tells a file or folder from all others, by whatever path (a bind mount's too) it is reached. None for a file with
/// several hard links: one of them may go.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    (found.is_dir() || found.nlink() == 1).then(|| (found.dev(), found.ino()))
}

/// Every file, folder and link that a path leads through, by its own path without links.
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
            // The root, from which an absolute target begins again.
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
        Tree::at(tree).holds(&Input::new("--data", input))
    }

    #[test]
    fn a_path_that_leads_through_a_tree_is_held_by_it() {
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
        // A link to it, a link to its folder, a relative one, and a link in a folder.
        symlink(&tree, at("config.json")).unwrap();
        symlink(at("run/model"), at("by-link")).unwrap();
        symlink("../run/model/config.json", at("linked/config.json")).unwrap();
        for name in ["config.json", "by-link", "linked", "linked/config.json"] {
            assert!(holds(&tree, &at(name)), "{name}");
        }
        // A link that would go itself, though what it leads to stays.
        symlink(at("models/m"), at("run/linked-model")).unwrap();
        assert!(holds(&at("run/linked-model"), &at("run/linked-model/config.json")));
        assert!(!holds(&at("run/linked-model"), &at("models/m")));
        // The other name of a file with two stays when one goes.
        fs::hard_link(at("run/model/config.json"), at("models/other.json")).unwrap();
        assert!(!holds(&tree, &at("models/other.json")));
        assert!(holds(&tree, &tree));
        // A circle ends.
        symlink(at("circle"), at("circle")).unwrap();
        assert!(!holds(&tree, &at("circle")));
    }
}
