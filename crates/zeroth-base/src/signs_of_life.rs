//! Signs of life in folders that hosts share. A process renews the modification times of what it holds; one that looks on
//! from another host takes for dead what it has seen unchanged for a minute of its own monotonic clock. Times of files are
//! compared for equality alone, so clocks of hosts may differ.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, OFlags, Timespec, Timestamps, UTIME_NOW, futimens, utimensat};

use crate::unfinished::own_unfinished;

/// How long what a process of another host holds may go without a sign of life.
pub const SILENCE: Duration = Duration::from_mins(1);
/// Interval of renewals, several of which may be late.
const RENEWAL: Duration = Duration::from_secs(10);

/// What is renewed while this process lives, besides its unfinished files.
#[derive(Debug, Default)]
struct Held {
    /// Lock files, which another process may have replaced under their path.
    files: Vec<Arc<File>>,
    folders: Vec<PathBuf>,
}

static HELD: Mutex<Held> = Mutex::new(Held { files: Vec::new(), folders: Vec::new() });
/// What was seen of paths of other hosts' processes, and since when.
static SEEN: Mutex<Option<Seen>> = Mutex::new(None);

/// A folder that this process renews until this is dropped.
#[derive(Debug)]
pub struct RenewedFolder(PathBuf);

impl RenewedFolder {
    /// Renews `folder` from now on.
    pub fn new(folder: &Path) -> Self {
        lock(&HELD).folders.push(folder.to_owned());
        renew_from_now_on();
        Self(folder.to_owned())
    }
}

impl Drop for RenewedFolder {
    fn drop(&mut self) {
        lock(&HELD).folders.retain(|folder| *folder != self.0);
    }
}

/// A lock file that this process renews until this is dropped.
#[derive(Debug)]
pub(crate) struct RenewedFile(Arc<File>);

impl RenewedFile {
    pub(crate) fn new(file: Arc<File>) -> Self {
        lock(&HELD).files.push(Arc::clone(&file));
        renew_from_now_on();
        Self(file)
    }
}

impl Drop for RenewedFile {
    fn drop(&mut self) {
        lock(&HELD).files.retain(|file| !Arc::ptr_eq(file, &self.0));
    }
}

/// Starts the thread that renews. Where the system gives none, other hosts may take this process for dead after a minute.
pub(crate) fn renew_from_now_on() {
    static START: Once = Once::new();
    START.call_once(|| {
        let renew_forever = || {
            loop {
                std::thread::sleep(RENEWAL);
                renew();
            }
        };
        let _ = std::thread::Builder::new().name("renewals".to_owned()).spawn(renew_forever);
    });
}

/// Renews everything once. No lock is held meanwhile: a disk may hang.
fn renew() {
    let (files, mut paths) = {
        let held = lock(&HELD);
        (held.files.clone(), held.folders.clone())
    };
    paths.extend(own_unfinished());
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let now = Timestamps { last_access: omit, last_modification: Timespec { tv_nsec: UTIME_NOW, ..omit } };
    for file in files {
        let _ = futimens(&file, &now);
    }
    for path in paths {
        // It may have been published or removed meanwhile.
        let _ = utimensat(CWD, &path, &now, AtFlags::SYMLINK_NOFOLLOW);
    }
}

/// Whether the file or folder at `path` has shown no sign of life for [`SILENCE`], as far as this process has looked.
pub fn is_silent(path: &Path) -> bool {
    let state = FileState::of(path);
    lock(&SEEN).get_or_insert_default().is_silent(path, state, Instant::now(), SILENCE)
}

/// What changes when a file is renewed or written, or something in a folder is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileState(Vec<(i64, i64, u64, u64)>);

impl FileState {
    /// The state of a file, or of a folder and its entries; `None` if it is gone.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let found = metadata(path)?;
        let mut state = vec![state_of(&found)];
        if found.is_dir() {
            let mut paths: Vec<PathBuf> =
                fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).collect();
            paths.sort_unstable();
            state.extend(paths.iter().filter_map(|path| metadata(path)).map(|found| state_of(&found)));
        }
        Some(Self(state))
    }
}

