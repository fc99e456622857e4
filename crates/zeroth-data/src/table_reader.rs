//! Reads the records of a CSV or TSV file, which begins with the names of its columns.
//!
//! Cells are texts. Those of columns that hold lists or objects, such as `messages` and `input_ids`, are parsed as JSON.

use std::collections::HashSet;
use std::io::{self, BufRead};
use std::path::Path;
use std::sync::Arc;

use csv_core::ReadRecordResult;
use serde_json::{Map, Value};

use super::columns::Columns;
use super::row_format::RowFormat;
use super::row_limits::{MAX_ROW_BYTES, MAX_ROW_VALUES, has_too_many_values};
use super::source::{DataSource, line_ends};
use super::{DataError, RowNumber, RowProblem};

/// Columns whose cells are JSON; an empty cell is null.
const JSON_COLUMNS: [&str; 8] =
    ["messages", "conversations", "input_ids", "labels", "attention_mask", "history", "tools", "translation"];

/// The columns of a table.
#[derive(Debug)]
pub(super) struct TableHeader {
    /// Their names; those without one are not read.
    names: Vec<String>,
    /// Whether their cells are JSON.
    is_json: Vec<bool>,
}

impl TableHeader {
    /// Reads the first record. `columns` are those of the row formats, unless any are accepted.
    fn new(path: &Path, record: &TableRecord, columns: Option<&Columns>) -> Result<Self, DataError> {
        let names: Vec<String> =
            record.cells().map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect();
        let mut known = HashSet::new();
        if let Some(name) = names.iter().find(|name| !name.is_empty() && !known.insert(name.as_str())) {
            return Err(DataError::TwiceInHeader { path: path.to_owned(), name: name.clone() });
        }
        let theirs: Vec<&str> = columns
            .map_or_else(Vec::new, |columns| JSON_COLUMNS.iter().map(|name| columns.theirs(name)).collect());
        let is_json = names.iter().map(|name| theirs.contains(&name.as_str())).collect();
        if let Some(columns) = columns {
            let row: Map<String, Value> =
                names.iter().filter(|name| !name.is_empty()).map(|name| (name.clone(), "".into())).collect();
            if let Err(
                problem @ (RowProblem::UnknownFormat { .. }
                | RowProblem::NoSuchColumn { .. }
                | RowProblem::SourceAndTarget { .. }),
            ) = RowFormat::of(&row, columns)
            {
                return Err(DataError::Header { path: path.to_owned(), problem });
            }
        }
        Ok(Self { names, is_json })
    }

    /// A record as an object.
    pub(super) fn object(&self, record: &TableRecord) -> Result<Map<String, Value>, RowProblem> {
        if record.ends.len() != self.names.len() {
            return Err(RowProblem::Ragged { found: record.ends.len(), expected: self.names.len() });
        }
        let mut row = Map::new();
        for ((name, is_json), cell) in self.names.iter().zip(&self.is_json).zip(record.cells()) {
            if name.is_empty() {
                continue;
            }
            let text = str::from_utf8(cell).map_err(|_| RowProblem::CellNotText { key: name.clone() })?;
            let value = if !is_json {
                Value::from(text)
            } else if text.trim().is_empty() {
                Value::Null
            } else if has_too_many_values(cell) {
                return Err(RowProblem::TooManyValues);
            } else {
                serde_json::from_str(text).map_err(|error| RowProblem::CellNotJson {
                    key: name.clone(),
                    message: error.to_string(),
                })?
            };
            row.insert(name.clone(), value);
        }
        Ok(row)
    }
}

/// The cells of a record.
#[derive(Debug, Default)]
pub(super) struct TableRecord {
    /// All cells, end to end.
    bytes: Vec<u8>,
    /// The end of each.
    ends: Vec<usize>,
}

impl TableRecord {
    /// Bytes of all cells.
    pub(super) fn size(&self) -> usize {
        self.bytes.len()
    }

    fn cells(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.bytes[start..*end])
    }
}

