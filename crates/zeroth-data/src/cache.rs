//! The token cache directory: location, lookup by content key, and atomic publication.
//!
//! A cache is private to one user, because anyone who can write to it controls what is trained. The directory is mode
//! 0700, files of other owners are ignored, and names are resolved relative to a checked directory handle, never
//! along a path that may have changed. Without such a directory, tokens go into an unnamed temporary file.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rayon::prelude::*;
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use zeroth_base::{ProcessOwner, sync_folder};

use super::rows::table_delimiter;
use super::token_file::{TokenFile, VERSION};
use super::{DataError, Encode, PrepareOptions, Samples, Truncation};

/// The environment variable with the cache directory.
pub const CACHE_VARIABLE: &str = "ZEROTH_CACHE";

/// The location of token caches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheFolder {
    folder: Option<PathBuf>,
    /// Whether the user chose this directory: then its permissions are not changed, and there is no fallback.
    is_explicit: bool,
    /// Directory for an unnamed temporary file if the cache directory cannot be used.
    temporary_in: Option<PathBuf>,
}

impl CacheFolder {
    /// Caches in `folder`.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), is_explicit: true, temporary_in: None }
    }

    /// Caches in `$ZEROTH_CACHE`, else `$XDG_CACHE_HOME/zeroth`, else `$HOME/.cache/zeroth`; nowhere if none is set.
    pub fn default_location() -> Self {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// As [`Self::default_location`], with variables from a function.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let given = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(named) = given(CACHE_VARIABLE) {
            return Self::at(named);
        }
        // The XDG base directory specification requires relative paths to be ignored.
        let xdg = given("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let cache = xdg.or_else(|| Some(given("HOME")?.join(".cache")));
        Self { folder: cache.map(|cache| cache.join("zeroth")), ..Self::default() }
    }

    /// Falls back to an unnamed temporary file in `folder` if the default directory cannot be used. Such a file is
    /// freed when the last process closes it. A directory chosen by the user is used or refused.
    #[must_use]
    pub fn or_temporary_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.temporary_in = (!self.is_explicit).then(|| folder.into());
        self
    }

    /// The directory.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Removes the files that this process is writing; called before it exits without finishing them.
    pub fn remove_unfinished(&self) {
        let mark = format!("{UNFINISHED}{}-", ProcessOwner::own());
        let folder = self.folder.iter().map(|folder| folder.join(TOKENS)).chain(self.temporary_in.clone());
        for path in folder.flat_map(fs::read_dir).flatten().flatten().map(|entry| entry.path()) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().contains(&mark)) {
                // Best effort: leftovers are invalid, and swept after a day.
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Destinations for a cache, in the order to try.
    pub(super) fn destinations(&self) -> Vec<(PathBuf, io::Result<CacheDestination>)> {
        let folder = self.folder.as_ref().map(|folder| {
            let tokens = TokenFolder::open(folder, self.is_explicit);
            (folder.join(TOKENS), tokens.map(CacheDestination::Folder))
        });
        let temporary_file = self.temporary_in.as_ref();
        let temporary_file =
            temporary_file.map(|folder| (folder.clone(), Ok(CacheDestination::Temporary(folder.clone()))));
        folder.into_iter().chain(temporary_file).collect()
    }
}

/// The cache key: hash of file contents, encoder, options and format version.
pub(super) fn key(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
) -> Result<[u8; 32], DataError> {
    let contents: Vec<[u8; 32]> = files.par_iter().map(|path| digest(path)).collect::<Result<_, _>>()?;
    let PrepareOptions { max_length, truncation, max_samples, packing } = *options;
    let truncation: u8 = match truncation {
        Truncation::Drop => 0,
        Truncation::Left => 1,
        Truncation::Right => 2,
    };
    let mut key = Sha256::new();
    key.update(VERSION.to_le_bytes());
    key.update(encoder.fingerprint());
    key.update(max_length.to_le_bytes());
    key.update([truncation, u8::from(packing)]);
    key.update(max_samples.map_or(0, u64::from).to_le_bytes());
    for (path, content) in files.iter().zip(contents) {
        key.update(content);
        if let Some(delimiter) = table_delimiter(path) {
            key.update([b't', delimiter]);
        }
    }
    Ok(key.finalize().into())
}

fn digest(path: &Path) -> Result<[u8; 32], DataError> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut read_all = || -> io::Result<()> {
        let mut file = File::open(path)?;
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => digest.update(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    };
    read_all().map_err(|source| DataError::Read { path: path.to_owned(), line: 1, source })?;
    Ok(digest.finalize().into())
}

/// A destination of a token cache.
pub(super) enum CacheDestination {
    /// A named file, which later runs can find.
    Folder(TokenFolder),
    /// An unnamed temporary file in this folder.
    Temporary(PathBuf),
}

impl CacheDestination {
    /// An existing valid cache for this key. Anything else under its name is ignored.
    pub(super) fn find(&self, key: &[u8; 32]) -> Option<(Samples, PathBuf)> {
        let Self::Folder(folder) = self else { return None };
        let name = file_name(key);
        let path = folder.path.join(&name);
        let file = TokenFile::new(folder.open_own(&name).ok()?, &path).ok()?;
        file.verify(key).ok()?;
        Some((Samples::of_file(file).ok()?, path))
    }

    /// Creates the file for a key.
    pub(super) fn create(&self, key: &[u8; 32]) -> io::Result<Unfinished<'_>> {
        match self {
            Self::Folder(folder) => folder.create(file_name(key)),
            Self::Temporary(folder) => Ok(Unfinished { file: temporary_file(folder)?, name: None }),
        }
    }
}

