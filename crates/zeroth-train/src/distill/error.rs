//! Errors of teachers and their caches.

use std::io;
use std::path::PathBuf;

use zeroth_base::{PublishError, counted, grouped};
use zeroth_model::WeightsError;

/// A teacher that cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TeacherError {
    #[error(
        "--teacher {name} has no weights (*.safetensors), so a student would learn noise: give a folder with weights; \
         --random-weights draws them from the seed, for measuring"
    )]
    NoWeights { name: String },
    #[error("--teacher: {0}")]
    Weights(#[from] WeightsError),
}

/// A cache that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum TeacherCacheError {
    #[error("{} is no teacher cache (it has no manifest.json): `zeroth distill cache --output` makes one", folder.display())]
    None { folder: PathBuf },
    #[error("{} holds something else ({found}): give --output a new or an empty folder", folder.display())]
    Occupied { folder: PathBuf, found: String },
    #[error("{} is damaged: {why}; remove the folder and make the cache again", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error(
        "{} has {} of {}: the same `zeroth distill cache` command continues it", folder.display(), grouped(*done),
        counted(*tokens, "token")
    )]
    Incomplete { folder: PathBuf, done: u64, tokens: u64 },
    #[error("{} is a cache of something else: {}; {remedy}", folder.display(), differences.join("; "))]
    Other { folder: PathBuf, differences: Vec<String>, remedy: &'static str },
    #[error("{} is being written by another process: wait until it ends, or give another --output", folder.display())]
    Locked { folder: PathBuf },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Publish(#[from] PublishError),
}
