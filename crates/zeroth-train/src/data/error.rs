//! What can be wrong with data, each with its own sentence.

use std::io;
use std::path::PathBuf;

use zeroth_base::grouped;

use super::RowProblem;

/// Data that cannot be trained on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// No file at all.
    #[error("no data: name at least one JSONL file with --data")]
    NoFiles,
    /// The path leads nowhere.
    #[error("there is no data file {}", path.display())]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// A folder where a file is needed.
    #[error("{} is a folder: --data takes files, as in --data {}/*.jsonl", path.display(), path.display())]
    Folder {
        /// The path as given.
        path: PathBuf,
    },
    /// The system refused to read.
    #[error("cannot read {} (line {line}): {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The line that was being read.
        line: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A format of files that is not read yet.
    #[error("{} is a {format} file: not yet; give JSONL, one JSON object a line", path.display())]
    FileNotYet {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: &'static str,
    },
    /// No row in it.
    #[error("{} has no rows: it is empty, or every line is blank", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A row that is wrong.
    #[error("{}: line {line}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with it.
        problem: RowProblem,
    },
    /// Rows were read, and none was kept.
    #[error("no sample is left: {}", why_nothing(*too_long, *max_length))]
    NothingKept {
        /// Rows that were too long.
        too_long: u64,
        /// The length they had to keep.
        max_length: u64,
    },
}

fn why_nothing(too_long: u64, max_length: u64) -> String {
    if too_long == 0 {
        return "there was no row to take".to_owned();
    }
    let (rows, tokens) = (grouped(too_long), grouped(max_length));
    let (row, have) = if too_long == 1 { ("row", "has") } else { ("rows", "have") };
    let token = if max_length == 1 { "token" } else { "tokens" };
    format!("all {rows} {row} {have} more than {tokens} {token}; raise --max-length")
}
