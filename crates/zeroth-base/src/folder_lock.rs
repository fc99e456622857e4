//! One command per folder. A lock file names the process that holds it, and its host; a lock whose process is gone is stale.
//!
//! `flock` decides between two commands that start at once, and is released when its process dies. Some network file systems
//! do not propagate it, so the process in the file is checked too: on this host by its id, on another host by the renewals of
//! the file, for which a command waits a minute.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock, fstatfs};
use rustix::io::Errno;

use crate::signs_of_life::{FileState, RenewedFile, SILENCE, is_silent};
use crate::{ProcessOwner, host_name};

/// The name of the lock file.
pub const LOCK_FILE: &str = ".lock";
/// More than the text of a holder.
const LONGEST: u64 = 4096;
/// How often a lock of another host is looked at.
const LOOK: Duration = Duration::from_millis(250);
/// File systems that one kernel mounts, by their `f_type`: btrfs, ext2 to ext4, F2FS, tmpfs, XFS, ZFS.
const OF_ONE_KERNEL: [u32; 6] = [0x9123_683E, 0xEF53, 0xF2F5_2010, 0x0102_1994, 0x5846_5342, 0x2FC1_2FC1];

/// A folder could not be locked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LockError {
    #[error(
        "{} is in use by another command{}: wait for it, stop it, or choose another --output",
        folder.display(), holder.as_ref().map(|holder| format!(" ({holder})")).unwrap_or_default()
    )]
    Held { folder: PathBuf, holder: Option<LockHolder> },
    #[error("cannot lock {}: it is not a file; move it away", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot lock {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// The process that a lock file names, shown as `process 12 on host b`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockHolder {
    owner: ProcessOwner,
    /// Its host, unless that is this one; earlier versions did not write it.
    host: Option<String>,
}

impl LockHolder {
    /// Its process id on its host.
    pub fn pid(&self) -> u32 {
        self.owner.pid()
    }

    /// Its host's name, unless it is on this one.
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// Reads a lock file; a torn or empty one has no holder.
    fn read(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let owner: ProcessOwner = lines.next()?.trim().parse().ok()?;
        let named = lines.next().map(str::trim).filter(|host| !host.is_empty());
        let host = named.filter(|host| !owner.is_here() || *host != host_name()).map(str::to_owned);
        Some(Self { owner, host })
    }
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid())?;
        match &self.host {
            Some(host) => write!(f, " on host {}", crate::escape_control_characters(host)),
            None => Ok(()),
        }
    }
}

/// A folder locked by this process until dropped.
#[derive(Debug)]
pub struct FolderLock {
    path: PathBuf,
    file: Arc<File>,
    _renewed: RenewedFile,
}

impl FolderLock {
    /// Locks `folder` with the lock file in it.
    pub fn take(folder: &Path) -> Result<Self, LockError> {
        Self::take_telling(folder, &|_| ())
    }

    /// As [`Self::take`]; calls `tell` before it waits for a sign of life of a holder on another host.
    pub fn take_telling(folder: &Path, tell: &dyn Fn(&str)) -> Result<Self, LockError> {
        Self::take_unless(folder, is_of_one_kernel, &|path, holder| {
            !is_silent(path) && is_renewed(path, holder, SILENCE, tell)
        })
    }

    /// As [`Self::take`], without waiting: a lock of another host is held unless this process has seen it unchanged for a
    /// minute.
    pub fn take_at_once(folder: &Path) -> Result<Self, LockError> {
        Self::take_unless(folder, is_of_one_kernel, &|path, _| !is_silent(path))
    }

    /// `proves` says of which file systems a granted `flock` proves that no process holds another; `is_live` judges a holder on
    /// another host where that is no proof.
    fn take_unless(
        folder: &Path,
        proves: fn(&File) -> bool,
        is_live: &dyn Fn(&Path, &LockHolder) -> bool,
    ) -> Result<Self, LockError> {
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
            let _ = (&file).take(LONGEST).read_to_string(&mut text);
            let holder = LockHolder::read(&text);
            let held = |holder| Err(LockError::Held { folder: folder.to_owned(), holder });
            let is_proof = match locked {
                Err(Errno::WOULDBLOCK) => return held(holder),
                Ok(()) => proves(&file),
                // The file system has no locks: rely on the process check.
                Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK) => false,
                Err(error) => return Err(failed(error.into())),
            };
            if let Some(holder) = holder {
                let is_held = if holder.owner.is_here() {
                    holder.owner.is_alive()
                } else {
                    !is_proof && is_live(path, &holder)
                };
                if is_held {
                    return held(Some(holder));
                }
            }
            // The previous holder may have removed the file between our open and lock.
            if !is_at(&file, path).map_err(failed)? {
                continue;
            }
            if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
                // Created by an earlier version. Fails if another user owns it, who shares the folder.
                let _ = fchmod(&file, Mode::RUSR | Mode::WUSR);
            }
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| write!(file, "{}\n{}\n", ProcessOwner::own(), host_name()))
                .and_then(|()| file.sync_all())
                .map_err(failed)?;
            let file = Arc::new(file);
            return Ok(Self { path: path.clone(), _renewed: RenewedFile::new(Arc::clone(&file)), file });
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
        // and is recognised as such. A command of another host has replaced it if this process was stopped for a minute.
        if is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    Ok(fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
}