/// The name holds half of the key; the file holds all of it.
fn file_name(key: &[u8; 32]) -> String {
    let name = u128::from_be_bytes(*key.first_chunk().expect("a key has more bytes"));
    format!("{name:032x}.tokens")
}

/// The subdirectory of token caches.
const TOKENS: &str = "tokens";

/// A directory that only this user can write to.
pub(super) struct TokenFolder {
    open: OwnedFd,
    path: PathBuf,
}

impl TokenFolder {
    /// Opens the token directory in `cache`, creating it if missing.
    fn open(cache: &Path, is_explicit: bool) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(cache)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above = rustix::fs::open(cache, flags, Mode::empty())?;
        make_private(&above, cache, is_explicit)?;
        match rustix::fs::mkdirat(&above, TOKENS, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let path = cache.join(TOKENS);
        let open = rustix::fs::openat(&above, TOKENS, flags | OFlags::NOFOLLOW, Mode::empty())?;
        make_private(&open, &path, false)?;
        Ok(Self { open, path })
    }

    /// Opens a file that this user owns and nobody else can write to.
    fn open_own(&self, name: &str) -> io::Result<File> {
        // Without NONBLOCK, opening a pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.open, name, flags, Mode::empty())?);
        let found = file.metadata()?;
        let is_own = found.is_file() && found.uid() == user() && found.mode() & 0o022 == 0;
        if is_own { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// Creates a file that will be published as `name`.
    fn create(&self, name: String) -> io::Result<Unfinished<'_>> {
        static WRITERS: AtomicU64 = AtomicU64::new(0);
        self.sweep();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (hidden, file) = loop {
            let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
            let hidden = format!(".{name}{UNFINISHED}{}-{writer}", ProcessOwner::own());
            match rustix::fs::openat(&self.open, &hidden, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => break (hidden, File::from(file)),
                // Planted: no other process has this name.
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        };
        // Marks the file as in use. On file systems without locks, only its age counts.
        let _ = file.try_lock();
        Ok(Unfinished { file, name: Some(Hidden { folder: self, own: hidden, name, published: false }) })
    }

    /// Removes leftovers of killed writers: files not modified for a day and not locked.
    fn sweep(&self) {
        const OLD: Duration = Duration::from_hours(24);
        let Ok(entries) = Dir::read_from(&self.open) else { return };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().to_str() else { continue };
            if !(name.starts_with('.') && name.contains(UNFINISHED)) {
                continue;
            }
            let Ok(file) = self.open_own(name) else { continue };
            let modified = file.metadata().and_then(|found| found.modified());
            let age = modified.ok().and_then(|modified| SystemTime::now().duration_since(modified).ok());
            let is_old = age.is_some_and(|age| age > OLD);
            // Only old files are tested: testing takes the lock briefly, which a new writer needs.
            if is_old && !matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
                let _ = rustix::fs::unlinkat(&self.open, name, AtFlags::empty());
            }
        }
    }
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Rejects a directory of another user, or one that others can write to. Removes their permissions where the
/// directory is the default one.
fn make_private(folder: &OwnedFd, path: &Path, is_explicit: bool) -> io::Result<()> {
    let found = rustix::fs::fstat(folder)?;
    let refused = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if found.st_uid != user() {
        let (path, owner) = (path.display(), found.st_uid);
        return refused(format!("{path} belongs to user {owner}, not to the current user {}", user()));
    }
    let mode = found.st_mode & 0o777;
    let (is_readable_for_others, is_open_to_others) = (mode & 0o077 != 0, mode & 0o022 != 0);
    if !is_readable_for_others || (is_explicit && !is_open_to_others) {
        return Ok(());
    }
    if is_explicit {
        let path = path.display();
        return refused(format!("others may write to {path} (mode {mode:04o}): chmod go-w {path}"));
    }
    match rustix::fs::fchmod(folder, Mode::RWXU) {
        // Read access does not affect what is trained, so a read-only file system is accepted.
        Err(error) if is_open_to_others => Err(error.into()),
        _ => Ok(()),
    }
}

/// Creates an unnamed temporary file in `folder`.
fn temporary_file(folder: &Path) -> io::Result<File> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match rustix::fs::open(folder, flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(file.into()),
        // The file system does not support O_TMPFILE.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    for number in 0.. {
        let path = folder.join(format!(".tokens{UNFINISHED}{}-{number}", ProcessOwner::own()));
        match rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode) {
            Ok(file) => {
                rustix::fs::unlink(&path)?;
                return Ok(file.into());
            }
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    unreachable!("some number is unused")
}

/// An unfinished file. A named one is hidden until published, and removed on drop otherwise.
pub(super) struct Unfinished<'a> {
    file: File,
    name: Option<Hidden<'a>>,
}

struct Hidden<'a> {
    folder: &'a TokenFolder,
    own: String,
    name: String,
    published: bool,
}

impl Unfinished<'_> {
    /// The file to write to.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Renames the complete, synced file to its final name. Returns the path by which other processes open it.
    pub(super) fn publish(self) -> io::Result<(File, PathBuf)> {
        let Some(mut name) = self.name else {
            let path = format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd());
            return Ok((self.file, path.into()));
        };
        let folder = &name.folder.open;
        rustix::fs::renameat(folder, &name.own, folder, &name.name)?;
        name.published = true;
        sync_folder(&name.folder.path)?;
        Ok((self.file, name.folder.path.join(&name.name)))
    }
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the original error is the one to report.
            let _ = rustix::fs::unlinkat(&self.folder.open, &self.own, AtFlags::empty());
        }
    }
}

const UNFINISHED: &str = ".unfinished-";
