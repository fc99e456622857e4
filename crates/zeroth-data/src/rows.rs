//! The rows of several files, one after the other, whatever their formats.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::lines::Lines;
use super::parquet_rows::ParquetRows;
use super::ready_row::kind;
use super::{DataError, RowProblem};

/// Where a row stands in its file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowNumber {
    /// A line of a text file.
    Line(u64),
    /// A row of a table.
    Row(u64),
}

impl fmt::Display for RowNumber {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(formatter, "line {number}"),
            Self::Row(number) => write!(formatter, "row {number}"),
        }
    }
}

/// A row as its file gives it.
pub(super) struct RawRow {
    /// Which of the files.
    pub(super) file: usize,
    pub(super) at: RowNumber,
    pub(super) content: Content,
    /// About how many bytes of the file it takes.
    pub(super) bytes: u64,
}

/// What a file gives for a row.
pub(super) enum Content {
    /// A line, not parsed yet: that is done on many threads.
    Line(Vec<u8>),
    /// A row of a table.
    Object(Map<String, Value>),
}

impl Content {
    /// About how much memory it takes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Line(text) => text.len(),
            Self::Object(row) => row.values().map(size_of_value).sum(),
        }
    }

    /// The row as an object.
    pub(super) fn into_object(self) -> Result<Map<String, Value>, RowProblem> {
        match self {
            Self::Line(text) => parsed(&text),
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

fn parsed(text: &[u8]) -> Result<Map<String, Value>, RowProblem> {
    match serde_json::from_slice(text).map_err(|error| not_json(&error))? {
        Value::Object(row) => Ok(row),
        other => Err(RowProblem::NotAnObject { found: kind(&other) }),
    }
}

fn not_json(error: &serde_json::Error) -> RowProblem {
    // The parser saw one line; "line 1" would be mistaken for the file's.
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default().to_owned();
    RowProblem::NotJson { message, column: error.column() }
}

/// The rows of all files, in the order given. After an error there are none.
pub(super) struct Rows<'a> {
    files: &'a [PathBuf],
    file: usize,
    open: Option<Open<'a>>,
    /// Rows that the open file gave.
    given: u64,
}

enum Open<'a> {
    Lines(Lines<'a>),
    Parquet(Box<ParquetRows<'a>>),
}

impl<'a> Rows<'a> {
    pub(super) fn new(files: &'a [PathBuf]) -> Self {
        Self { files, file: 0, open: None, given: 0 }
    }

    /// The next row. A file without rows is an error once it is read to its end.
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
                none => none.insert(Open::new(path)?),
            };
            let before = open.read();
            if let Some((at, content)) = open.next()? {
                self.given += 1;
                return Ok(Some(RawRow { file: self.file, at, content, bytes: open.read() - before }));
            }
            if self.given == 0 {
                return Err(DataError::Empty { path: path.clone() });
            }
            (self.file, self.open, self.given) = (self.file + 1, None, 0);
        }
        Ok(None)
    }
}

impl<'a> Open<'a> {
    fn new(path: &'a Path) -> Result<Self, DataError> {
        if is_parquet(path).map_err(|source| DataError::Read { path: path.to_owned(), line: 1, source })? {
            return Ok(Self::Parquet(Box::new(ParquetRows::open(path)?)));
        }
        Ok(Self::Lines(Lines::open(path)?))
    }

    /// About how many bytes of the file were read.
    fn read(&self) -> u64 {
        match self {
            Self::Lines(lines) => lines.read(),
            Self::Parquet(rows) => rows.read(),
        }
    }

    fn next(&mut self) -> Result<Option<(RowNumber, Content)>, DataError> {
        Ok(match self {
            Self::Lines(lines) => {
                lines.next()?.map(|(line, text)| (RowNumber::Line(line), Content::Line(text.to_vec())))
            }
            Self::Parquet(rows) => {
                rows.next()?.map(|row| (RowNumber::Row(rows.number()), Content::Object(row)))
            }
        })
    }
}

/// By how the file begins: names lie.
fn is_parquet(path: &Path) -> io::Result<bool> {
    let mut beginning = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut beginning)?;
    Ok(beginning == b"PAR1")
}
