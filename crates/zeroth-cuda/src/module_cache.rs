//! Compiled kernels on disk, shared by the processes of a user.

use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use zeroth_base::publish;

/// The longest wait for another process that compiles the same kernels; after it this one compiles them, too.
const PATIENCE: Duration = Duration::from_mins(3);
const LOOK: Duration = Duration::from_millis(50);

/// The folder of compiled kernels.
pub(super) struct ModuleCache {
    /// `None` where no folder is known: nothing is kept.
    folder: Option<PathBuf>,
}

impl ModuleCache {
    /// The folder for this process's environment.
    pub(super) fn of_this_user() -> Self {
        let given = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let folder = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
        Self { folder: folder.map(|folder| folder.join("zeroth")) }
    }

    /// Reads a file; `None` where it is missing or not what NVRTC writes.
    pub(super) fn read(&self, name: &str) -> Option<Vec<u8>> {
        let image = std::fs::read(self.folder.as_ref()?.join(name)).ok()?;
        // Cubins are ELF files and PTX begins with a comment; the driver is not given anything else.
        (image.starts_with(b"\x7fELF") || image.starts_with(b"//")).then_some(image)
    }

    /// Writes a file. Failures are ignored: the next start recompiles.
    pub(super) fn write(&self, name: &str, image: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if std::fs::create_dir_all(folder).is_ok() {
            let _ = publish(&folder.join(name), image);
        }
    }

    /// Keeps other processes from compiling until the result is dropped: the ranks of a host start at the same time and
    /// need the same kernels. `None` where they cannot be kept from it, or hold the lock for too long.
    pub(super) fn lock(&self) -> Option<File> {
        self.lock_within(PATIENCE)
    }

    fn lock_within(&self, patience: Duration) -> Option<File> {
        let folder = self.folder.as_ref()?;
        std::fs::create_dir_all(folder).ok()?;
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(folder.join("kernels.lock"))
            .ok()?;
        let begun = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(file),
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => std::thread::sleep(LOOK),
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_damaged_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ModuleCache { folder: Some(folder.path().join("zeroth")) };
        assert_eq!(cache.read("a"), None);
        for image in [&b"\x7fELFx"[..], b"//\n// PTX"] {
            cache.write("a", image);
            assert_eq!(cache.read("a").as_deref(), Some(image));
        }
        cache.write("a", b"damaged");
        assert_eq!(cache.read("a"), None);
    }

    #[test]
    fn one_process_compiles_at_a_time_and_nobody_waits_forever() {
        let folder = tempfile::tempdir().unwrap();
        let cache = || ModuleCache { folder: Some(folder.path().to_owned()) };
        let held = cache().lock().unwrap();
        assert!(cache().lock_within(Duration::from_millis(120)).is_none());
        drop(held);
        assert!(cache().lock_within(Duration::ZERO).is_some());
        assert!(ModuleCache { folder: None }.lock().is_none());
    }
}
