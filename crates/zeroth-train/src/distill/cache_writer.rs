//! Writes a cache of a teacher's distributions, so that a kill or a full disk leaves what was done usable.
//!
//! Records are appended, synced, and only then counted by the manifest, which is replaced atomically. What lies behind the
//! counted records is cut off when the cache is continued.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use zeroth_base::publish;

use super::CacheManifest;
use super::cache_file::{MANIFEST, RECORDS, TeacherCacheError, is_log_prob, read_manifest};

/// Time between commits.
const INTERVAL: Duration = Duration::from_millis(200);

/// A cache that was opened to be written.
#[derive(Debug)]
pub enum OpenedCache {
    /// It is complete already.
    Complete(CacheManifest),
    /// It is new, or continues an earlier one.
    Open(CacheWriter),
}

/// Writes a cache.
#[derive(Debug)]
pub struct CacheWriter {
    folder: PathBuf,
    file: File,
    /// With the tokens that are committed.
    manifest: CacheManifest,
    /// Tokens written after the last commit.
    pending: u64,
    committed: Instant,
}

impl CacheWriter {
    /// Makes a cache, or continues one of the same data, teacher and settings. `manifest` says what is asked for, with no tokens
    /// done.
    pub fn open(folder: &Path, manifest: &CacheManifest) -> Result<OpenedCache, TeacherCacheError> {
        let found = if let Some(found) = read_manifest(folder)? {
            found
        } else {
            refuse_other_files(folder)?;
            let failed = |source| TeacherCacheError::Write { path: folder.to_owned(), source };
            fs::create_dir_all(folder).map_err(failed)?;
            publish_manifest(folder, manifest)?;
            manifest.clone()
        };
        let differences = found.differences(manifest);
        if !differences.is_empty() {
            let remedy = "give another --output, or the data and flags that it was made with";
            return Err(TeacherCacheError::Other { folder: folder.to_owned(), differences, remedy });
        }
        if found.is_complete() {
            return Ok(OpenedCache::Complete(found));
        }
        let path = folder.join(RECORDS);
        let failed = |source| TeacherCacheError::Write { path: path.clone(), source };
        let file = OpenOptions::new().append(true).create(true).open(&path).map_err(failed)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(TeacherCacheError::Locked { folder: folder.to_owned() });
            }
            // File systems without locks: two writers at once are the user's to avoid.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        // Only now nobody else writes: the manifest may have moved on since it was read.
        let manifest = read_manifest(folder)?.unwrap_or(found);
        let (length, done) =
            (file.metadata().map_err(failed)?.len(), manifest.tokens_done * manifest.record_bytes());
        if length < done {
            let why = format!("it has {length} bytes, and its manifest counts {done}");
            return Err(TeacherCacheError::Damaged { path, why });
        }
        file.set_len(done).map_err(failed)?;
        Ok(OpenedCache::Open(Self {
            folder: folder.to_owned(),
            file,
            manifest,
            pending: 0,
            committed: Instant::now(),
        }))
    }

    /// What the cache is made of, with the tokens that are committed.
    pub fn manifest(&self) -> &CacheManifest {
        &self.manifest
    }

    /// Sets the teacher's identity once all of its weights are loaded. Refuses another one than that of what is done already.
    pub(super) fn identify(&mut self, hash: String) -> Result<(), TeacherCacheError> {
        let saved = &self.manifest.teacher.hash;
        if self.manifest.tokens_done > 0 && *saved != hash {
            let folder = self.folder.clone();
            let differences = vec![format!("the teacher's weights are {hash}, those of the cache {saved}")];
            let remedy = "give another --output, or the teacher that it was made with";
            return Err(TeacherCacheError::Other { folder, differences, remedy });
        }
        self.manifest.teacher.hash = hash;
        Ok(())
    }

    /// Appends the records of whole samples: ids and log-probabilities [tokens, k]. Commits now and then.
    pub(super) fn append(&mut self, ids: &[i32], log_probs: &[f32]) -> Result<(), TeacherCacheError> {
        let k = self.manifest.k as usize;
        let mut records = Vec::with_capacity(8 * ids.len());
        for (ids, log_probs) in ids.chunks_exact(k).zip(log_probs.chunks_exact(k)) {
            records.extend_from_slice(bytemuck::cast_slice(ids));
            records.extend_from_slice(bytemuck::cast_slice(log_probs));
        }
        self.file.write_all(&records).map_err(|source| self.failed(source))?;
        self.pending += (ids.len() / k) as u64;
        if self.committed.elapsed() >= INTERVAL {
            self.commit()?;
        }
        Ok(())
    }

    /// Syncs what was written and counts it.
    pub fn commit(&mut self) -> Result<(), TeacherCacheError> {
        if self.pending > 0 {
            self.file.sync_data().map_err(|source| self.failed(source))?;
            let tokens_done = self.manifest.tokens_done + self.pending;
            let manifest = CacheManifest { tokens_done, ..self.manifest.clone() };
            publish_manifest(&self.folder, &manifest)?;
            (self.manifest, self.pending) = (manifest, 0);
        }
        self.committed = Instant::now();
        Ok(())
    }

    /// An error about what is written.
    pub(super) fn damaged(&self, why: String) -> TeacherCacheError {
        TeacherCacheError::Damaged { path: self.folder.join(MANIFEST), why }
    }

    fn failed(&self, source: io::Error) -> TeacherCacheError {
        TeacherCacheError::Write { path: self.folder.join(RECORDS), source }
    }
}

/// Whether log-probabilities are numbers, which those of a teacher with a non-finite logit are not.
pub(super) fn first_not_finite(log_probs: &[f32], k: u64) -> Option<usize> {
    log_probs.iter().position(|number| !is_log_prob(*number)).map(|place| place / k as usize)
}

fn publish_manifest(folder: &Path, manifest: &CacheManifest) -> Result<(), TeacherCacheError> {
    let text = serde_json::to_string_pretty(manifest).unwrap_or_default();
    Ok(publish(&folder.join(MANIFEST), format!("{text}\n").as_bytes())?)
}

/// Refuses a folder with anything but leftovers of a kill before the first manifest.
fn refuse_other_files(folder: &Path) -> Result<(), TeacherCacheError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            let found = "it is a file".to_owned();
            return Err(TeacherCacheError::Occupied { folder: folder.to_owned(), found });
        }
        Err(source) => return Err(TeacherCacheError::Read { path: folder.to_owned(), source }),
    };
    let leftover = format!(".{MANIFEST}.unfinished-");
    for entry in entries.flatten() {
        let found = entry.file_name().to_string_lossy().into_owned();
        if !found.starts_with(&leftover) {
            return Err(TeacherCacheError::Occupied { folder: folder.to_owned(), found });
        }
    }
    Ok(())
}
