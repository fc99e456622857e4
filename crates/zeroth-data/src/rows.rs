//! Reads the rows of several files in order, in any supported format.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::array_reader::ArrayElements;
use super::columns::Columns;
use super::file_format::{TextFormat, detect};
use super::line_reader::LineReader;
use super::parquet_rows::ParquetRows;
use super::row_limits::has_too_many_values;
use super::row_problem::kind;
use super::source::{Codec, DataSource};
use super::table_reader::{TableHeader, TableRecord, TableRecords};
use super::{DataError, RowNumber, RowProblem};

/// An unparsed row.
pub(super) struct RawRow {
    /// Index of its file.
    pub(super) file: usize,
    pub(super) at: RowNumber,
    pub(super) content: Content,
    /// Approximate bytes it takes in the file.
    pub(super) bytes: u64,
}

/// The content of an unparsed row.
pub(super) enum Content {
    /// A line; parsed later, in parallel.
    Line(Vec<u8>),
    /// An element of a JSON array; parsed later, in parallel.
    Element(Vec<u8>),
    /// A record of a table.
    Record(Arc<TableHeader>, TableRecord),
    /// A row of a Parquet file.
    Object(Map<String, Value>),
}

impl Content {
    /// Approximate memory use.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Line(text) | Self::Element(text) => text.len(),
            Self::Record(_, cells) => cells.size(),
            Self::Object(row) => row.values().map(size_of_value).sum(),
        }
    }

    /// Parses the row.
    pub(super) fn into_object(self) -> Result<Map<String, Value>, RowProblem> {
        match self {
            Self::Line(text) => parsed(&text, |error| not_json(&error)),
            Self::Element(text) if text.is_empty() => Err(RowProblem::NoElement),
            Self::Element(text) => parsed(&text, |error| RowProblem::NotJsonElement {
                message: without_position(&error),
                line: error.line(),
                column: error.column(),
            }),
            Self::Record(header, cells) => header.object(&cells),
            Self::Object(row) => Ok(row),
        }
    }
}

fn size_of_value(value: &Value) -> usize {
    let within = match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(size_of_value).sum(),
        Value::Object(object) => object.values().map(size_of_value).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    within + size_of::<Value>()
}

fn parsed(
    text: &[u8],
    not_json: impl FnOnce(serde_json::Error) -> RowProblem,
) -> Result<Map<String, Value>, RowProblem> {
    if has_too_many_values(text) {
        return Err(RowProblem::TooManyValues);
    }
    match serde_json::from_slice(text).map_err(not_json)? {
        Value::Object(row) => Ok(row),
        other => Err(RowProblem::NotAnObject { found: kind(&other) }),
    }
}

fn not_json(error: &serde_json::Error) -> RowProblem {
    RowProblem::NotJson { message: without_position(error), column: error.column() }
}

/// The parser saw one row; its "line 1" would be mistaken for the file's.
fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    message.split(" at line ").next().unwrap_or_default().to_owned()
}

/// The rows of all files, in order. None follow an error.
pub(super) struct RowReader<'a> {
    files: &'a [PathBuf],
    columns: Option<&'a Columns>,
    file: usize,
    open: Option<Open<'a>>,
    /// The last row read from the open file.
    last: Option<RowNumber>,
}

/// An open file.
struct Open<'a> {
    codec: Option<Codec>,
    reader: Reader<'a>,
}

