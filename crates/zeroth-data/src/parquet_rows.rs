//! Reads the rows of a Parquet file as JSON objects: lists become arrays, structs and maps become objects.

use std::fs::File;
use std::path::Path;

use parquet::basic::CompressionCodec;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::FileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use super::catch_panic::catch_panic;
use super::parquet_pages::{BoundedFile, LargePage};
use super::parquet_row_sizes::LargeRow;
use super::row_limits::MAX_ROW_BYTES;
use super::{DataError, RowNumber, RowProblem};

/// Reads row by row; only a page of each column is in memory, and one row.
pub(super) struct ParquetRows<'a> {
    path: &'a Path,
    rows: RowIter<'static>,
    number: u64,
    count: u64,
    bytes: u64,
}

impl<'a> ParquetRows<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, DataError> {
        let file =
            File::open(path).map_err(|source| DataError::Read { path: path.to_owned(), line: 1, source })?;
        let bytes = file.metadata().map_or(0, |found| found.len());
        let reader = catch_errors(path, 1, || BoundedFile::new(file))?;
        if reader.metadata().file_metadata().schema_descr().num_columns() == 0 {
            return Err(DataError::Empty { path: path.to_owned() });
        }
        let columns = reader.metadata().row_groups().iter().flat_map(RowGroupMetaData::columns);
        if let Some(column) = columns.into_iter().find(|column| !is_read(column.compression_codec())) {
            let (column, codec) = (column.column_path().string(), column.compression_codec().to_string());
            return Err(DataError::Codec { path: path.to_owned(), column, codec });
        }
        let count = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
        // Readers decode as many rows at a time as their batch has.
        let rows = RowIter::from_file_into(Box::new(reader)).with_batch_size(1);
        Ok(Self { path, rows, number: 0, count, bytes })
    }

    /// Approximate bytes read so far.
    pub(super) fn read(&self) -> u64 {
        let share = self.number.min(self.count) as f64 / self.count.max(1) as f64;
        (self.bytes as f64 * share) as u64
    }

    /// The number of the last row read, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next row.
    pub(super) fn next(&mut self) -> Result<Option<Map<String, Value>>, DataError> {
        self.number += 1;
        let rows = &mut self.rows;
        let row = catch_errors(self.path, self.number, || rows.next().transpose())?;
        let bytes =
            row.iter().flat_map(Row::get_column_iter).map(|(_, field)| text_bytes(field)).sum::<u64>();
        if bytes > MAX_ROW_BYTES {
            let at = RowNumber::Row(self.number);
            return Err(DataError::RowTooLong { path: self.path.to_owned(), at });
        }
        Ok(row.as_ref().map(object))
    }
}

/// Whether a codec is supported.
fn is_read(codec: CompressionCodec) -> bool {
    use CompressionCodec::{GZIP, SNAPPY, UNCOMPRESSED, ZSTD};
    matches!(codec, UNCOMPRESSED | SNAPPY | GZIP | ZSTD)
}

/// Converts the reader's errors and panics: it asserts on damaged files and unsupported types.
fn catch_errors<T>(
    path: &Path,
    row: u64,
    read: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    let failed = |message| DataError::Parquet { path: path.to_owned(), row, message };
    match catch_panic(read) {
        Ok(read) => {
            read.map_err(|error| beyond_limit(path, &error).unwrap_or_else(|| failed(error.to_string())))
        }
        Err(panic) => Err(failed(panic)),
    }
}

/// What the pages were too large for.
fn beyond_limit(path: &Path, error: &ParquetError) -> Option<DataError> {
    let ParquetError::External(error) = error else { return None };
    let path = path.to_owned();
    if let Some(LargePage { column, bytes }) = error.downcast_ref() {
        return Some(DataError::LargePage { path, column: column.clone(), bytes: *bytes });
    }
    Some(match error.downcast_ref()? {
        LargeRow::Values { row } => {
            DataError::Row { path, at: RowNumber::Row(*row), problem: RowProblem::TooManyValues }
        }
        LargeRow::Bytes { row } => DataError::RowTooLong { path, at: RowNumber::Row(*row) },
    })
}

/// Bytes of the texts in a value.
fn text_bytes(field: &Field) -> u64 {
    match field {
        Field::Str(text) => text.len() as u64,
        Field::Bytes(bytes) => bytes.len() as u64,
        Field::Group(row) => row.get_column_iter().map(|(_, field)| text_bytes(field)).sum(),
        Field::ListInternal(list) => list.elements().iter().map(text_bytes).sum(),
        Field::MapInternal(map) => {
            map.entries().iter().map(|(name, entry)| text_bytes(name) + text_bytes(entry)).sum()
        }
        _ => 0,
    }
}

fn object(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(truth) => Value::from(*truth),
        Field::Byte(number) => Value::from(*number),
        Field::Short(number) => Value::from(*number),
        Field::Int(number) => Value::from(*number),
        Field::Long(number) => Value::from(*number),
        Field::UByte(number) => Value::from(*number),
        Field::UShort(number) => Value::from(*number),
        Field::UInt(number) => Value::from(*number),
        Field::ULong(number) => Value::from(*number),
        Field::Float16(number) => Value::from(f64::from(*number)),
        Field::Float(number) => Value::from(*number),
        Field::Double(number) => Value::from(*number),
        Field::Str(text) => Value::from(text.as_str()),
        // Some writers do not mark strings as such; other bytes (images, audio) cannot be trained on.
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_or(Value::Null, Value::from),
        Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_)
        | Field::Decimal(_) => Value::from(field.to_string()),
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let key = |field: &Field| match value(field) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(name, entry)| (key(name), value(entry))).collect())
        }
    }
}
