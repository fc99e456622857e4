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
    /// Training cannot be resumed from it.
    #[error("it has weights only (--save-only-model), and no optimizer state to resume from")]
    WeightsOnly,
    /// The disk is full.
    #[error(
        "disk full while writing {}: it needs {}{}; earlier checkpoints are intact. Free space, or keep \
         fewer checkpoints with --save-total-limit",
        path.display(), format_bytes(*needed),
        free.map(|free| format!(", {} are free", format_bytes(free))).unwrap_or_default()
    )]
    DiskFull {
        /// The file that did not fit.
        path: PathBuf,
        /// Its size in bytes.
        needed: u64,
        /// Free bytes on that disk, if known.
        free: Option<u64>,
    },
    /// The file exceeds the limit of file sizes.
    #[error(
        "cannot write {}: it needs {}, and this process may write files of at most {} (ulimit -f); earlier checkpoints are \
         intact. Raise the limit",
        path.display(), format_bytes(*needed), format_bytes(*limit)
    )]
    FileSizeLimit {
        path: PathBuf,
        /// Its size in bytes.
        needed: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The folder is not writable.
    #[error(
        "cannot {doing} {}: {source}; earlier checkpoints are intact. Grant this user write permission, or \
         choose another --output", path.display()
    )]
    NotWritable {
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        source: io::Error,
    },
    /// An I/O operation failed.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        source: io::Error,
    },
    /// The path is not a checkpoint.
    #[error(
        "{} is not a checkpoint: it has no manifest.json; give a step-N folder of a run, or the run folder",
        folder.display()
    )]
    NotACheckpoint { folder: PathBuf },
    /// A run folder without checkpoints.
    #[error("{} contains no checkpoint (no step-N folder): none was saved yet; --save-steps sets how often one is", folder.display())]
    NoCheckpoints {
        /// The folder of checkpoints.
        folder: PathBuf,
    },
    /// A run folder with damaged checkpoints only.
    #[error("no checkpoint in {} is valid: restore one from a backup; `zeroth checkpoint verify` lists the damage", folder.display())]
    NoneValid {
        /// The folder of checkpoints.
        folder: PathBuf,
    },
    /// The manifest is invalid.
    #[error("{} is invalid: {problem}; restore it from a backup, or resume from an older checkpoint", path.display())]
    Manifest { path: PathBuf, problem: String },
    /// The checkpoint has another format version.
    #[error(
        "{} has format {found}, but this version of zeroth reads format {known}: use the version that wrote it{}",
        path.display(), written_by.as_ref().map(|version| format!(" ({version})")).unwrap_or_default()
    )]
    Version {
        path: PathBuf,
        found: u64,
        /// The format of this version.
        known: u64,
        /// The version of zeroth that wrote it, if recorded.
        written_by: Option<String>,
    },
    /// A listed file is missing.
    #[error("{} is listed in the manifest but missing: restore it from a backup, or resume from an older checkpoint", path.display())]
    Missing { path: PathBuf },
    /// A file has the wrong length.
    #[error(
        "{} has {} bytes, but had {} when it was saved: restore it from a backup, or resume from an older checkpoint",
        path.display(), grouped(*found), grouped(*expected)
    )]
    Size {
        path: PathBuf,
        /// Its size in the manifest.
        expected: u64,
        /// Its size on disk.
        found: u64,
    },
    /// A file fails its checksum.
    #[error(
        "{} is damaged: its SHA-256 is {found}, but was {expected} when it was saved; restore it from a backup, or resume \
         from an older checkpoint", path.display()
    )]
    Checksum {
        path: PathBuf,
        /// Checksum in the manifest.
        expected: String,
        /// Checksum of the file now.
        found: String,
    },
    /// A safetensors file with an invalid header.
    #[error("{}: {source}; restore it from a backup, or resume from an older checkpoint", path.display())]
    Header { path: PathBuf, source: HeaderError },
    /// A tensor that zeroth never writes.
    #[error(
        "{}: the tensor `{tensor}` {problem}: the file has changed since it was saved; restore it from a backup, or resume from \
         an older checkpoint", path.display()
    )]
    Tensor { path: PathBuf, tensor: String, problem: String },
    /// Elements that are missing, or stored twice.
    #[error(
        "{} is incomplete: elements {} to {} of {state}/{parameter} are {} its files; resume from an older checkpoint",
        folder.display(), grouped(*first), grouped(*end), if *twice { "stored twice in" } else { "missing from" }
    )]
    Incomplete {
        folder: PathBuf,
        state: &'static str,
        parameter: String,
        /// The first affected element.
        first: u64,
        /// One past the last.
        end: u64,
        /// Stored twice, not missing.
        twice: bool,
    },
    /// The checkpoint belongs to another model.
    #[error(
        "{} is a checkpoint of another model ({saved}; --model is {given}): {}; train with the --model it was saved \
         from", folder.display(), differences.join("; ")
    )]
    AnotherModel {
        folder: PathBuf,
        /// The model that was saved.
        saved: String,
        /// The model of this run.
        given: String,
        /// The first differences.
        differences: Vec<String>,
    },
    /// The checkpoint has no such state.
    #[error("{} has no {state}/{parameter}: its optimizer ({optimizer}) does not keep that state", folder.display())]
    NoState {
        folder: PathBuf,
        /// The requested state.
        state: String,
        /// The requested parameter.
        parameter: String,
        /// The optimizer of the run.
        optimizer: String,
    },
    /// A range outside the parameter.
    #[error(
        "elements {start} to {end} of `{parameter}` were requested into a buffer of {room}, but it has {elements} elements"
    )]
    Range {
        parameter: String,
        /// The first requested element.
        start: u64,
        /// One past the last.
        end: u64,
        /// Length of the buffer.
        room: u64,
        /// Elements of the parameter.
        elements: u64,
    },
    /// A state with a non-finite value.
    #[error(
        "{state} of `{parameter}` are not finite (element {} is {value}): resume from an earlier checkpoint with a lower \
         --learning-rate", grouped(*element)
    )]
    NotFinite {
        state: &'static str,
        parameter: String,
        /// The first non-finite element.
        element: u64,
        value: f32,
    },
    /// A shard that does not match its declared pieces.
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
