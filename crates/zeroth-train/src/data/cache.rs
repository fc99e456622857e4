//! The folder of token caches: where it is, how a cache is found by what it was made of, and how it appears.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::token_file::{TokenFile, VERSION};
use super::{DataError, Encode, PrepareOptions, Truncation};

/// Names the folder of caches.
pub const CACHE_VARIABLE: &str = "ZEROTH_CACHE";

/// Where token caches are kept: a folder, and another for when that one cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheFolder {
    places: Vec<PathBuf>,
}

impl CacheFolder {
    /// Caches in `folder`.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { places: vec![folder.into()] }
    }

    /// Caches in `$ZEROTH_CACHE`, else `$XDG_CACHE_HOME/zeroth`, else `$HOME/.cache/zeroth`; nowhere without any of them.
    pub fn default_place() -> Self {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// As [`Self::default_place`], from variables that a function gives.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let given = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // A relative one counts as unset, as the XDG base directory specification says.
        let home_cache = || {
            let xdg = given("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            xdg.or_else(|| Some(given("HOME")?.join(".cache"))).map(|cache| cache.join("zeroth"))
        };
        Self { places: given(CACHE_VARIABLE).or_else(home_cache).into_iter().collect() }
    }

    /// The same, with a folder to go to where the others cannot be written.
    #[must_use]
    pub fn with_fallback(mut self, folder: impl Into<PathBuf>) -> Self {
        self.places.push(folder.into());
        self
    }

    /// The folders, in the order they are tried.
    pub fn places(&self) -> &[PathBuf] {
        &self.places
    }

    /// Removes the files that this process is writing: it is about to end without finishing them.
    pub fn remove_unfinished(&self) {
        let mark = format!("{UNFINISHED}{}-", std::process::id());
        for place in &self.places {
            let entries = fs::read_dir(place.join("tokens")).into_iter().flatten().flatten();
            for path in entries.map(|entry| entry.path()) {
                if path.file_name().is_some_and(|name| name.to_string_lossy().contains(&mark)) {
                    // Best effort: what stays is void, and swept away after a day.
                    let _ = fs::remove_file(path);
                }
            }
        }
    }

    /// The file of a key in each of the folders.
    pub(super) fn files(&self, key: &[u8; 32]) -> impl Iterator<Item = PathBuf> + use<> {
        // Half of it is a name; all of it stands in the file.
        let name = u128::from_be_bytes(*key.first_chunk().expect("a key has more bytes"));
        self.places
            .clone()
            .into_iter()
            .map(move |place| place.join("tokens").join(format!("{name:032x}.tokens")))
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

/// A cache that is there, made for this key, and whole. Anything else at its place is as good as nothing.
pub(super) fn find(path: &Path, key: &[u8; 32]) -> Option<TokenFile> {
    let file = TokenFile::open(path).ok()?;
    file.verify(key).is_ok().then_some(file)
}

/// A file that is not finished. It is hidden, belongs to one writer, and is gone if it is not published.
pub(super) struct Unfinished {
    path: PathBuf,
    published: bool,
}

impl Unfinished {
    /// Begins a file that is to appear at `place`.
    pub(super) fn create(place: &Path) -> io::Result<(Self, File)> {
        static WRITERS: AtomicU64 = AtomicU64::new(0);
        let folder = place.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        sweep(folder);
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".{name}{UNFINISHED}{}-{writer}", std::process::id()));
        let file = File::create(&path)?;
        // Says to others that somebody is at it. Where a file system has no locks, age alone says so.
        let _ = file.try_lock();
        Ok((Self { path, published: false }, file))
    }

    /// Gives the file, which is complete and synced, its name.
    pub(super) fn publish(mut self, place: &Path) -> io::Result<()> {
        fs::rename(&self.path, place)?;
        self.published = true;
        File::open(place.parent().unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the error that stopped the writing is the one to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}

const UNFINISHED: &str = ".unfinished-";

/// Removes what killed writers left: files that nobody has written to for a day, nor holds.
fn sweep(folder: &Path) {
    const OLD: Duration = Duration::from_hours(24);
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !(name.starts_with('.') && name.contains(UNFINISHED)) {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        let modified = file.metadata().and_then(|found| found.modified());
        let age = modified.ok().and_then(|modified| SystemTime::now().duration_since(modified).ok());
        let is_old = age.is_some_and(|age| age > OLD);
        // Asked of old ones only: asking takes the lock for a moment, and a new one's writer wants it.
        if is_old && !matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            let _ = fs::remove_file(&path);
        }
    }
}
