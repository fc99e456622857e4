//! One run per folder. A lock file names the process that holds it; a lock whose process is gone is stale.
//!
//! `flock` decides between two runs that start at once, and is released when its process dies. Some network file
//! systems do not propagate it, so the process in the file is checked too: by id and start time, because ids are
//! reused, and by boot id, because start times repeat.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// A folder could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another run holds the lock.
    #[error(
        "{} is in use by another run{}: wait for it, stop it, or choose another --output",
        folder.display(), pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    Held {
        /// The folder.
        folder: PathBuf,
        /// Its process id, if readable.
        pid: Option<u32>,
    },
    /// An I/O operation failed.
    #[error("cannot lock {}: {source}", path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// The holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    pid: u32,
    /// Clock ticks from boot to the start of the process.
    start_time: u64,
    boot: String,
}

impl Holder {
    /// The process `pid`, if alive.
    fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The parenthesised name may contain anything; after it, field 1 is the state and field 20 the start time.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?;
        let start_time = fields.nth(18)?.parse().ok()?;
        let boot =
            fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        // A zombie has exited but was not reaped yet.
        (state != "Z" && state != "X").then_some(Self { pid, start_time, boot })
    }

    fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

/// Start time of the process `pid` in clock ticks since boot, if alive.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    Holder::of(pid).map(|holder| holder.start_time)
}

/// A folder locked by this process until dropped.
#[derive(Debug)]
pub(crate) struct RunLock {
    path: PathBuf,
    file: File,
}

impl RunLock {
    /// Locks `folder` with the lock file `path` in it.
    pub(crate) fn take(folder: &Path, path: &Path) -> Result<Self, LockError> {
        let failed = |source| LockError::Io { path: path.to_owned(), source };
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                // Anyone who can open the file can lock it, and so block a run.
                .mode(0o600)
                .custom_flags(OFlags::NOFOLLOW.bits() as i32)
                .open(path)
                .map_err(failed)?;
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
            let mut text = String::new();
            // A torn or empty file has no holder.
            let _ = file.read_to_string(&mut text);
            let holder: Option<Holder> = serde_json::from_str(&text).ok();
            let held = |pid| Err(LockError::Held { folder: folder.to_owned(), pid });
            match locked {
                Err(Errno::WOULDBLOCK) => return held(holder.map(|holder| holder.pid)),
                // The file system has no locks: rely on the process check.
                Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK) => {}
                Err(error) => return Err(failed(error.into())),
            }
            if let Some(holder) = holder.filter(Holder::is_alive) {
                return held(Some(holder.pid));
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
            let me = Holder::of(std::process::id())
                .ok_or_else(|| failed(io::Error::other("/proc does not show this process")))?;
            let text = serde_json::to_vec(&me).expect("numbers and strings always serialise");
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| file.write_all(&text))
                .map_err(failed)?;
            return Ok(Self { path: path.to_owned(), file });
        }
    }
}

impl Drop for RunLock {
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

    fn lock_of(folder: &Path) -> PathBuf {
        folder.join(".lock")
    }

    #[test]
    fn a_second_run_is_refused_with_the_holders_pid() {
        let folder = tempfile::tempdir().unwrap();
        let path = lock_of(folder.path());
        let first = RunLock::take(folder.path(), &path).unwrap();
        let error = RunLock::take(folder.path(), &path).unwrap_err();
        assert!(
            matches!(error, LockError::Held { pid: Some(pid), .. } if pid == std::process::id()),
            "{error}"
        );
        drop(first);
        assert!(!path.exists());
        drop(RunLock::take(folder.path(), &path).unwrap());
    }

    #[test]
    fn lock_files_are_private_and_never_follow_symlinks() {
        let folder = tempfile::tempdir().unwrap();
        let path = lock_of(folder.path());
        let mode = || fs::metadata(&path).unwrap().mode() & 0o777;
        let lock = RunLock::take(folder.path(), &path).unwrap();
        assert_eq!(mode(), 0o600);
        drop(lock);
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let lock = RunLock::take(folder.path(), &path).unwrap();
        assert_eq!(mode(), 0o600);
        drop(lock);
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "mine").unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(RunLock::take(folder.path(), &path), Err(LockError::Io { .. })));
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "mine");
    }

    #[test]
    fn a_lock_is_stale_once_its_process_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = lock_of(folder.path());
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        let holder = Holder::of(other.id()).unwrap();
        // Without flock, as on a file system that does not propagate it.
        fs::write(&path, serde_json::to_vec(&holder).unwrap()).unwrap();
        let held = RunLock::take(folder.path(), &path);
        other.kill().unwrap();
        let error = held.unwrap_err().to_string();
        assert!(error.contains(&format!("in use by another run (process {})", other.id())), "{error}");
        other.wait().unwrap();
        RunLock::take(folder.path(), &path).unwrap();
    }

    #[test]
    fn a_reused_pid_does_not_hold_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = lock_of(folder.path());
        let me = Holder::of(std::process::id()).unwrap();
        for stale in [
            Holder { start_time: me.start_time - 1, ..me.clone() },
            Holder { boot: "another".to_owned(), ..me.clone() },
        ] {
            fs::write(&path, serde_json::to_vec(&stale).unwrap()).unwrap();
            drop(RunLock::take(folder.path(), &path).unwrap());
        }
        fs::write(&path, "{\"pid\": 1").unwrap();
        drop(RunLock::take(folder.path(), &path).unwrap());
    }

    #[test]
    fn exactly_one_of_concurrent_runs_gets_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = lock_of(folder.path());
        fs::write(&path, "{\"pid\":4194304,\"start_time\":1,\"boot\":\"gone\"}").unwrap();
        let barrier = std::sync::Barrier::new(8);
        let taken: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        RunLock::take(folder.path(), &path)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(taken.iter().filter(|lock| lock.is_ok()).count(), 1);
    }
}
