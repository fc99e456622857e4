//! Reads a cache of a teacher's distributions: for each token of the token cache, in its order, k ids and k log-probabilities.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crc32c::crc32c;
use zeroth_base::publish;
use zeroth_engine::FurtherInput;

use super::cache_manifest::{CacheManifest, KIND, MANIFEST, RECORDS};
use super::error::TeacherCacheError;
use super::record_checksums::{CheckedRecords, check_records, checksum_bytes, crc32c_of};

/// Bytes of a manifest that are read.
const MOST: u64 = 1 << 20;

/// A complete cache.
#[derive(Debug, Clone)]
pub struct TeacherCache {
    folder: PathBuf,
    records: Arc<CheckedRecords>,
    manifest: CacheManifest,
}

/// A cache whose bytes were compared with their checksums.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedCache {
    /// What it was made of, and how much is done.
    pub manifest: CacheManifest,
    /// Bytes read.
    pub bytes: u64,
    /// Elapsed time.
    pub took: Duration,
}

/// A token's records: what a micro-batch holds of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct TeacherRecords {
    /// The most probable ids [tokens, k].
    pub(crate) ids: Vec<i32>,
    /// Their log-probabilities [tokens, k].
    pub(crate) log_probs: Vec<f32>,
    /// Blocks of records as they are on disk [tokens, 2, k].
    block: Vec<i32>,
}

impl TeacherRecords {
    /// The inputs of a model that is distilled from a cache.
    pub(crate) fn inputs(&self) -> [FurtherInput<'_>; 2] {
        [FurtherInput::Indices(&self.ids), FurtherInput::Statistics(&self.log_probs)]
    }

    pub(crate) fn clear(&mut self) {
        self.ids.clear();
        self.log_probs.clear();
    }
}

/// The manifest of a cache; `None` where the folder has none.
pub(super) fn read_manifest(folder: &Path) -> Result<Option<CacheManifest>, TeacherCacheError> {
    let path = folder.join(MANIFEST);
    let damaged = |why: String| TeacherCacheError::Damaged { path: path.clone(), why };
    match path.metadata() {
        Ok(found) if found.len() > MOST => return Err(damaged("it is too large for a manifest".to_owned())),
        Ok(_) => {}
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(source) => return Err(TeacherCacheError::Read { path, source }),
    }
    let bytes =
        std::fs::read(&path).map_err(|source| TeacherCacheError::Read { path: path.clone(), source })?;
    // A manifest of something else has no `kind` of ours.
    let found =
        serde_json::from_slice::<serde_json::Value>(&bytes).map_err(|error| damaged(error.to_string()))?;
    if found["kind"] != KIND {
        let found = format!("a {MANIFEST} of something else");
        return Err(TeacherCacheError::Occupied { folder: folder.to_owned(), found });
    }
    let is_sealed = found.get("crc32c").is_some();
    let manifest: CacheManifest =
        serde_json::from_value(found).map_err(|error| damaged(error.to_string()))?;
    if is_sealed || manifest.checksums.is_some() {
        check_seal(&bytes).map_err(damaged)?;
    }
    manifest.check().map_err(damaged)?;
    Ok(Some(manifest))
}

/// Publishes the manifest of a cache, with its own checksum as the last field.
pub(super) fn publish_manifest(folder: &Path, manifest: &CacheManifest) -> Result<(), TeacherCacheError> {
    let text = serde_json::to_string_pretty(manifest).unwrap_or_default();
    let fields = text.trim_end_matches('}').trim_end();
    let sealed = format!("{fields}{}", seal(fields.as_bytes()));
    Ok(publish(&folder.join(MANIFEST), sealed.as_bytes())?)
}

/// The end of a manifest behind `fields`.
fn seal(fields: &[u8]) -> String {
    format!(",\n  \"crc32c\": \"{:08x}\"\n}}\n", crc32c(fields))
}

