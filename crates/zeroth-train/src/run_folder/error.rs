//! Run folder errors.

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::LockError;

/// A run folder that cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum RunFolderError {
    #[error(
        "{} already contains a run ({}): continue it with --resume auto, replace it with \
         --overwrite-output-dir, or choose another --output", folder.display(), found.join(", ")
    )]
    HoldsARun { folder: PathBuf, found: Vec<String> },
    #[error(
        "{} contains {} but neither origin.json nor metrics.jsonl: it is not a run folder, and a run would overwrite it; choose \
         another --output", folder.display(), found.join(", ")
    )]
    NotARun { folder: PathBuf, found: Vec<String> },
    #[error(
        "{} holds {}{}, which no run writes: a new run needs a folder of its own; choose another --output, such as {}",
        folder.display(), found.join(", "), and_more(*more), folder.join("run").display()
    )]
    HoldsOthers { folder: PathBuf, found: Vec<String>, more: usize },
    #[error(
        "--output {} is {what}: a new run needs a folder of its own; choose another --output, such as {}", folder.display(),
        folder.join("run").display()
    )]
    Shared { folder: PathBuf, what: &'static str },
    #[error(
        "cannot write to --output {}: {}: {source}; grant this user write permission, or choose another --output",
        output.display(), folder.display()
    )]
    NotWritable {
        output: PathBuf,
        /// It, or the nearest folder around it that exists.
        folder: PathBuf,
        source: io::Error,
    },
    #[error(
        "{} is inside the checkpoint {}, and a run there would damage it: choose another --output", path.display(),
        checkpoint.display()
    )]
    InsideCheckpoint { path: PathBuf, checkpoint: PathBuf },
    #[error(
        "--overwrite-output-dir would remove {}, but {flag} {} depends on it: nothing was removed from {}; choose another --output, \
         or move the input to another folder first", removed.display(), input.display(), folder.display()
    )]
    HoldsInput { flag: &'static str, input: PathBuf, removed: PathBuf, folder: PathBuf },
    #[error("{} is {found}, but a run creates {made} of that name: move it, or choose another --output", path.display())]
    InTheWay { path: PathBuf, found: &'static str, made: &'static str },
    #[error("{} is a file: --output must be a folder", path.display())]
    NotAFolder { path: PathBuf },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
}

fn and_more(more: usize) -> String {
    if more > 0 { format!(" and {more} more") } else { String::new() }
}

/// Maps an I/O error of an operation on `path`.
pub(crate) fn failed(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> RunFolderError {
    move |source| RunFolderError::Io { doing, path: path.to_owned(), source }
}
