//! Parquet files as rows: nested columns become the JSON that a JSONL file would contain.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Map, Value, json};
use zeroth_data::{
    CacheFolder, Encode, Encoded, PrepareOptions, RowNumber, RowProblem, Samples, Truncation, prepare, survey,
};

/// Encodes a row as the bytes of its JSON, so that it can be compared.
struct AsJson;

impl Encode for AsJson {
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem> {
        if row.get("id") == Some(&json!(13)) {
            return Err(RowProblem::Empty);
        }
        into.ids.extend(Value::Object(row.clone()).to_string().bytes().map(i32::from));
        into.labels.clone_from(&into.ids);
        Ok(())
    }

    fn fingerprint(&self) -> [u8; 32] {
        [0; 32]
    }
}

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 10_000, truncation: Truncation::Drop, max_samples: None, packing: false };

/// In the layout of Hugging Face's `datasets`.
const SCHEMA: &str = "
message schema {
  required int64 id;
  optional group messages (LIST) {
    repeated group list {
      optional group element {
        optional binary role (UTF8);
        optional binary content (UTF8);
      }
    }
  }
  optional group translation {
    optional binary en (UTF8);
    optional binary de (UTF8);
  }
  optional group counts (MAP) {
    repeated group key_value {
      required binary key (UTF8);
      optional double value;
    }
  }
}";

/// A column's values with definition and repetition levels.
type Levels<'a> = (&'a [i16], &'a [i16]);

fn texts(group: &mut SerializedRowGroupWriter<'_, File>, values: &[&str], levels: Levels<'_>) {
    let values: Vec<ByteArray> = values.iter().map(|text| ByteArray::from(*text)).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&values, Some(levels.0), Some(levels.1)).unwrap();
    column.close().unwrap();
}

/// Rows 10, 11, 12 in one row group, and three from `second` on in another.
fn write(path: &Path, compression: Compression, second: i64) {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    for first in [10, second] {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let ids = [first, first + 1, first + 2];
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        // Two messages; an empty list; one message without a content.
        texts(&mut group, &["user", "assistant", "user"], (&[4, 4, 1, 4], &[0, 1, 0, 0]));
        texts(&mut group, &["What is 2 + 2?", "4 ✓"], (&[4, 4, 1, 3], &[0, 1, 0, 0]));
        // None; both; one of them.
        texts(&mut group, &["hello", "tree"], (&[0, 2, 2], &[0, 0, 0]));
        texts(&mut group, &["hallo"], (&[0, 2, 1], &[0, 0, 0]));
        // Two entries, the second without a value; an empty map; none.
        texts(&mut group, &["a", "b"], (&[2, 2, 1, 0], &[0, 1, 0, 0]));
        let mut column = group.next_column().unwrap().unwrap();
        let values = column.typed::<DoubleType>();
        values.write_batch(&[0.5], Some(&[3, 2, 1, 0]), Some(&[0, 1, 0, 0])).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn rows(first: u64) -> [Value; 3] {
    [
        json!({
            "id": first,
            "messages": [
                {"role": "user", "content": "What is 2 + 2?"},
                {"role": "assistant", "content": "4 ✓"},
            ],
            "translation": null,
            "counts": {"a": 0.5, "b": null},
        }),
        json!({
            "id": first + 1,
            "messages": [],
            "translation": {"en": "hello", "de": "hallo"},
            "counts": {},
        }),
        json!({
            "id": first + 2,
            "messages": [{"role": "user", "content": null}],
            "translation": {"en": "tree", "de": null},
            "counts": null,
        }),
    ]
}

fn read_back(samples: &Samples) -> Vec<Value> {
    let row = |sample| {
        let bytes: Vec<u8> = samples.ids(sample).unwrap().iter().map(|&id| id as u8).collect();
        serde_json::from_slice(&bytes).unwrap()
    };
    (0..samples.count().get()).map(row).collect()
}

fn prepared<const N: usize>(files: [&PathBuf; N], cache: &Path) -> Result<Samples, String> {
    let prepared = prepare(&files.map(PathBuf::clone), &AsJson, &OPTIONS, &CacheFolder::at(cache));
    prepared.map(|prepared| prepared.samples).map_err(|error| error.to_string())
}

#[test]
fn nested_columns_become_objects_and_lists() {
    let folder = tempfile::tempdir().unwrap();
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("zstd", Compression::ZSTD(parquet::basic::ZstdLevel::default())),
        ("gzip", Compression::GZIP(parquet::basic::GzipLevel::default())),
    ] {
        // Recognised by its magic bytes, not by its name.
        let path = folder.path().join(format!("{name}.jsonl"));
        write(&path, compression, 20);
        let samples = prepared([&path], folder.path()).unwrap();
        assert_eq!(read_back(&samples), [rows(10), rows(20)].concat(), "{name}");
    }
}

#[test]
fn unsupported_codecs_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    write(&path, Compression::SNAPPY, 20);
    let whole = std::fs::read(&path).unwrap();
    // In the footer, the codec follows the column's path: a 4-bit field delta, its type, and Snappy's number times
    // two.
    let place = whole.windows(5).rposition(|bytes| bytes == b"\x02id\x15\x02").unwrap() + 4;
    for (number, codec) in [(3, "LZO"), (4, "BROTLI"), (5, "LZ4"), (7, "LZ4_RAW")] {
        let mut bytes = whole.clone();
        bytes[place] = 2 * number;
        std::fs::write(&path, &bytes).unwrap();
        let message = prepared([&path], folder.path()).unwrap_err();
        let shown = path.display();
        assert_eq!(
            message,
            format!(
                "{shown} is a Parquet file whose column `id` is compressed with {codec}: supported are Snappy, Zstandard, gzip and none; rewrite it, e.g. with pandas.read_parquet('{shown}').to_parquet('rows.parquet', compression='zstd')"
            )
        );
    }
}

#[test]
fn parquet_and_jsonl_form_one_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let (table, lines) = (folder.path().join("a.parquet"), folder.path().join("b.jsonl"));
    write(&table, Compression::SNAPPY, 20);
    std::fs::write(&lines, "{\"id\": 1}\n").unwrap();
    let samples = prepared([&lines, &table, &lines], folder.path()).unwrap();
    assert_eq!(
        read_back(&samples),
        [vec![json!({"id": 1})], rows(10).into(), rows(20).into(), vec![json!({"id": 1})]].concat()
    );
    assert_eq!(samples.count().get(), 8);
}

#[test]
fn invalid_parquet_rows_are_reported_by_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    write(&path, Compression::SNAPPY, 12);
    let message = prepared([&path], folder.path()).unwrap_err();
    assert_eq!(message, format!("{}: row 5: the row has no tokens; remove it", path.display()));
    let survey = survey(&[path], &AsJson, &OPTIONS, 0).unwrap();
    assert_eq!(survey.problems.first[0].place.at, RowNumber::Row(5));
    assert_eq!((survey.rows, survey.totals.samples), (6, 5));
}

#[test]
fn damaged_parquet_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    write(&path, Compression::SNAPPY, 20);
    let whole = std::fs::read(&path).unwrap();
    let cut = folder.path().join("cut.parquet");
    for length in [4, 8, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&cut, &whole[..length]).unwrap();
        let message = prepared([&cut], folder.path()).unwrap_err();
        assert!(
            message.starts_with(&format!("cannot read {} as Parquet (row 1): ", cut.display())),
            "{message}"
        );
    }
    for place in (4..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x55;
        std::fs::write(&cut, &bytes).unwrap();
        let _ = survey(std::slice::from_ref(&cut), &AsJson, &OPTIONS, 1);
    }
}