/// Checks that a manifest has the bytes that it was published with.
fn check_seal(bytes: &[u8]) -> Result<(), String> {
    let (fields, end) = bytes.split_at(bytes.len().saturating_sub(seal(&[]).len()));
    if end == seal(fields).as_bytes() {
        Ok(())
    } else {
        Err(format!("its last field is not the CRC32C of those before it, {:08x}", crc32c(fields)))
    }
}

impl TeacherCache {
    /// Opens a complete cache.
    pub fn open(folder: &Path) -> Result<Self, TeacherCacheError> {
        let Some(manifest) = read_manifest(folder)? else {
            return Err(TeacherCacheError::None { folder: folder.to_owned() });
        };
        if !manifest.is_complete() {
            let (done, tokens) = (manifest.tokens_done, manifest.data.tokens);
            return Err(TeacherCacheError::Incomplete { folder: folder.to_owned(), done, tokens });
        }
        let records = Arc::new(CheckedRecords::open(folder, &manifest)?);
        Ok(Self { folder: folder.to_owned(), records, manifest })
    }

    /// Whether a folder looks like one of a cache, of a damaged one too.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(RECORDS).is_file() || matches!(read_manifest(folder), Ok(Some(_)))
    }

    /// Compares all bytes of a cache with their checksums, those of a cache that is not complete included.
    pub fn verify(folder: &Path) -> Result<VerifiedCache, TeacherCacheError> {
        let begin = Instant::now();
        let Some(manifest) = read_manifest(folder)? else {
            return Err(TeacherCacheError::None { folder: folder.to_owned() });
        };
        CheckedRecords::open(folder, &manifest)?.read_all(&manifest, |_| ())?;
        let sums = manifest.checksums.map_or(0, |sums| checksum_bytes(manifest.tokens_done, sums.tokens));
        let bytes = manifest.tokens_done * manifest.record_bytes() + sums;
        Ok(VerifiedCache { manifest, bytes, took: begin.elapsed() })
    }

    /// What it was made of, and checksums of all its records: equal for equal caches. Reads the whole of a cache that has no
    /// checksums.
    pub fn identity(&self) -> Result<String, TeacherCacheError> {
        let manifest = serde_json::to_string(&self.manifest).unwrap_or_default();
        let mut identity = format!("{:08x}", crc32c(manifest.as_bytes()));
        if self.manifest.checksums.is_none() {
            let bytes = self.manifest.data.tokens * self.manifest.record_bytes();
            let path = self.folder.join(RECORDS);
            let records = std::fs::File::open(&path).and_then(|file| crc32c_of(&file, bytes));
            let records = records.map_err(|source| TeacherCacheError::Read { path, source })?;
            identity = format!("{identity}-{records:08x}");
        }
        Ok(identity)
    }

    /// What a user should know about it.
    pub fn note(&self) -> Option<String> {
        self.manifest.checksums.is_none().then(|| {
            format!(
                "{} has no checksums: an earlier version made it, and damage to it is not noticed; the same `zeroth distill \
                 cache` command adds them",
                self.folder.display()
            )
        })
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it was made of.
    pub fn manifest(&self) -> &CacheManifest {
        &self.manifest
    }

    /// Appends the records of `tokens` tokens, the first of which is token `first` of the token cache.
    pub(crate) fn append(
        &self,
        first: u64,
        tokens: u64,
        into: &mut TeacherRecords,
    ) -> Result<(), TeacherCacheError> {
        let k = self.manifest.k as usize;
        let from = self.records.read(first, tokens, &mut into.block)?;
        let records = &into.block[from..][..tokens as usize * 2 * k];
        check_records(records, first, &self.manifest)
            .map_err(|why| TeacherCacheError::Damaged { path: self.records.path(), why })?;
        for record in records.chunks_exact(2 * k) {
            let (ids, log_probs) = record.split_at(k);
            into.ids.extend_from_slice(ids);
            into.log_probs.extend(log_probs.iter().map(|bits| f32::from_bits(bits.cast_unsigned())));
        }
        Ok(())
    }
}
