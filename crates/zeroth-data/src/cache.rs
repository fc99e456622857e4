//! The folder of token caches: where it is, how a cache is found by what it was made of, and how it appears.
//!
//! A cache belongs to one user: whoever can write to it decides what is trained. Its folder is the user's alone, files of
//! another owner are as good as none, and names are looked up below a folder that was checked, never along a path that
//! could lead elsewhere by now. Where there is no such folder, tokens go into a file without a name.

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
use zeroth_base::sync_folder;

use super::token_file::{TokenFile, VERSION};
use super::{DataError, Encode, PrepareOptions, Samples, Truncation};

/// Names the folder of caches.
pub const CACHE_VARIABLE: &str = "ZEROTH_CACHE";

/// Where token caches are kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheFolder {
    folder: Option<PathBuf>,
    /// Whether somebody named this very folder: then its permissions are not ours to change, and no other will do.
    is_named: bool,
    /// Where a file without a name is made when the folder cannot be used.
    unnamed_in: Option<PathBuf>,
}

impl CacheFolder {
    /// Caches in `folder`.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), is_named: true, unnamed_in: None }
    }

    /// Caches in `$ZEROTH_CACHE`, else `$XDG_CACHE_HOME/zeroth`, else `$HOME/.cache/zeroth`; nowhere without any of them.
    pub fn default_place() -> Self {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// As [`Self::default_place`], from variables that a function gives.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let given = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(named) = given(CACHE_VARIABLE) {
            return Self::at(named);
        }
        // A relative one counts as unset, as the XDG base directory specification says.
        let xdg = given("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let cache = xdg.or_else(|| Some(given("HOME")?.join(".cache")));
        Self { folder: cache.map(|cache| cache.join("zeroth")), ..Self::default() }
    }

    /// The same, with a file without a name in `folder` where the default place cannot be used or there is none. Such a file
    /// is gone with the last process that has it open. A folder that was named is used or refused.
    #[must_use]
    pub fn or_unnamed_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.unnamed_in = (!self.is_named).then(|| folder.into());
        self
    }

    /// The folder.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Removes the files that this process is writing: it is about to end without finishing them.
    pub fn remove_unfinished(&self) {
        let mark = format!("{UNFINISHED}{}-", std::process::id());
        let folder = self.folder.iter().map(|folder| folder.join(TOKENS)).chain(self.unnamed_in.clone());
        for path in folder.flat_map(fs::read_dir).flatten().flatten().map(|entry| entry.path()) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().contains(&mark)) {
                // Best effort: what stays is void, and swept away after a day.
                let _ = fs::remove_file(path);
            }
        }
    }

    /// What a cache can be written to, in the order to try.
    pub(super) fn destinations(&self) -> Vec<(PathBuf, io::Result<Destination>)> {
        let folder = self.folder.as_ref().map(|folder| {
            let tokens = TokenFolder::open(folder, self.is_named);
            (folder.join(TOKENS), tokens.map(Destination::Folder))
        });
        let unnamed = self.unnamed_in.as_ref();
        let unnamed = unnamed.map(|folder| (folder.clone(), Ok(Destination::Unnamed(folder.clone()))));
        folder.into_iter().chain(unnamed).collect()
    }
}

/// What a cache is known by: the contents of the files, the encoder, the options, and the format.
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
    for content in contents {
        key.update(content);
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

/// What a cache of tokens is written to.
pub(super) enum Destination {
    /// A file with a name, to be found again.
    Folder(TokenFolder),
    /// A file without a name, in this folder.
    Unnamed(PathBuf),
}

impl Destination {
    /// A cache that is there, made for this key, and whole. Anything else under its name is as good as nothing.
    pub(super) fn find(&self, key: &[u8; 32]) -> Option<(Samples, PathBuf)> {
        let Self::Folder(folder) = self else { return None };
        let name = file_name(key);
        let path = folder.path.join(&name);
        let file = TokenFile::new(folder.open_own(&name).ok()?, &path).ok()?;
        file.verify(key).ok()?;
        Some((Samples::of_file(file).ok()?, path))
    }

    /// Begins the file of a key.
    pub(super) fn create(&self, key: &[u8; 32]) -> io::Result<Unfinished<'_>> {
        match self {
            Self::Folder(folder) => folder.create(file_name(key)),
            Self::Unnamed(folder) => Ok(Unfinished { file: unnamed(folder)?, name: None }),
        }
    }
}

/// Half of a key is a name; all of it stands in the file.
fn file_name(key: &[u8; 32]) -> String {
    let name = u128::from_be_bytes(*key.first_chunk().expect("a key has more bytes"));
    format!("{name:032x}.tokens")
}

