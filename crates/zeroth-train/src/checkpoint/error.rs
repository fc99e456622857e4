//! What can be wrong with a checkpoint, or stand in the way of one, and what to do then.

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::{format_bytes, grouped};
use zeroth_model::HeaderError;

use super::space::free_bytes;

/// A checkpoint that could not be written, or cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// No room.
    #[error(
        "the disk is full while {} is written: it needs {}{}; checkpoints saved before are intact. Free space, or keep \
         fewer of them with --save-total-limit",
        path.display(), format_bytes(*needed),
        free.map(|free| format!(", and {} are free", format_bytes(free))).unwrap_or_default()
    )]
    DiskFull {
        /// The file that did not fit.
        path: PathBuf,
        /// Its bytes.
        needed: u64,
        /// Bytes that are free there now, where that can be asked.
        free: Option<u64>,
    },
    /// Writing is not allowed.
    #[error(
        "cannot {doing} {}: {source}; checkpoints saved before are intact. Give this user the right to write there, or \
         choose another --output", path.display()
    )]
    NotWritable {
        /// What was tried.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path names no checkpoint.
    #[error(
        "{} is no checkpoint: it has no manifest.json; name a folder step-N of a run's checkpoints, or the run's folder",
        folder.display()
    )]
    NotACheckpoint {
        /// The folder.
        folder: PathBuf,
    },
    /// A run's folder without any.
    #[error("{} holds no checkpoint (no folder step-N): was one saved there? --save-steps says how often", folder.display())]
    NoneThere {
        /// The folder of checkpoints.
        folder: PathBuf,
    },
    /// A run's folder with damaged ones only.
    #[error("no checkpoint in {} is good: restore one from a copy; zeroth checkpoint verify names what is damaged", folder.display())]
    NoneGood {
        /// The folder of checkpoints.
        folder: PathBuf,
    },
    /// The manifest cannot be understood.
    #[error("{} is broken: {problem}; restore it from a copy, or go on from an older checkpoint", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Written by a version that writes another format.
    #[error(
        "{} has format {found}, and this version of zeroth reads format {known}: use the version that wrote it{}",
        path.display(), written_by.as_ref().map(|version| format!(" ({version})")).unwrap_or_default()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// Ours.
        known: u64,
        /// The version of zeroth that it names.
        written_by: Option<String>,
    },
    /// A file that the manifest lists is gone.
    #[error("{} is missing, and the manifest lists it: restore it from a copy, or go on from an older checkpoint", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file is longer or shorter than it was.
    #[error(
        "{} has {} bytes and had {} when it was saved: restore it from a copy, or go on from an older checkpoint",
        path.display(), grouped(*found), grouped(*expected)
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Its bytes by the manifest.
        expected: u64,
        /// Its bytes.
        found: u64,
    },
    /// A file is not what was written.
    #[error(
        "{} is damaged: its SHA-256 is {found} and was {expected} when it was saved; restore it from a copy, or go on \
         from an older checkpoint", path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// By the manifest.
        expected: String,
        /// Of its bytes now.
        found: String,
    },
    /// A file of tensors whose header is wrong.
    #[error("{}: {source}; restore it from a copy, or go on from an older checkpoint", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: HeaderError,
    },
    /// A tensor that no rank writes.
    #[error(
        "{}: the tensor `{tensor}` {problem}: it has changed since it was saved; restore it from a copy, or go on from \
         an older checkpoint", path.display()
    )]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// Elements that no file holds, or that two do.
    #[error(
        "{} is not whole: elements {} to {} of {state}/{parameter} are {} its files; go on from an older checkpoint",
        folder.display(), grouped(*first), grouped(*end), if *twice { "twice in" } else { "in none of" }
    )]
    Incomplete {
        /// The checkpoint.
        folder: PathBuf,
        /// The state.
        state: &'static str,
        /// The parameter.
        parameter: String,
        /// The first of the elements.
        first: u64,
        /// The one after the last.
        end: u64,
        /// Held twice and not missing.
        twice: bool,
    },
    /// The checkpoint of another model.
    #[error(
        "{} is a checkpoint of another model ({saved}, and this is {asked}): {}; train with the --model it was saved \
         from", folder.display(), differences.join("; ")
    )]
    AnotherModel {
        /// The checkpoint.
        folder: PathBuf,
        /// The model that was saved.
        saved: String,
        /// The model that was asked for.
        asked: String,
        /// The first differences.
        differences: Vec<String>,
    },
    /// It does not hold what was asked for.
    #[error("{} holds no {state}/{parameter}: its optimizer ({optimizer}) keeps none", folder.display())]
    NoState {
        /// The checkpoint.
        folder: PathBuf,
        /// The state asked for.
        state: String,
        /// The parameter asked for.
        parameter: String,
        /// The optimizer of the run.
        optimizer: String,
    },
    /// A range that the parameter does not have.
    #[error(
        "elements {start} to {end} of `{parameter}` were asked for into room for {room}, and it has {elements}"
    )]
    Range {
        /// The parameter.
        parameter: String,
        /// The first element asked for.
        start: u64,
        /// The one after the last.
        end: u64,
        /// Elements of the buffer.
        room: u64,
        /// Elements of the parameter.
        elements: u64,
    },
    /// State with a number that is none.
    #[error(
        "{state} of `{parameter}` are not finite (element {} is {value}): go on from an earlier checkpoint with a lower \
         --learning-rate", grouped(*element)
    )]
    NotFinite {
        /// The state.
        state: &'static str,
        /// The parameter.
        parameter: String,
        /// The first element that is not.
        element: u64,
        /// What it is.
        value: f32,
    },
    /// A part that is not written as it was announced.
    #[error("{}: {problem}", path.display())]
    Part {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// What the system said while `doing` something that writes `needed` bytes to `path`.
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
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            CheckpointError::NotWritable { doing, path, source }
        }
        _ => CheckpointError::Io { doing, path, source },
    }
}

/// What the system said while something was read.
pub(super) fn reading(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::NotFound => CheckpointError::Missing { path },
        _ => CheckpointError::Io { doing: "read", path, source },
    }
}
