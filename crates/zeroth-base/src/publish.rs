//! Atomic files: written to a temporary name, synced, then renamed.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::unfinished::{create_unfinished, publish_unfinished, remove_unfinished, unfinished_path};

/// A file could not be written; an existing one is unchanged.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct PublishError {
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    pub source: io::Error,
}

/// Writes `contents` to `path` atomically: a reader sees the old file or the new one, never a part.
pub fn publish(path: &Path, contents: &[u8]) -> Result<(), PublishError> {
    let failed = |source| PublishError { path: path.to_owned(), source };
    let Some(name) = path.file_name() else {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file")));
    };
    // A rename onto a folder would fail only after the work is done.
    if path.is_dir() {
        return Err(failed(io::Error::new(io::ErrorKind::IsADirectory, "a folder of that name is there")));
    }
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let unfinished = unfinished_path(folder, name);
    let written = (|| {
        let mut file = create_unfinished(&unfinished)?;
        file.write_all(contents)?;
        file.sync_all()?;
        publish_unfinished(&unfinished, path)?;
        sync_folder(folder)
    })();
    written.map_err(|source| {
        remove_unfinished(&unfinished);
        failed(source)
    })
}

/// Syncs a folder, so that its entries are durable.
///
/// Some network and FUSE filesystems cannot sync a folder (EINVAL, ENOTSUP); that is not an error.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_new_file_replaces_the_old_one_and_no_temporary_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        publish(&path, b"old").unwrap();
        publish(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_folder_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent/config.json");
        let error = publish(&path, b"x").unwrap_err();
        assert_eq!(error.path, path);
        assert!(error.to_string().contains("absent/config.json"), "{error}");
    }

    #[test]
    fn a_folder_of_that_name_is_refused_before_writing() {
        let folder = tempfile::tempdir().unwrap();
        let error = publish(folder.path(), b"x").unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::IsADirectory);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
