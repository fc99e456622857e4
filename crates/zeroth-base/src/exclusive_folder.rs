//! A folder that one command at a time writes a model to.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::folder_lock::{FolderLock, LOCK_FILE, LockError};
use crate::unfinished::{
    PUBLICATION_LIST, PublicationList, disown_file, keep_folders, make_folders, own_file, parse_unfinished,
    remove_abandoned,
};

/// A folder that cannot be written to.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ExclusiveFolderError {
    #[error("{} is not empty", folder.display())]
    NotEmpty { folder: PathBuf },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("cannot {doing} the folder {}: {source}", folder.display())]
    Io { doing: &'static str, folder: PathBuf, source: io::Error },
}

/// A folder that is locked by this process until it is dropped. Those that were made for it go then if they are empty.
#[derive(Debug)]
pub struct ExclusiveFolder {
    path: PathBuf,
    /// The folders that were missing, the innermost first.
    made: Vec<PathBuf>,
    /// Whether it held nothing.
    is_new: bool,
    lock: Option<FolderLock>,
}

impl ExclusiveFolder {
    /// Makes the folder where it is missing, locks it, and removes what was left unfinished in it by processes that are gone;
    /// `is_ours` knows the names of files that are written to it. Unless it `overwrites`, it must then be empty.
    pub fn open(
        folder: &Path,
        overwrites: bool,
        is_ours: fn(&str) -> bool,
    ) -> Result<Self, ExclusiveFolderError> {
        let not_empty = || ExclusiveFolderError::NotEmpty { folder: folder.to_owned() };
        // Nothing is changed in a folder that is refused.
        let found = Contents::of(folder, is_ours)?;
        if !overwrites && found.others && !found.list {
            return Err(not_empty());
        }
        let failed = |source| ExclusiveFolderError::Io { doing: "make", folder: folder.to_owned(), source };
        let made = make_folders(folder).map_err(failed)?;
        let mut opened = Self { path: folder.to_owned(), made, is_new: false, lock: None };
        let lock = FolderLock::take(folder)?;
        own_file(lock.path());
        opened.lock = Some(lock);
        remove_abandoned(folder, is_ours);
        opened.is_new = !Contents::of(folder, is_ours)?.others;
        if !overwrites && !opened.is_new {
            return Err(not_empty());
        }
        Ok(opened)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Says which files are about to get their names, where the folder held nothing: see [`PublicationList`].
    pub fn announce<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
    ) -> io::Result<Option<PublicationList>> {
        self.is_new.then(|| PublicationList::write(&self.path, names)).transpose()
    }
}

impl Drop for ExclusiveFolder {
    fn drop(&mut self) {
        if let Some(lock) = self.lock.take() {
            let path = lock.path().to_owned();
            drop(lock);
            disown_file(&path);
        }
        for folder in &self.made {
            // Fails for those that hold something.
            let _ = fs::remove_dir(folder);
        }
        keep_folders(&self.made);
    }
}

/// What a folder holds besides locks and unfinished files.
struct Contents {
    others: bool,
    /// Files that a process was publishing, which may be gone.
    list: bool,
}

impl Contents {
    fn of(folder: &Path, is_ours: fn(&str) -> bool) -> Result<Self, ExclusiveFolderError> {
        let failed = |source| ExclusiveFolderError::Io { doing: "read", folder: folder.to_owned(), source };
        let mut found = Self { others: false, list: false };
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(failed(error)),
        };
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            match name.to_str().map(|name| (name, parse_unfinished(name))) {
                Some((_, Some((PUBLICATION_LIST, _)))) => found.list = true,
                Some((LOCK_FILE, _)) => {}
                Some((_, Some((name, _)))) if is_ours(name) => {}
                _ => found.others = true,
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(folder: &Path, overwrites: bool) -> Result<ExclusiveFolder, ExclusiveFolderError> {
        ExclusiveFolder::open(folder, overwrites, |name| name == "weights")
    }

    #[test]
    fn folders_are_made_locked_and_removed_if_empty() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        let opened = open(&inner, false).unwrap();
        let error = open(&inner, true).unwrap_err();
        assert!(matches!(error, ExclusiveFolderError::Lock(LockError::Held { .. })), "{error}");
        drop(opened);
        assert!(!folder.path().join("a").exists());
        let opened = open(&inner, false).unwrap();
        fs::write(inner.join("weights"), "x").unwrap();
        drop(opened);
        assert_eq!(fs::read_dir(&inner).unwrap().count(), 1);
        let error = open(&inner, false).unwrap_err();
        assert!(matches!(error, ExclusiveFolderError::NotEmpty { .. }), "{error}");
        assert_eq!(fs::read_dir(&inner).unwrap().count(), 1);
        assert!(open(&inner, true).unwrap().announce(["weights"]).unwrap().is_none());
    }

    #[test]
    fn leftovers_are_no_contents() {
        let folder = tempfile::tempdir().unwrap();
        let gone = crate::process_owner::ended_process();
        for name in [format!(".weights.unfinished-{gone}"), ".lock".to_owned()] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        drop(open(folder.path(), false).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // Killed while it gave the files their names.
        for name in [format!(".published.unfinished-{gone}"), "weights".to_owned()] {
            fs::write(folder.path().join(name), "weights\nconfig").unwrap();
        }
        drop(open(folder.path(), false).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        fs::write(folder.path().join(".mine.unfinished-4194304"), "x").unwrap();
        assert!(open(folder.path(), false).is_err());
    }
}
