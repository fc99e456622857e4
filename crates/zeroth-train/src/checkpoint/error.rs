//! Checkpoint errors.

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use zeroth_base::{format_bytes, grouped};
use zeroth_model::HeaderError;

use super::space::free_bytes;

/// An error writing or reading a checkpoint.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum CheckpointError {
    #[error("it has weights only (--save-only-model), and no optimizer state to resume from")]
    WeightsOnly,
    #[error(
        "disk full while writing {}: it needs {}{}; earlier checkpoints are intact. Free space, or keep \
         fewer checkpoints with --save-total-limit",
        path.display(), format_bytes(*needed),
        free.map(|free| format!(", {} are free", format_bytes(free))).unwrap_or_default()
    )]
    DiskFull {
        path: PathBuf,
        needed: u64,
        /// Free bytes on that disk, if known.
        free: Option<u64>,
    },
    #[error(
        "cannot write {}: it needs {}, and this process may write files of at most {} (ulimit -f); earlier checkpoints are \
         intact. Raise the limit",
        path.display(), format_bytes(*needed), format_bytes(*limit)
    )]
    FileSizeLimit { path: PathBuf, needed: u64, limit: u64 },
    #[error(
        "cannot {doing} {}: {source}; earlier checkpoints are intact. Grant this user write permission, or \
         choose another --output", path.display()
    )]
    NotWritable { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{} is not a checkpoint: it has no manifest.json; give a step-N folder of a run, or the run folder",
        folder.display()
    )]
    NotACheckpoint { folder: PathBuf },
    #[error("{} contains no checkpoint (no step-N folder): none was saved yet; --save-steps sets how often one is", folder.display())]
    NoCheckpoints { folder: PathBuf },
    #[error("no checkpoint in {} is valid: restore one from a backup; `zeroth checkpoint verify` lists the damage", folder.display())]
    NoneValid { folder: PathBuf },
    #[error("{} is invalid: {problem}; restore it from a backup, or resume from an older checkpoint", path.display())]
    Manifest { path: PathBuf, problem: String },
    #[error(
        "{} has format {found}, but this version of zeroth reads format {known}: use the version that wrote it{}",
        path.display(), written_by.as_ref().map(|version| format!(" ({version})")).unwrap_or_default()
    )]
    Version {
        path: PathBuf,
        found: u64,
        known: u64,
        /// The version of zeroth that wrote it, if recorded.
        written_by: Option<String>,
    },
    #[error("{} is listed in the manifest but missing: restore it from a backup, or resume from an older checkpoint", path.display())]
    Missing { path: PathBuf },
    #[error(
        "{} has {} bytes, but had {} when it was saved: restore it from a backup, or resume from an older checkpoint",
        path.display(), grouped(*found), grouped(*expected)
    )]
    Size { path: PathBuf, expected: u64, found: u64 },
    #[error(
        "{} is damaged: its SHA-256 is {found}, but was {expected} when it was saved; restore it from a backup, or resume \
         from an older checkpoint", path.display()
    )]
    Checksum { path: PathBuf, expected: String, found: String },
    #[error("{}: {source}; restore it from a backup, or resume from an older checkpoint", path.display())]
    Header { path: PathBuf, source: HeaderError },
    #[error(
        "{}: the tensor `{tensor}` {problem}: the file has changed since it was saved; restore it from a backup, or resume from \
         an older checkpoint", path.display()
    )]
    Tensor { path: PathBuf, tensor: String, problem: String },
    #[error(
        "{} is incomplete: elements {} to {} of {state}/{parameter} are {} its files; resume from an older checkpoint",
        folder.display(), grouped(*first), grouped(*end), if *twice { "stored twice in" } else { "missing from" }
    )]
    Incomplete { folder: PathBuf, state: &'static str, parameter: String, first: u64, end: u64, twice: bool },
    #[error(
        "{} is a checkpoint of another model ({saved}; --model is {given}): {}; train with the --model it was saved \
         from", folder.display(), differences.join("; ")
    )]
    AnotherModel { folder: PathBuf, saved: String, given: String, differences: Vec<String> },
    #[error("{} has no {state}/{parameter}: its optimizer ({optimizer}) does not keep that state", folder.display())]
    NoState { folder: PathBuf, state: String, parameter: String, optimizer: String },
    #[error(
        "elements {start} to {end} of `{parameter}` were requested into a buffer of {room}, but it has {elements} elements"
    )]
    Range { parameter: String, start: u64, end: u64, room: u64, elements: u64 },
    #[error(
        "{state} of `{parameter}` are not finite (element {} is {value}): resume from an earlier checkpoint with a lower \
         --learning-rate", grouped(*element)
    )]
    NotFinite { state: &'static str, parameter: String, element: u64, value: f32 },
    #[error("{}: {problem}", path.display())]
    Shard { path: PathBuf, problem: String },
}

/// Maps an I/O error of an operation that writes `needed` bytes to `path`.
pub(super) fn writing(
    doing: &'static str,
    path: &Path,
    needed: u64,
) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            let free = free_bytes(&path).ok();
            CheckpointError::DiskFull { path, needed, free }
        }
        io::ErrorKind::FileTooLarge => {
            let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
            CheckpointError::FileSizeLimit { path, needed, limit }
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            CheckpointError::NotWritable { doing, path, source }
        }
        _ => CheckpointError::Io { doing, path, source },
    }
}

/// Maps an I/O error of a read.
pub(super) fn reading(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::NotFound => CheckpointError::Missing { path },
        _ => CheckpointError::Io { doing: "read", path, source },
    }
}