fn state_of(found: &Metadata) -> (i64, i64, u64, u64) {
    (found.mtime(), found.mtime_nsec(), found.len(), found.ino())
}

/// Metadata as the server has it: network file systems look it up anew when a file is opened.
fn metadata(path: &Path) -> Option<Metadata> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    opened.and_then(|file| file.metadata()).or_else(|_| fs::symlink_metadata(path)).ok()
}

/// States of paths, each with the moment since which it is unchanged.
#[derive(Debug, Default)]
struct Seen(HashMap<PathBuf, (FileState, Instant)>);

impl Seen {
    fn is_silent(&mut self, path: &Path, state: Option<FileState>, now: Instant, silence: Duration) -> bool {
        let Some(state) = state else {
            self.0.remove(path);
            return false;
        };
        match self.0.get(path) {
            Some((known, since)) if *known == state => now.duration_since(*since) >= silence,
            _ => {
                self.0.insert(path.to_owned(), (state, now));
                false
            }
        }
    }
}

/// No holder of these locks panics.
fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn later(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn only_a_minute_without_any_change_is_silence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let mut seen = Seen::default();
        let mut look =
            |path: &Path, seconds| seen.is_silent(path, FileState::of(path), later(seconds), SILENCE);
        fs::write(&path, "x").unwrap();
        for watched in [path.as_path(), folder.path()] {
            assert!(!look(watched, 0));
            assert!(!look(watched, 59));
            assert!(look(watched, 61));
        }
        // An entry of the folder grows: both live.
        fs::write(&path, "more").unwrap();
        for watched in [path.as_path(), folder.path()] {
            assert!(!look(watched, 62));
            assert!(!look(watched, 121));
            assert!(look(watched, 123));
        }
        assert!(!look(&folder.path().join("absent"), 0));
    }

    #[test]
    fn clocks_apart_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let hour = Duration::from_hours(1);
        for stamp in [SystemTime::now() - hour, SystemTime::now() + hour] {
            fs::write(&path, "x").unwrap();
            let set = |stamp| File::options().write(true).open(&path).unwrap().set_modified(stamp).unwrap();
            set(stamp);
            let mut seen = Seen::default();
            let mut look = |seconds| seen.is_silent(&path, FileState::of(&path), later(seconds), SILENCE);
            assert!(!look(0) && !look(59) && look(61));
            // Renewed by a clock that stands an hour off.
            set(stamp + RENEWAL);
            assert!(!look(62) && look(123));
        }
    }

    #[test]
    fn what_a_process_holds_is_renewed_until_it_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let [lock, kept] = ["lock", "kept"].map(|name| folder.path().join(name));
        let unfinished = crate::unfinished_path(folder.path(), "shard");
        fs::create_dir(&kept).unwrap();
        let file = Arc::new(File::create(&lock).unwrap());
        crate::create_unfinished(&unfinished).unwrap();
        let renewed = (RenewedFile::new(file), RenewedFolder::new(&kept));
        let paths = [&lock, &kept, &unfinished];
        let states = || paths.map(|path| FileState::of(path).unwrap());
        let changed = |before: &[FileState; 3]| {
            let now = states();
            [0, 1, 2].map(|at| now[at] != before[at])
        };
        let before = states();
        std::thread::sleep(Duration::from_millis(20));
        renew();
        assert_eq!(changed(&before), [true; 3]);
        drop(renewed);
        crate::publish_unfinished(&unfinished, &folder.path().join("shard")).unwrap();
        fs::write(&unfinished, "of nobody").unwrap();
        let before = states();
        std::thread::sleep(Duration::from_millis(20));
        renew();
        assert_eq!(changed(&before), [false; 3]);
    }
}
