//! What can be wrong with data, each with its own sentence.

use std::io;
use std::path::PathBuf;

use zeroth_base::counted;

use super::{RowNumber, RowProblem};

/// Data that cannot be trained on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// No file at all.
    #[error("no data: name at least one JSONL or Parquet file with --data")]
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
    /// A pipe or a device.
    #[error("{} is a pipe or a device: data is read more than once, so write it to a file first", path.display())]
    NotAFile {
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
    /// A file that is neither JSONL nor Parquet.
    #[error("{} is {what}: {remedy}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: String,
        /// What to do.
        remedy: String,
    },
    /// A Parquet file whose compression is not built in.
    #[error(
        "{} is a Parquet file whose column `{column}` is compressed with {codec}: read are Snappy, Zstandard, gzip and none; \
         write it again, as with pandas.read_parquet('{}').to_parquet('rows.parquet', compression='zstd')",
        path.display(), path.display()
    )]
    Codec {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// Its codec, as Parquet names it.
        codec: String,
    },
    /// A Parquet file that cannot be read.
    #[error("cannot read {} as Parquet (row {row}): {message}; is it complete?", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The row that was being read, counted from 1.
        row: u64,
        /// What the reader said.
        message: String,
    },
    /// No row in it.
    #[error("{} has no rows: it is empty, or every line is blank", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A row that is wrong.
    #[error("{}: {at}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Where in it.
        at: RowNumber,
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
    /// Rows were kept, and nothing of them is trained.
    #[error(
        "no token of {} is trained: {} with {} {} read, {}; `zeroth data preview` shows what is trained of each row",
        listed_files(files),
        counted(*rows, "row"),
        counted(*tokens, "token"),
        if *rows == 1 { "was" } else { "were" },
        why
    )]
    NothingTrained {
        /// The files.
        files: Vec<PathBuf>,
        /// Rows kept.
        rows: u64,
        /// Their tokens.
        tokens: u64,
        /// Why none of them is trained.
        why: String,
    },
    /// A file was written to while it was read.
    #[error("{} changed while it was read: run again once it is complete", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The token cache cannot be written anywhere.
    #[error(
        "the token cache cannot be written{}; set ZEROTH_CACHE to a folder that can be",
        listed_places(tried)
    )]
    NoCache {
        /// The folders, and what the system said.
        tried: Vec<(PathBuf, io::Error)>,
    },
    /// A token cache that is not one.
    #[error("{} is no token cache of this version: {why}; prepare the data again", path.display())]
    CacheFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A token cache that ended, or could not be read, in the middle of a run.
    #[error("cannot read sample {sample} from the token cache {}: {}", path.display(), unreadable(source))]
    ReadCache {
        /// The file.
        path: PathBuf,
        /// The sample that was being read, counted from 0.
        sample: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A token cache that cannot be opened.
    #[error("cannot open the token cache {}: {source}", path.display())]
    OpenCache {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn listed_files(files: &[PathBuf]) -> String {
    match files {
        [one] => one.display().to_string(),
        [first, rest @ ..] => format!("{} and {} more", first.display(), counted(rest.len() as u64, "file")),
        [] => String::new(),
    }
}

fn unreadable(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => {
            "the file was cut short since it was opened; start again, and the data is tokenised anew"
                .to_owned()
        }
        _ => source.to_string(),
    }
}

fn listed_places(tried: &[(PathBuf, io::Error)]) -> String {
    let one = |(folder, error): &(PathBuf, io::Error)| format!("in {}: {error}", folder.display());
    match tried {
        [] => ": neither ZEROTH_CACHE nor HOME is set".to_owned(),
        tried => format!(" {}", tried.iter().map(one).collect::<Vec<_>>().join(", nor ")),
    }
}

fn why_nothing(too_long: u64, max_length: u64) -> String {
    if too_long == 0 {
        return "there was no row to take".to_owned();
    }
    let rows = match too_long {
        1 => "its 1 row has".to_owned(),
        _ => format!("all {} have", counted(too_long, "row")),
    };
    let tokens = counted(max_length, "token");
    format!("{rows} more than {tokens}; raise --max-length, or cut rows with --truncation-strategy")
}
