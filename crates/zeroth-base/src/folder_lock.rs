//! One command per folder. A lock file names the process that holds it; a lock whose process is gone is stale.
//!
//! `flock` decides between two commands that start at once, and is released when its process dies. Some network file systems
//! do not propagate it, so the process in the file is checked too.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;

use crate::ProcessOwner;

/// The name of the lock file.
pub const LOCK_FILE: &str = ".lock";
/// More than the text of a holder.
const LONGEST: u64 = 4096;

/// A folder could not be locked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LockError {
    #[error(
        "{} is in use by another command{}: wait for it, stop it, or choose another --output",
        folder.display(), pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    Held { folder: PathBuf, pid: Option<u32> },
    #[error("cannot lock {}: it is not a file; move it away", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot lock {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// A folder locked by this process until dropped.
#[derive(Debug)]
pub struct FolderLock {
    path: PathBuf,
    file: File,
}

impl FolderLock {
    /// Locks `folder` with the lock file in it.
    pub fn take(folder: &Path) -> Result<Self, LockError> {
        let path = &folder.join(LOCK_FILE);
        let failed = |source| LockError::Io { path: path.clone(), source };
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                // Anyone who can open the file can lock it, and so block a run.
                .mode(0o600)
                // A FIFO of that name must not hold up the command.
                .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
                .open(path)
                .map_err(failed)?;
            if !file.metadata().map_err(failed)?.is_file() {
                return Err(LockError::NotAFile { path: path.clone() });
            }
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
            let mut text = String::new();
            // A torn or empty file has no holder.
            let _ = (&file).take(LONGEST).read_to_string(&mut text);
            let holder: Option<ProcessOwner> = text.trim().parse().ok();
            let held = |pid| Err(LockError::Held { folder: folder.to_owned(), pid });
            match locked {
                Err(Errno::WOULDBLOCK) => return held(holder.map(|holder| holder.pid())),
                // The file system has no locks: rely on the process check.
                Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK) => {}
                Err(error) => return Err(failed(error.into())),
            }
            if let Some(holder) = holder.filter(ProcessOwner::is_alive) {
                return held(Some(holder.pid()));
            }
            // The previous holder may have removed the file between our open and lock.
            let ours = file.metadata().map_err(failed)?;
            if !fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                continue;
            }
            if ours.mode() & 0o077 != 0 {
                // Created by an earlier version. Fails if another user owns it, who shares the folder.
                let _ = fchmod(&file, Mode::RUSR | Mode::WUSR);
            }
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| writeln!(file, "{}", ProcessOwner::own()))
                .map_err(failed)?;
            return Ok(Self { path: path.clone(), file });
        }
    }

    /// The lock file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Removed while still locked, so that it cannot be another run's file. If that fails, a stale lock remains
        // and is recognised as such.
        let _ = fs::remove_file(&self.path);
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_second_command_is_refused_with_the_holders_pid() {
        let folder = tempfile::tempdir().unwrap();
        let first = FolderLock::take(folder.path()).unwrap();
        let error = FolderLock::take(folder.path()).unwrap_err();
        assert!(
            matches!(error, LockError::Held { pid: Some(pid), .. } if pid == std::process::id()),
            "{error}"
        );
        drop(first);
        assert!(!folder.path().join(LOCK_FILE).exists());
        drop(FolderLock::take(folder.path()).unwrap());
    }

    #[test]
    fn lock_files_are_private_and_never_follow_symlinks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        let mode = || fs::metadata(&path).unwrap().mode() & 0o777;
        let lock = FolderLock::take(folder.path()).unwrap();
        assert_eq!(mode(), 0o600);
        drop(lock);
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let lock = FolderLock::take(folder.path()).unwrap();
        assert_eq!(mode(), 0o600);
        drop(lock);
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "mine").unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(FolderLock::take(folder.path()), Err(LockError::Io { .. })));
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "mine");
    }

    #[test]
    fn a_fifo_of_that_name_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(matches!(FolderLock::take(folder.path()), Err(LockError::NotAFile { .. })));
    }

    #[test]
    fn a_lock_is_stale_once_its_process_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        let holder = ProcessOwner::of(other.id()).unwrap();
        // Without flock, as on a file system that does not propagate it.
        fs::write(folder.path().join(LOCK_FILE), holder.to_string()).unwrap();
        let held = FolderLock::take(folder.path());
        other.kill().unwrap();
        let error = held.unwrap_err().to_string();
        assert!(error.contains(&format!("in use by another command (process {})", other.id())), "{error}");
        other.wait().unwrap();
        FolderLock::take(folder.path()).unwrap();
    }

    #[test]
    fn torn_locks_and_those_of_earlier_versions_do_not_hold() {
        let folder = tempfile::tempdir().unwrap();
        for text in
            ["", "00000001-0000", "{\"pid\": 1", "{\"pid\":4194304,\"start_time\":1,\"boot\":\"gone\"}"]
        {
            fs::write(folder.path().join(LOCK_FILE), text).unwrap();
            drop(FolderLock::take(folder.path()).unwrap());
        }
    }

    #[test]
    fn exactly_one_of_concurrent_commands_gets_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(LOCK_FILE), "00000001-00000001-4194304-1").unwrap();
        let barrier = std::sync::Barrier::new(8);
        let taken: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        FolderLock::take(folder.path())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(taken.iter().filter(|lock| lock.is_ok()).count(), 1);
    }
}
