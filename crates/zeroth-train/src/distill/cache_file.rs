//! Reads a cache of a teacher's distributions: for each token of the token cache, in its order, k ids and k log-probabilities.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zeroth_base::{PublishError, counted, grouped};

use super::CacheManifest;

pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const RECORDS: &str = "records.bin";
/// Bytes of a manifest that are read.
const MOST: u64 = 1 << 20;

/// A cache that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TeacherCacheError {
    /// A folder without a cache.
    #[error("{} is no teacher cache (it has no manifest.json): `zeroth distill cache --output` makes one", folder.display())]
    None {
        /// The folder.
        folder: PathBuf,
    },
    /// A folder with something else.
    #[error("{} holds something else ({found}): give --output a new or an empty folder", folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
        /// One of its entries.
        found: String,
    },
    /// A damaged cache.
    #[error("{} is damaged: {why}; remove the folder and make the cache again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A cache that is not complete.
    #[error(
        "{} has {} of {}: the same `zeroth distill cache` command continues it", folder.display(), grouped(*done),
        counted(*tokens, "token")
    )]
    Incomplete {
        /// The folder.
        folder: PathBuf,
        /// Tokens done.
        done: u64,
        /// All tokens.
        tokens: u64,
    },
    /// A cache of something else than was asked for.
    #[error("{} is a cache of something else: {}; {remedy}", folder.display(), differences.join("; "))]
    Other {
        /// The folder.
        folder: PathBuf,
        /// What differs.
        differences: Vec<String>,
        /// What to do.
        remedy: &'static str,
    },
    /// Another process writes it.
    #[error("{} is being written by another process: wait until it ends, or give another --output", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The manifest could not be written.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

/// A complete cache.
#[derive(Debug, Clone)]
pub struct TeacherCache {
    folder: PathBuf,
    file: Arc<File>,
    manifest: CacheManifest,
}

/// A token's records: what a micro-batch holds of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct TeacherRows {
    /// The most probable ids [tokens, k].
    pub(crate) ids: Vec<i32>,
    /// Their log-probabilities [tokens, k].
    pub(crate) log_probs: Vec<f32>,
    /// Records as they are on disk [tokens, 2, k].
    records: Vec<i32>,
}

impl TeacherRows {
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
    let kind =
        serde_json::from_slice::<serde_json::Value>(&bytes).map_err(|error| damaged(error.to_string()))?;
    if kind["kind"] != super::cache_manifest::KIND {
        let found = format!("a {MANIFEST} of something else");
        return Err(TeacherCacheError::Occupied { folder: folder.to_owned(), found });
    }
    let manifest: CacheManifest = serde_json::from_value(kind).map_err(|error| damaged(error.to_string()))?;
    manifest.check().map_err(damaged)?;
    Ok(Some(manifest))
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
        let path = folder.join(RECORDS);
        let file =
            File::open(&path).map_err(|source| TeacherCacheError::Read { path: path.clone(), source })?;
        let found =
            file.metadata().map_err(|source| TeacherCacheError::Read { path: path.clone(), source })?;
        let (found, expected) = (found.len(), manifest.data.tokens * manifest.record_bytes());
        if found != expected {
            let why = format!("it has {found} bytes, and its manifest says {expected}");
            return Err(TeacherCacheError::Damaged { path, why });
        }
        Ok(Self { folder: folder.to_owned(), file: Arc::new(file), manifest })
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
        into: &mut TeacherRows,
    ) -> Result<(), TeacherCacheError> {
        let path = || self.folder.join(RECORDS);
        let k = self.manifest.k as usize;
        into.records.resize(tokens as usize * 2 * k, 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut into.records);
        let at = first * self.manifest.record_bytes();
        self.file
            .read_exact_at(bytes, at)
            .map_err(|source| TeacherCacheError::Read { path: path(), source })?;
        for (token, record) in (first..).zip(into.records.chunks_exact(2 * k)) {
            let (ids, log_probs) = record.split_at(k);
            let is_known = |id: &i32| u64::try_from(*id).is_ok_and(|id| id < self.manifest.vocab);
            let log_probs = log_probs.iter().map(|bits| f32::from_bits(bits.cast_unsigned()));
            if !ids.iter().all(is_known) || !log_probs.clone().all(is_log_prob) {
                let why = format!("the record of token {token} is not of ids and log-probabilities");
                return Err(TeacherCacheError::Damaged { path: path(), why });
            }
            into.ids.extend_from_slice(ids);
            into.log_probs.extend(log_probs);
        }
        Ok(())
    }
}

/// Whether it can be a log-probability: rounding may leave that of a certain token a little above 0.
pub(super) fn is_log_prob(number: f32) -> bool {
    number.is_finite() && number < 1e-2
}
