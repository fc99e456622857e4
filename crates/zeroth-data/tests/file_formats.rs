//! Files that are neither JSONL nor Parquet are recognised, with one error and a remedy.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use std::num::NonZeroU64;

use zeroth_data::{Encoder, EncoderOptions, PrepareOptions, Survey, Truncation, survey};

fn surveyed(name: &str, contents: &[u8]) -> Result<Survey, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, contents).unwrap();
    let encoder = Encoder::open(folder.path(), EncoderOptions::new(100)).unwrap();
    let options = PrepareOptions {
        max_length: 10,
        truncation: Truncation::Drop,
        max_samples: None::<NonZeroU64>,
        packing: false,
    };
    let place = format!("{}/", folder.path().display());
    survey(&[path], &encoder, &options, 0).map_err(|error| error.to_string().replace(&place, ""))
}

fn utf_16(text: &str, mark: bool, bytes: fn(u16) -> [u8; 2]) -> Vec<u8> {
    let mark = mark.then_some(0xFEFF);
    mark.into_iter().chain(text.encode_utf16()).flat_map(bytes).collect()
}

#[test]
fn unsupported_formats_are_reported_once() {
    let row = "{\"input_ids\": [1, 2]}\n";
    let array = "a JSON array: write one object per line (JSONL), e.g. with jq -c '.[]'";
    let csv = "a CSV table, which is not supported yet: convert it to JSONL, e.g. with pandas.read_csv('NAME').to_json('rows.jsonl', \
               orient='records', lines=True)";
    let tsv = csv.replace("CSV", "TSV").replace("'NAME')", "'NAME', sep='\\t')");
    let utf_16_as = |name| format!("UTF-16 text: convert it to UTF-8, e.g. with iconv -f {name} -t UTF-8");
    for (name, contents, expected) in [
        ("a.json", format!("[{}]", row.trim()).into_bytes(), array.to_owned()),
        ("a.json", format!("\n[\n  {row}]").into_bytes(), array.to_owned()),
        ("a.json", format!("\u{FEFF}[{}, {}]\n", row.trim(), row.trim()).into_bytes(), array.to_owned()),
        ("a.csv", b"question,answer\nWhy?,Because.\n".to_vec(), csv.to_owned()),
        ("a.txt", b"\"question\",\"the answer\"\n\"Why, oh?\",\"Because.\"\n".to_vec(), csv.to_owned()),
        ("a.csv", b"one column\nof text\n".to_vec(), csv.to_owned()),
        ("a.tsv", b"q\ta\n1\t2\n".to_vec(), tsv.clone()),
        ("a.txt", b"q\ta\n1\t2\n".to_vec(), tsv),
        ("a.jsonl", utf_16(row, true, u16::to_le_bytes), utf_16_as("UTF-16")),
        ("a.jsonl", utf_16(row, true, u16::to_be_bytes), utf_16_as("UTF-16")),
        ("a.jsonl", utf_16(row, false, u16::to_le_bytes), utf_16_as("UTF-16LE")),
        ("a.jsonl", utf_16(row, false, u16::to_be_bytes), utf_16_as("UTF-16BE")),
        (
            "a.arrow",
            b"ARROW1\0\0".to_vec(),
            "an Arrow file: convert it to JSONL or Parquet, e.g. with to_json or to_parquet of `datasets`"
                .to_owned(),
        ),
        (
            "a.jsonl.zst",
            b"\x28\xB5\x2F\xFD".to_vec(),
            "compressed with Zstandard: decompress it with unzstd".to_owned(),
        ),
    ] {
        let found = surveyed(name, &contents).unwrap_err();
        assert_eq!(found, format!("{name} is {}", expected.replace("NAME", name)));
    }
}

#[test]
fn invalid_lines_are_reported_individually() {
    for contents in [
        "[1, 2]\n{\"input_ids\": [1, 2]}\n",
        "hello, world\n{\"input_ids\": [1, 2]}\n",
        "{\"a\", \"b\"}\n1,2\n",
    ] {
        let found = surveyed("a.jsonl", contents.as_bytes()).unwrap();
        assert!(found.problems.count > 0, "{contents}");
    }
    // A file's name does not make it a table.
    assert_eq!(surveyed("a.csv", b"{\"input_ids\": [1, 2]}\n").unwrap().totals.samples, 1);
}
