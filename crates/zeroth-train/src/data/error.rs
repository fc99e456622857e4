//! What can be wrong with data, each with its own sentence.

use std::io;
use std::path::PathBuf;

use zeroth_base::grouped;

use super::{IGNORED, RowNumber};

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
    /// A format of files that is not read yet.
    #[error("{} is a {format} file: not yet; give JSONL, one JSON object a line", path.display())]
    FileNotYet {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: &'static str,
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
        /// The files that were to appear, and what the system said.
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
    /// A token cache that cannot be opened.
    #[error("cannot open the token cache {}: {source}", path.display())]
    OpenCache {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn listed_places(tried: &[(PathBuf, io::Error)]) -> String {
    let folder = |path: &PathBuf| path.parent().unwrap_or(path).display().to_string();
    let one = |(path, error): &(PathBuf, io::Error)| format!("in {}: {error}", folder(path));
    match tried {
        [] => ": neither ZEROTH_CACHE nor HOME is set".to_owned(),
        tried => format!(" {}", tried.iter().map(one).collect::<Vec<_>>().join(", nor ")),
    }
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

/// What is wrong with a row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowProblem {
    /// Not JSON, or cut off.
    #[error("not JSON: {message}, column {column}{}", if *array {
        "; the file seems to be one JSON array: write one object a line instead (JSONL)"
    } else {
        "; a row is one JSON object on one line"
    })]
    NotJson {
        /// What the parser said.
        message: String,
        /// Where in the line, counted from 1.
        column: usize,
        /// Whether the line begins an array.
        array: bool,
    },
    /// JSON, but no object.
    #[error("a row is a JSON object, as in {{\"input_ids\": [1, 2, 3]}}: found {found}")]
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
    /// A row in a format that needs a tokenizer.
    #[error(
        "this is a row of the format {format}: not yet; give ready tokens, {{\"input_ids\": [...], \"labels\": [...]}}"
    )]
    FormatNotYet {
        /// The format, by its keys.
        format: &'static str,
    },
    /// No key of any format.
    #[error(
        "the row has no `input_ids`{}; it has {}",
        near.as_ref().map(|near| format!(" (`{near}` is near: rename it)")).unwrap_or_default(),
        listed(found)
    )]
    NoInputIds {
        /// The keys that it has.
        found: Vec<String>,
        /// One that may be meant.
        near: Option<String>,
    },
    /// A key that must hold a list.
    #[error("`{key}` must be a list of whole numbers: found {found}")]
    NotAList {
        /// The key.
        key: &'static str,
        /// What it holds.
        found: &'static str,
    },
    /// An entry that is no whole number.
    #[error("{key}[{place}] must be a whole number: found {found}")]
    NotAnInteger {
        /// The key.
        key: &'static str,
        /// The place in the list, counted from 0.
        place: usize,
        /// What stands there.
        found: String,
    },
    /// Lists of different lengths.
    #[error("`{key}` has {found} entries and `input_ids` {expected}: they must be equally many, one a token")]
    Lengths {
        /// The other list.
        key: &'static str,
        /// Its length.
        found: usize,
        /// The number of tokens.
        expected: usize,
    },
    /// No token.
    #[error("the row has no tokens; remove it")]
    Empty,
    /// A token beyond the vocabulary.
    #[error(
        "input_ids[{place}] is {id}: the model's vocabulary has {} tokens, 0 to {}; was the data made with another \
         tokenizer?", grouped(*vocabulary), vocabulary - 1
    )]
    Token {
        /// The place in the list, counted from 0.
        place: usize,
        /// The token.
        id: i64,
        /// Tokens of the vocabulary.
        vocabulary: u64,
    },
    /// A label beyond the vocabulary.
    #[error(
        "labels[{place}] is {label}: a label is a token, 0 to {}, or {IGNORED} for one that is not trained",
        vocabulary - 1
    )]
    Label {
        /// The place in the list, counted from 0.
        place: usize,
        /// The label.
        label: i64,
        /// Tokens of the vocabulary.
        vocabulary: u64,
    },
    /// A mask of something else than 0 and 1.
    #[error("attention_mask[{place}] is {found}: it must be 0 (padding) or 1")]
    Mask {
        /// The place in the list, counted from 0.
        place: usize,
        /// What stands there.
        found: i64,
    },
    /// Padding before or between tokens.
    #[error(
        "attention_mask[{place}] is 0 and tokens follow: only padding at the end of a row can be cut; write the row \
         without padding"
    )]
    PaddingInside {
        /// The place in the list, counted from 0.
        place: usize,
    },
}

fn listed(keys: &[String]) -> String {
    const SHOWN: usize = 8;
    if keys.is_empty() {
        return "no keys".to_owned();
    }
    let mut text: Vec<String> = keys.iter().take(SHOWN).map(|key| format!("`{key}`")).collect();
    if keys.len() > SHOWN {
        text.push(format!("and {} more", keys.len() - SHOWN));
    }
    text.join(", ")
}