/// The records of a table.
pub(super) struct TableRecords<'a> {
    path: &'a Path,
    source: DataSource,
    parser: csv_core::Reader,
    header: Arc<TableHeader>,
    row: u64,
    /// The current line, from 1.
    line: u64,
    read: u64,
}

impl<'a> TableRecords<'a> {
    /// Reads the header. `columns` are those of the row formats, unless any are accepted.
    pub(super) fn open(
        path: &'a Path,
        source: DataSource,
        delimiter: u8,
        columns: Option<&Columns>,
    ) -> Result<Self, DataError> {
        let parser = csv_core::ReaderBuilder::new().delimiter(delimiter).build();
        let no_columns = Arc::new(TableHeader { names: Vec::new(), is_json: Vec::new() });
        let mut table = Self { path, source, parser, header: no_columns, row: 0, line: 1, read: 0 };
        if let Some((_, first)) = table.next_record()? {
            table.header = Arc::new(TableHeader::new(path, &first, columns)?);
            table.row = 0;
        }
        Ok(table)
    }

    /// Bytes of the file read so far.
    pub(super) fn read(&self) -> u64 {
        self.source.compressed_bytes().unwrap_or(self.read)
    }

    pub(super) fn header(&self) -> &Arc<TableHeader> {
        &self.header
    }

    /// The next record and its position.
    pub(super) fn next_record(&mut self) -> Result<Option<(RowNumber, TableRecord)>, DataError> {
        if !self.skip_line_ends()? {
            return Ok(None);
        }
        self.row += 1;
        let at = RowNumber::RowAtLine { row: self.row, line: self.line };
        let begin = self.read;
        let mut record = TableRecord { bytes: vec![0; 256], ends: vec![0; self.header.names.len() + 8] };
        let (mut size, mut cells) = (0, 0);
        loop {
            let available = self.source.fill_buf().map_err(failed(self.path, self.line))?;
            let is_end = available.is_empty();
            // Ends the last record, unless a quote is open.
            let input = if is_end { b"\n" } else { available };
            let (result, count, bytes, ends) =
                self.parser.read_record(input, &mut record.bytes[size..], &mut record.ends[cells..]);
            (size, cells) = (size + bytes, cells + ends);
            if !is_end {
                self.line += line_ends(&available[..count]);
                self.read += count as u64;
                self.source.consume(count);
            }
            if cells as u64 > MAX_ROW_VALUES {
                let problem = RowProblem::TooManyValues;
                return Err(DataError::Row { path: self.path.to_owned(), at, problem });
            }
            match result {
                ReadRecordResult::InputEmpty if is_end => {
                    return Err(DataError::OpenQuote { path: self.path.to_owned(), at });
                }
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull => record.bytes.resize(2 * record.bytes.len(), 0),
                ReadRecordResult::OutputEndsFull => record.ends.resize(2 * record.ends.len(), 0),
                ReadRecordResult::Record => {
                    record.bytes.truncate(size);
                    record.ends.truncate(cells);
                    return Ok(Some((at, record)));
                }
                ReadRecordResult::End => return Ok(None),
            }
            if self.read - begin > MAX_ROW_BYTES {
                return Err(DataError::RowTooLong { path: self.path.to_owned(), at });
            }
        }
    }

    /// Skips blank lines; whether anything follows.
    fn skip_line_ends(&mut self) -> Result<bool, DataError> {
        loop {
            let available = self.source.fill_buf().map_err(failed(self.path, self.line))?;
            let count = available.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            let (is_end, is_more) = (available.is_empty(), count < available.len());
            self.line += line_ends(&available[..count]);
            self.read += count as u64;
            self.source.consume(count);
            if is_end || is_more {
                return Ok(is_more);
            }
        }
    }
}

fn failed(path: &Path, line: u64) -> impl FnOnce(io::Error) -> DataError {
    move |source| DataError::Read { path: path.to_owned(), line, source }
}
