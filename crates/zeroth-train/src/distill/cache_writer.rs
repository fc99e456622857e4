//! Writes a cache of a teacher's distributions, so that a kill or a full disk leaves what was done usable.
//!
//! Records and checksums are appended, synced, and only then counted by the manifest, which is replaced atomically. What lies
//! behind the counted records is cut off when the cache is continued. All that is counted is verified then.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use zeroth_base::{parse_unfinished, remove_abandoned};

use super::cache_file::{publish_manifest, read_manifest};
use super::cache_manifest::{BlockChecksums, CHECKSUMS, CacheManifest, FORMAT_VERSION, MANIFEST, RECORDS};
use super::error::TeacherCacheError;
use super::record_checksums::{CheckedRecords, RunningChecksums, checksum_bytes, is_log_prob};

/// Time between commits.
const INTERVAL: Duration = Duration::from_millis(200);

/// A cache that was opened to be written.
#[derive(Debug)]
pub enum OpenedCache {
    /// It is complete already, and all of it was verified.
    Complete {
        /// What it was made of.
        manifest: CacheManifest,
        /// Whether an earlier version made it, and its checksums were added now.
        added_checksums: bool,
    },
    /// It is new, or continues an earlier one.
    Open(CacheWriter),
}

/// Writes a cache.
#[derive(Debug)]
pub struct CacheWriter {
    folder: PathBuf,
    file: File,
    checksums_file: File,
    checksums: RunningChecksums,
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
        if found.is_complete() && found.checksums.is_some() {
            CheckedRecords::open(folder, &found)?.read_all(&found, |_| ())?;
            return Ok(OpenedCache::Complete { manifest: found, added_checksums: false });
        }
        let path = folder.join(RECORDS);
        let failed = |source| TeacherCacheError::Write { path: path.clone(), source };
        let file = appended(&path)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(TeacherCacheError::Locked { folder: folder.to_owned() });
            }
            // File systems without locks: two writers at once are the user's to avoid.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        remove_abandoned(folder, |name| name == MANIFEST);
        // Only now nobody else writes: the manifest may have moved on since it was read.
        let manifest = read_manifest(folder)?.unwrap_or(found);
        let checksums_file = appended(&folder.join(CHECKSUMS))?;
        let records = CheckedRecords::open(folder, &manifest)?;
        let tokens = manifest.tokens_done;
        let record_bytes = manifest.record_bytes();
        let checksums = if let Some(sums) = manifest.checksums {
            records.read_all(&manifest, |_| ())?;
            RunningChecksums::after(tokens, sums)
        } else {
            // An earlier version made it.
            let mut checksums = RunningChecksums::after(0, BlockChecksums::new(record_bytes));
            records.read_all(&manifest, |records| checksums.append(records, record_bytes))?;
            checksums
        };
        file.set_len(tokens * record_bytes).map_err(failed)?;
        let added_checksums = manifest.checksums.is_none();
        let (folder, committed) = (folder.to_owned(), Instant::now());
        let mut writer = Self { folder, file, checksums_file, checksums, manifest, pending: 0, committed };
        writer.publish_progress()?;
        if writer.manifest.is_complete() {
            return Ok(OpenedCache::Complete { manifest: writer.manifest, added_checksums });
        }
        Ok(OpenedCache::Open(writer))
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
        self.checksums.append(&records, self.manifest.record_bytes());
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
            self.publish_progress()?;
        }
        self.committed = Instant::now();
        Ok(())
    }

    /// Writes the checksums of what was written, and counts it. What an attempt that failed has left is written over.
    fn publish_progress(&mut self) -> Result<(), TeacherCacheError> {
        let path = self.folder.join(CHECKSUMS);
        let committed =
            self.manifest.checksums.map_or(0, |sums| checksum_bytes(self.manifest.tokens_done, sums.tokens));
        let mut written = || {
            self.checksums_file.set_len(committed)?;
            self.checksums_file.write_all(&self.checksums.pending)?;
            self.checksums_file.sync_data()
        };
        written().map_err(|source| TeacherCacheError::Write { path, source })?;
        let manifest = CacheManifest {
            format_version: FORMAT_VERSION,
            tokens_done: self.manifest.tokens_done + self.pending,
            checksums: Some(self.checksums.now()),
            ..self.manifest.clone()
        };
        publish_manifest(&self.folder, &manifest)?;
        self.checksums.pending.clear();
        (self.manifest, self.pending) = (manifest, 0);
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

/// Opens a file to append to it.
fn appended(path: &Path) -> Result<File, TeacherCacheError> {
    let failed = |source| TeacherCacheError::Write { path: path.to_owned(), source };
    OpenOptions::new().append(true).create(true).open(path).map_err(failed)
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
    for entry in entries.flatten() {
        let found = entry.file_name().to_string_lossy().into_owned();
        if parse_unfinished(&found).is_none_or(|(name, _)| name != MANIFEST) {
            return Err(TeacherCacheError::Occupied { folder: folder.to_owned(), found });
        }
    }
    Ok(())
}
