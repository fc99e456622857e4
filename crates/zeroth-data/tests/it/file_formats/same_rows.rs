//! The same 1,000 rows in every format are the same token cache.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::Value;
use zeroth_data::{CacheFolder, Encoder, EncoderOptions, PrepareOptions, Truncation, find_files, prepare};

use super::{gzip, in_folder, objects, zstd};

const COLUMNS: [&str; 2] = ["question", "answer"];

fn text<'a>(row: &'a Value, column: &str) -> &'a str {
    row[column].as_str().unwrap()
}

fn table(rows: &[Value], delimiter: &str, line_end: &str) -> String {
    let quoted = |cell: &str| format!("\"{}\"", cell.replace('"', "\"\""));
    let record = |row: &Value| COLUMNS.map(|column| quoted(text(row, column))).join(delimiter) + line_end;
    [COLUMNS.join(delimiter) + line_end].into_iter().chain(rows.iter().map(record)).collect()
}

fn write_parquet(path: &Path, rows: &[Value]) {
    let schema = "message schema { required binary question (UTF8); required binary answer (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for name in COLUMNS {
        let cells: Vec<ByteArray> = rows.iter().map(|row| ByteArray::from(text(row, name))).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&cells, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn every_format_gives_the_same_token_cache() {
    const HEADER: usize = 256;
    /// Where the header has the key, which names the files' contents, and its own checksum.
    const KEY: std::ops::Range<usize> = 160..192;
    const CHECKSUM: std::ops::Range<usize> = 224..256;
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/gsm8k");
    let all = fs::read_to_string(examples.join("train.jsonl")).unwrap();
    let jsonl: String = all.split_inclusive('\n').take(1000).collect();
    let rows = objects(&jsonl);
    assert_eq!(rows.len(), 1000);
    assert!(rows.iter().any(|row| text(row, "answer").contains('\n')), "line ends are tested too");

    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let array = serde_json::to_string_pretty(&rows).unwrap();
    let csv = table(&rows, ",", "\n");
    let tsv = table(&rows, "\t", "\r\n");
    let (first, second) = jsonl.split_at(jsonl.len() / 2);
    for (name, contents) in [
        ("rows.jsonl", jsonl.clone().into_bytes()),
        ("rows.json", array.clone().into_bytes()),
        ("rows.jsonl.gz", [gzip(first.as_bytes()), gzip(second.as_bytes())].concat()),
        ("rows.jsonl.zst", [zstd(first.as_bytes()), zstd(second.as_bytes())].concat()),
        ("rows.json.zst", zstd(array.as_bytes())),
        ("rows.csv", csv.clone().into_bytes()),
        ("rows.csv.gz", gzip(format!("\u{FEFF}{csv}").as_bytes())),
        ("rows.tsv", tsv.into_bytes()),
    ] {
        fs::write(at(name), contents).unwrap();
    }
    write_parquet(&at("rows.parquet"), &rows);
    fs::create_dir_all(at("parts/2")).unwrap();
    fs::write(at("parts/1.json"), serde_json::to_string(&rows[..300]).unwrap()).unwrap();
    fs::write(at("parts/2/1.csv.zst"), zstd(table(&rows[300..700], ";", "\n").as_bytes())).unwrap();
    write_parquet(&at("parts/3.parquet"), &rows[700..]);

    let encoder = Encoder::open(&examples.join("tiny-qwen3"), EncoderOptions::new(100_000)).unwrap();
    let options =
        PrepareOptions { max_length: 300, truncation: Truncation::Right, max_samples: None, packing: true };
    let cache = CacheFolder::at(at("cache"));
    let prepared = |paths: &[PathBuf]| {
        let files = find_files(paths).unwrap().files;
        let prepared = prepare(&files, &encoder, &options, &cache).unwrap();
        assert!(prepare(&files, &encoder, &options, &cache).unwrap().found, "{files:?}");
        assert!(!prepared.found, "{files:?}");
        let mut bytes = fs::read(&prepared.path).unwrap();
        bytes[KEY].fill(0);
        bytes[CHECKSUM].fill(0);
        (prepared, bytes)
    };
    let (expected, bytes) = prepared(&[at("rows.jsonl")]);
    assert_eq!(expected.rows, 1000);
    assert!(bytes.len() > HEADER + 8 * 1000 && bytes[..HEADER].iter().any(|byte| *byte != 0));
    let others = in_folder(
        folder.path(),
        &[
            "rows.json",
            "rows.jsonl.gz",
            "rows.jsonl.zst",
            "rows.json.zst",
            "rows.csv",
            "rows.csv.gz",
            "rows.tsv",
            "rows.parquet",
            "parts",
        ],
    );
    for path in others {
        let (found, other) = prepared(std::slice::from_ref(&path));
        assert_eq!(found.samples.hash(), expected.samples.hash(), "{}", path.display());
        assert!(other == bytes, "{}: the cache differs", path.display());
    }
}
