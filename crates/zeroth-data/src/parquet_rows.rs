//! The rows of a Parquet file as JSON objects: lists become lists, structs and maps become objects.

use std::fs::File;
use std::path::Path;

use parquet::basic::CompressionCodec;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use super::DataError;
use super::guarded::guarded as caught;

/// Reads one row after the other; a page of each column is in memory, never the file.
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
        let reader = guarded(path, 1, || SerializedFileReader::new(file))?;
        if reader.metadata().file_metadata().schema_descr().num_columns() == 0 {
            return Err(DataError::Empty { path: path.to_owned() });
        }
        let columns = reader.metadata().row_groups().iter().flat_map(RowGroupMetaData::columns);
        if let Some(column) = columns.into_iter().find(|column| !is_read(column.compression_codec())) {
            let (column, codec) = (column.column_path().string(), column.compression_codec().to_string());
            return Err(DataError::Codec { path: path.to_owned(), column, codec });
        }
        let count = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
        Ok(Self { path, rows: RowIter::from_file_into(Box::new(reader)), number: 0, count, bytes })
    }

    /// About how many bytes of the file were read.
    pub(super) fn read(&self) -> u64 {
        let share = self.number.min(self.count) as f64 / self.count.max(1) as f64;
        (self.bytes as f64 * share) as u64
    }

    /// The number of the row that was read last, counted from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next row.
    pub(super) fn next(&mut self) -> Result<Option<Map<String, Value>>, DataError> {
        self.number += 1;
        let rows = &mut self.rows;
        let row = guarded(self.path, self.number, || rows.next().transpose())?;
        Ok(row.as_ref().map(object))
    }
}

/// Whether a codec is built in.
fn is_read(codec: CompressionCodec) -> bool {
    use CompressionCodec::{GZIP, SNAPPY, UNCOMPRESSED, ZSTD};
    matches!(codec, UNCOMPRESSED | SNAPPY | GZIP | ZSTD)
}

/// The reader's error, and also its panic: it asserts what a damaged file, or a type it has no code for, breaks.
fn guarded<T>(path: &Path, row: u64, read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, DataError> {
    let failed = |message| DataError::Parquet { path: path.to_owned(), row, message };
    match caught(read) {
        Ok(read) => read.map_err(|error| failed(error.to_string())),
        Err(panic) => Err(failed(panic)),
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
        // Writers that do not mark texts as such give bytes; other bytes (pictures, sounds) are nothing to train on.
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
