//! Free space and kind of the filesystem that holds a path.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::mounts::{mount_of, mounts};
use super::tree::Tree;

/// The filesystem that holds a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// The folder that was looked at: the path asked for, or its nearest folder that exists.
    pub path: PathBuf,
    /// Bytes of the filesystem.
    pub total: u64,
    /// Bytes that an ordinary user can still write.
    pub free: u64,
    /// Its kind: `ext4`, `xfs`, `overlay`, `nfs4`, `tmpfs` (which is memory).
    pub filesystem: Option<String>,
    /// The device or share behind it.
    pub device: Option<String>,
    /// Where it is mounted.
    pub mount: Option<PathBuf>,
}

/// A path whose filesystem cannot be looked at.
#[derive(Debug, thiserror::Error)]
#[error("cannot look at the disk of {}: {source}", path.display())]
pub struct DiskError {
    /// The path asked for.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Looks at the filesystem that holds `path`, which need not exist yet: a run folder appears later.
pub fn disk(path: &Path) -> Result<Disk, DiskError> {
    let failed = |source| DiskError { path: path.to_owned(), source };
    let path = nearest_existing(path).map_err(failed)?;
    let found = rustix::fs::statvfs(&path).map_err(|errno| failed(errno.into()))?;
    let mounts = mounts(&Tree::system()).unwrap_or_default();
    let mount = mount_of(&mounts, &path);
    Ok(Disk {
        total: found.f_blocks.saturating_mul(found.f_frsize),
        free: found.f_bavail.saturating_mul(found.f_frsize),
        filesystem: mount.map(|mount| mount.kind.clone()),
        device: mount.map(|mount| mount.source.clone()),
        mount: mount.map(|mount| mount.point.clone()),
        path,
    })
}

/// The path itself or the first of its parents that exists, without links.
fn nearest_existing(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let mut failure = io::ErrorKind::NotFound.into();
    for parent in absolute.ancestors() {
        match parent.canonicalize() {
            Ok(found) => return Ok(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => failure = error,
            Err(error) => return Err(error),
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_does_not_exist_yet_has_its_parents_disk() {
        let folder = tempfile::tempdir().unwrap();
        let parent = disk(folder.path()).unwrap();
        let child = disk(&folder.path().join("runs/today")).unwrap();
        assert_eq!(child.path, folder.path().canonicalize().unwrap());
        assert_eq!((child.total, &child.filesystem), (parent.total, &parent.filesystem));
        assert!(child.free <= child.total && child.total > 0);
    }

    #[test]
    fn proc_is_known_by_its_kind() {
        let proc = disk(Path::new("/proc/self")).unwrap();
        assert_eq!(proc.filesystem.as_deref(), Some("proc"));
        assert_eq!(proc.mount.as_deref(), Some(Path::new("/proc")));
    }

    #[test]
    fn a_path_through_a_file_is_an_error_that_names_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().join("run");
        let error = disk(&path).unwrap_err();
        assert_eq!(error.path, path);
        assert!(error.to_string().starts_with("cannot look at the disk of "), "{error}");
    }
}