/// The folder of tokens in the folder of caches.
const TOKENS: &str = "tokens";

/// A folder that only this user can write to.
pub(super) struct TokenFolder {
    open: OwnedFd,
    path: PathBuf,
}

impl TokenFolder {
    /// Opens the folder of tokens in `cache`, and makes what is missing.
    fn open(cache: &Path, is_named: bool) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(cache)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above = rustix::fs::open(cache, flags, Mode::empty())?;
        make_private(&above, cache, is_named)?;
        match rustix::fs::mkdirat(&above, TOKENS, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let path = cache.join(TOKENS);
        let open = rustix::fs::openat(&above, TOKENS, flags | OFlags::NOFOLLOW, Mode::empty())?;
        make_private(&open, &path, false)?;
        Ok(Self { open, path })
    }

    /// Opens a file that this user wrote and nobody else can write to.
    fn open_own(&self, name: &str) -> io::Result<File> {
        // Without NONBLOCK, a pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.open, name, flags, Mode::empty())?);
        let found = file.metadata()?;
        let is_own = found.is_file() && found.uid() == user() && found.mode() & 0o022 == 0;
        if is_own { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// Begins a file that is to appear as `name`.
    fn create(&self, name: String) -> io::Result<Unfinished<'_>> {
        static WRITERS: AtomicU64 = AtomicU64::new(0);
        self.sweep();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (hidden, file) = loop {
            let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
            let hidden = format!(".{name}{UNFINISHED}{}-{writer}", std::process::id());
            match rustix::fs::openat(&self.open, &hidden, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => break (hidden, File::from(file)),
                // A writer of the same id was killed: its file is not ours to write to.
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        };
        // Says to others that somebody is at it. Where a file system has no locks, age alone says so.
        let _ = file.try_lock();
        Ok(Unfinished { file, name: Some(Hidden { folder: self, own: hidden, name, published: false }) })
    }

    /// Removes what killed writers left: files that nobody has written to for a day, nor holds.
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
            // Asked of old ones only: asking takes the lock for a moment, and a new one's writer wants it.
            if is_old && !matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
                let _ = rustix::fs::unlinkat(&self.open, name, AtFlags::empty());
            }
        }
    }
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Refuses a folder of another user, and one that others may write to; the latter is closed to them where it is ours alone
/// to decide.
fn make_private(folder: &OwnedFd, path: &Path, is_named: bool) -> io::Result<()> {
    let found = rustix::fs::fstat(folder)?;
    let refused = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if found.st_uid != user() {
        let (path, owner) = (path.display(), found.st_uid);
        return refused(format!("{path} belongs to user {owner}, and user {} runs this", user()));
    }
    let mode = found.st_mode & 0o777;
    let (is_readable_for_others, is_open_to_others) = (mode & 0o077 != 0, mode & 0o022 != 0);
    if !is_readable_for_others || (is_named && !is_open_to_others) {
        return Ok(());
    }
    if is_named {
        let path = path.display();
        return refused(format!("others may write to {path} (mode {mode:04o}): chmod go-w {path}"));
    }
    match rustix::fs::fchmod(folder, Mode::RWXU) {
        // Reading alone changes nothing of what is trained: a file system that was mounted to be read may stay as it is.
        Err(error) if is_open_to_others => Err(error.into()),
        _ => Ok(()),
    }
}

/// A file without a name in `folder`.
fn unnamed(folder: &Path) -> io::Result<File> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match rustix::fs::open(folder, flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(file.into()),
        // The file system has no such files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    for number in 0.. {
        let path = folder.join(format!(".tokens{UNFINISHED}{}-{number}", std::process::id()));
        match rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode) {
            Ok(file) => {
                rustix::fs::unlink(&path)?;
                return Ok(file.into());
            }
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    unreachable!("numbers do not end before names are free")
}

/// A file that is not finished. Where it is to have a name, it is hidden, belongs to one writer, and is gone if it is not
/// published.
pub(super) struct Unfinished<'a> {
    file: File,
    name: Option<Hidden<'a>>,
}

struct Hidden<'a> {
    folder: &'a TokenFolder,
    /// The name until then.
    own: String,
    name: String,
    published: bool,
}

impl Unfinished<'_> {
    /// What to write to.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Gives the file, which is complete and synced, its name; and the path that other processes open it by.
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
            // Best effort: the error that stopped the writing is the one to tell.
            let _ = rustix::fs::unlinkat(&self.folder.open, &self.own, AtFlags::empty());
        }
    }
}

const UNFINISHED: &str = ".unfinished-";