/// Whether a file is on a file system of one kernel, which knows all locks on it.
fn is_of_one_kernel(file: &File) -> bool {
    fstatfs(file).is_ok_and(|found| OF_ONE_KERNEL.contains(&(found.f_type as u32)))
}

/// Waits until the holder on another host has renewed a lock, or has not for too long.
fn is_renewed(path: &Path, holder: &LockHolder, silence: Duration, tell: &dyn Fn(&str)) -> bool {
    let (began, before) = (Instant::now(), FileState::of(path));
    tell(&format!(
        "{} was locked by process {} on host {}: waiting up to {} s for a sign of life",
        path.display(),
        holder.pid(),
        crate::escape_control_characters(holder.host().unwrap_or("unknown")),
        silence.as_secs()
    ));
    while began.elapsed() < silence {
        std::thread::sleep(LOOK.min(silence));
        // A lock that is gone was released.
        match FileState::of(path) {
            None => return false,
            now if now != before => return true,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;
    use crate::process_owner::ended_process;

    #[test]
    fn a_second_command_is_refused_with_the_holders_pid() {
        let folder = tempfile::tempdir().unwrap();
        let first = FolderLock::take(folder.path()).unwrap();
        let error = FolderLock::take(folder.path()).unwrap_err();
        assert!(
            matches!(&error, LockError::Held { holder: Some(holder), .. } if holder.pid() == std::process::id()),
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
        fs::write(folder.path().join(LOCK_FILE), ended_process().to_string()).unwrap();
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

    /// A process of another host, as its lock file names it.
    const THERE: &str = "00000001-00000002-4194304-1\nnode17\n";

    fn take_within(folder: &Path, silence: Duration) -> Result<FolderLock, LockError> {
        FolderLock::take_unless(folder, |_| false, &|path, holder| is_renewed(path, holder, silence, &|_| ()))
    }

    #[test]
    fn a_renewed_lock_of_another_host_is_refused_with_host_and_pid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        fs::write(&path, THERE).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                // Its clock stands an hour off.
                let mut stamp = std::time::SystemTime::now() - Duration::from_hours(1);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    stamp += Duration::from_millis(10);
                    let _ = File::options().write(true).open(&path).unwrap().set_modified(stamp);
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            let error = take_within(folder.path(), Duration::from_mins(10)).unwrap_err();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            error.to_string()
        });
        assert!(
            error.contains(" is in use by another command (process 4194304 on host node17): "),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), THERE);
    }

    #[test]
    fn a_silent_lock_of_another_host_is_stale_after_the_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        for stamp in
            [std::time::SystemTime::UNIX_EPOCH, std::time::SystemTime::now() + Duration::from_hours(1)]
        {
            fs::write(&path, THERE).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(stamp).unwrap();
            let began = Instant::now();
            let lock = take_within(folder.path(), Duration::from_millis(600)).unwrap();
            assert!(began.elapsed() >= Duration::from_millis(600));
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text, format!("{}\n{}\n", ProcessOwner::own(), host_name()));
            // Whoever takes a process for dead that was only stopped keeps its lock.
            fs::remove_file(&path).unwrap();
            fs::write(&path, THERE).unwrap();
            drop(lock);
            assert_eq!(fs::read_to_string(&path).unwrap(), THERE);
        }
    }

    #[test]
    fn where_one_kernel_knows_all_locks_nobody_waits() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(LOCK_FILE), THERE).unwrap();
        let began = Instant::now();
        drop(FolderLock::take_unless(folder.path(), |_| true, &|_, _| true).unwrap());
        assert!(began.elapsed() < SILENCE);
        assert!(!is_of_one_kernel(&File::open("/proc/self/stat").unwrap()));
    }
}
