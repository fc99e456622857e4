//! Data errors.

use std::io;
use std::path::PathBuf;

use zeroth_base::{counted, format_bytes, was};

use super::file_format::ENDINGS;
use super::row_limits::MAX_ROW_BYTES;
use super::source::Codec;
use super::{RowNumber, RowProblem};

/// An error preparing or reading data.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum DataError {
    #[error("no data: name at least one file or folder with --data")]
    NoFiles,
    #[error("data file {} does not exist", path.display())]
    NotFound { path: PathBuf },
    #[error("{} is a folder: find_files lists the data files in it", path.display())]
    Folder { path: PathBuf },
    #[error("cannot list the folder {}: {message}", path.display())]
    ListFolder { path: PathBuf, message: String },
    #[error(
        "{} has no data files{}; names of data files end in .{}, also with .gz or .zst",
        path.display(), found_instead(others), ENDINGS.join(", .")
    )]
    NoDataInFolder { path: PathBuf, others: Vec<PathBuf> },
    #[error("data files `{pattern}`: {message}")]
    Pattern { pattern: String, message: String },
    #[error("{} is a pipe or a device: data is read more than once, so write it to a file first", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot read {} (line {line}): {source}", path.display())]
    Read { path: PathBuf, line: u64, source: io::Error },
    #[error(
        "{} {}: {}; `{} -t {}` checks it",
        path.display(), damage(*codec, *after, error), remedy(error), codec.command(), path.display()
    )]
    Decompress {
        path: PathBuf,
        codec: Codec,
        after: Option<RowNumber>,
        /// The decoder's error, which the message has where it says more.
        error: io::Error,
    },
    #[error("{}: {at} is longer than {}: is it text?", path.display(), format_bytes(MAX_ROW_BYTES))]
    RowTooLong { path: PathBuf, at: RowNumber },
    #[error(
        "{} has a page of {} in the column `{column}`, more than are read at a time: write it again with smaller pages, e.g. with \
         pandas.read_parquet('{}').to_parquet('rows.parquet', data_page_size=1 << 20)",
        path.display(), format_bytes(*bytes), path.display()
    )]
    LargePage { path: PathBuf, column: String, bytes: u64 },
    #[error(
        "{} ends inside {at} of its JSON array: a bracket or a quote is not closed; is the file complete?",
        path.display()
    )]
    CutArray { path: PathBuf, at: RowNumber },
    #[error(
        "{}: line {line}: text follows the end of the JSON array: a file is one array, or JSONL with one object per line",
        path.display()
    )]
    AfterArray { path: PathBuf, line: u64 },
    #[error("{}: the first line must name the columns: {problem}", path.display())]
    Header { path: PathBuf, problem: RowProblem },
    #[error("{}: the header names the column `{name}` twice", path.display())]
    TwiceInHeader { path: PathBuf, name: String },
    #[error("{}: {at}: a quote is opened and never closed: a quote inside a quoted field is written twice", path.display())]
    OpenQuote { path: PathBuf, at: RowNumber },
    #[error("{} is {what}: {remedy}", path.display())]
    Format { path: PathBuf, what: String, remedy: String },
    #[error(
        "{} is a Parquet file whose column `{column}` is compressed with {codec}: supported are Snappy, Zstandard, gzip and none; \
         rewrite it, e.g. with pandas.read_parquet('{}').to_parquet('rows.parquet', compression='zstd')",
        path.display(), path.display()
    )]
    Codec { path: PathBuf, column: String, codec: String },
    #[error("cannot read {} as Parquet (row {row}): {message}; is it complete?", path.display())]
    Parquet {
        path: PathBuf,
        /// The row being read, from 1.
        row: u64,
        message: String,
    },
    #[error("{} has no rows: it is empty, or all lines are blank", path.display())]
    Empty { path: PathBuf },
    #[error("{}: {at}: {problem}", path.display())]
    Row { path: PathBuf, at: RowNumber, problem: RowProblem },
    #[error("no samples left: {}", why_nothing(*too_long, *max_length))]
    NothingKept { too_long: u64, max_length: u64 },
    #[error(
        "{} has no trained tokens: {} with {} {} read, {}; `zeroth data preview` shows the trained tokens of each row",
        listed_files(files),
        counted(*rows, "row"),
        counted(*tokens, "token"),
        was(*rows),
        why
    )]
    NothingTrained { files: Vec<PathBuf>, rows: u64, tokens: u64, why: String },
    #[error("{} changed while being read: run again once it is complete", path.display())]
    Changed { path: PathBuf },
    #[error("cannot write the token cache{}; set ZEROTH_CACHE to a writable folder", listed_places(tried))]
    NoCache { tried: Vec<(PathBuf, io::Error)> },
    #[error("{} is not a valid token cache: {why}; prepare the data again", path.display())]
    CacheFile { path: PathBuf, why: &'static str },
    #[error("cannot read sample {sample} from the token cache {}: {}", path.display(), unreadable(source))]
    ReadCache { path: PathBuf, sample: u64, source: io::Error },
    #[error("cannot open the token cache {}: {source}", path.display())]
    OpenCache { path: PathBuf, source: io::Error },
}

/// An unusable tokenizer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum EncoderError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} must contain a JSON object: {message}", path.display())]
    Json { path: PathBuf, message: String },
    #[error(
        "{} has no decoder_start_token_id in config.json: set it to the token that decoder inputs begin with; for T5 \
         that is the padding token, 0",
        folder.display()
    )]
    NoDecoderStart { folder: PathBuf },
    #[error(
        "{}: {key} is {found}: it must be a token id, 0 to {}",
        folder.join("config.json").display(), vocabulary.saturating_sub(1)
    )]
    DecoderToken { folder: PathBuf, key: &'static str, found: String, vocabulary: u64 },
    #[error("{} is not a valid tokenizer: {message}", path.display())]
    Tokenizer { path: PathBuf, message: String },
}

fn found_instead(others: &[PathBuf]) -> String {
    const SHOWN: usize = 3;
    if others.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = others.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
    let more =
        if others.len() > SHOWN { format!(" and {} more", others.len() - SHOWN) } else { String::new() };
    format!(": found {}{more}", shown.join(", "))
}

fn damage(codec: Codec, after: Option<RowNumber>, source: &io::Error) -> String {
    let place =
        after.map_or_else(|| "before the end of its first row".to_owned(), |at| format!("after {at}"));
    match source.kind() {
        io::ErrorKind::UnexpectedEof => format!("is cut short: its {codec} stream ends {place}"),
        _ => format!("cannot be decompressed with {codec} {place} ({source})"),
    }
}

fn remedy(source: &io::Error) -> &'static str {
    // Zstandard's message for a window beyond 128 MiB.
    if source.to_string().contains("too much memory") {
        "compress it again without --long"
    } else {
        "copy or download it again"
    }
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
            "the file was truncated after it was opened; start again to tokenise the data anew".to_owned()
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
        return "there were no rows".to_owned();
    }
    let rows = match too_long {
        1 => "its 1 row has".to_owned(),
        _ => format!("all {} have", counted(too_long, "row")),
    };
    let tokens = counted(max_length, "token");
    format!("{rows} more than {tokens}; raise --max-length, or truncate rows with --truncation-strategy")
}