enum Reader<'a> {
    Lines(LineReader<'a>),
    Array(ArrayElements<'a>),
    Table(Box<TableRecords<'a>>),
    Parquet(Box<ParquetRows<'a>>),
}

impl<'a> RowReader<'a> {
    /// `columns` are those that tables may have, unless any are accepted.
    pub(super) fn new(files: &'a [PathBuf], columns: Option<&'a Columns>) -> Self {
        Self { files, columns, file: 0, open: None, last: None }
    }

    /// The next row. A file without rows is an error once its end is reached.
    pub(super) fn next(&mut self) -> Result<Option<RawRow>, DataError> {
        let next = self.advance();
        if next.is_err() {
            self.file = self.files.len();
        }
        next
    }

    fn advance(&mut self) -> Result<Option<RawRow>, DataError> {
        while let Some(path) = self.files.get(self.file) {
            let open = match &mut self.open {
                Some(open) => open,
                none => none.insert(Open::new(path, self.columns)?),
            };
            let before = open.reader.read();
            let next = open.reader.next().map_err(|error| in_codec(error, open.codec, self.last))?;
            if let Some((at, content)) = next {
                self.last = Some(at);
                return Ok(Some(RawRow { file: self.file, at, content, bytes: open.reader.read() - before }));
            }
            if self.last.is_none() {
                return Err(DataError::Empty { path: path.clone() });
            }
            (self.file, self.open, self.last) = (self.file + 1, None, None);
        }
        Ok(None)
    }
}

/// An error while a compressed file is read is one of its compression.
fn in_codec(error: DataError, codec: Option<Codec>, after: Option<RowNumber>) -> DataError {
    match (error, codec) {
        (DataError::Read { path, source, .. }, Some(codec)) => {
            DataError::Decompress { path, codec, after, error: source }
        }
        (error, _) => error,
    }
}

impl<'a> Open<'a> {
    fn new(path: &'a Path, columns: Option<&Columns>) -> Result<Self, DataError> {
        if is_parquet(path).map_err(|source| DataError::Read { path: path.to_owned(), line: 1, source })? {
            let reader = Reader::Parquet(Box::new(ParquetRows::open(path)?));
            return Ok(Self { codec: None, reader });
        }
        let source = DataSource::open(path)?;
        let codec = source.codec();
        let format = detect(path, source.beginning()).map_err(|foreign| DataError::Format {
            path: path.to_owned(),
            what: foreign.what,
            remedy: foreign.remedy,
        })?;
        let reader = match format {
            TextFormat::Lines => Reader::Lines(LineReader::new(path, source)),
            TextFormat::Array => Reader::Array(ArrayElements::new(path, source)),
            TextFormat::Table { delimiter } => Reader::Table(Box::new(
                TableRecords::open(path, source, delimiter, columns)
                    .map_err(|error| in_codec(error, codec, None))?,
            )),
        };
        Ok(Self { codec, reader })
    }
}

impl Reader<'_> {
    /// Approximate bytes read of the file.
    fn read(&self) -> u64 {
        match self {
            Self::Lines(lines) => lines.read(),
            Self::Array(elements) => elements.read(),
            Self::Table(records) => records.read(),
            Self::Parquet(rows) => rows.read(),
        }
    }

    fn next(&mut self) -> Result<Option<(RowNumber, Content)>, DataError> {
        Ok(match self {
            Self::Lines(lines) => {
                lines.next()?.map(|(line, text)| (RowNumber::Line(line), Content::Line(text.to_vec())))
            }
            Self::Array(elements) => elements.next()?.map(|(at, text)| (at, Content::Element(text.to_vec()))),
            Self::Table(records) => {
                let next = records.next_record()?;
                next.map(|(at, cells)| (at, Content::Record(Arc::clone(records.header()), cells)))
            }
            Self::Parquet(rows) => {
                rows.next()?.map(|row| (RowNumber::Row(rows.number()), Content::Object(row)))
            }
        })
    }
}

/// The delimiter of a file that is read as a table. Its name decides too, so that the contents alone do not say how they
/// are read.
pub(super) fn table_delimiter(path: &Path) -> Option<u8> {
    if is_parquet(path).ok()? {
        return None;
    }
    match detect(path, DataSource::open(path).ok()?.beginning()).ok()? {
        TextFormat::Table { delimiter } => Some(delimiter),
        TextFormat::Lines | TextFormat::Array => None,
    }
}

/// Detected by magic bytes, not by the file's name.
fn is_parquet(path: &Path) -> io::Result<bool> {
    let mut beginning = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut beginning)?;
    Ok(beginning == b"PAR1")
}
