//! Detects paths inside a checkpoint: writing there would invalidate its checksums.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::checksums::{MANIFEST, SUMS};
use super::file_names::{StaleName, is_shard_name, parse_step_folder};

/// The checkpoint that contains `path`, symlinks resolved. `path` itself need not exist yet.
pub(crate) fn enclosing_checkpoint(path: &Path) -> Option<PathBuf> {
    nearest_existing(path)?.ancestors().find(|folder| is_checkpoint(folder)).map(Path::to_owned)
}

/// Whether `path`, which need not exist yet, is `folder` or lies in it, symlinks resolved.
pub(crate) fn is_inside(path: &Path, folder: &Path) -> bool {
    let around = nearest_existing(path);
    around.is_some_and(|around| around.ancestors().any(|ancestor| is_same_folder(ancestor, folder)))
}

/// The nearest existing folder at or around a path, symlinks resolved.
pub(crate) fn nearest_existing(path: &Path) -> Option<PathBuf> {
    let there =
        path.ancestors().find(|folder| folder.exists()).filter(|folder| !folder.as_os_str().is_empty());
    there.unwrap_or(Path::new(".")).canonicalize().ok()
}

/// Recognises a checkpoint by its manifest or, if that is lost, by its name and a rank file in it.
fn is_checkpoint(folder: &Path) -> bool {
    let is_manifested =
        || fs::symlink_metadata(folder.join(SUMS)).is_ok() && is_manifest(&folder.join(MANIFEST));
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_named = parse_step_folder(name).is_some() || StaleName::parse(name).is_some();
    let is_part = |entry: fs::DirEntry| entry.file_name().to_str().is_some_and(is_shard_name);
    let holds_part = || fs::read_dir(folder).into_iter().flatten().flatten().any(is_part);
    is_manifested() || (is_named && holds_part())
}

/// Checks for a zeroth manifest: other tools write a `manifest.json` too.
fn is_manifest(path: &Path) -> bool {
    let mut begin = [0; 4096];
    let read = File::open(path).and_then(|mut file| file.read(&mut begin));
    read.is_ok_and(|read| String::from_utf8_lossy(&begin[..read]).contains("\"zeroth_version\""))
}

/// Compares two folders by device and inode: a bind mount gives one folder two canonical paths.
pub(crate) fn is_same_folder(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    identity(a).is_some_and(|found| identity(b) == Some(found))
}
