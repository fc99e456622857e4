//! Every file format gives the rows that JSONL gives; what cannot be read has one error with a position and a remedy.

mod same_rows;

use std::io::Write as _;
use std::num::NonZeroU64;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::Value;
use zeroth_data::{
    Columns, Encoder, EncoderOptions, PrepareOptions, RowNumber, Survey, Truncation, find_files, survey,
};

const OPTIONS: PrepareOptions = PrepareOptions {
    max_length: 10,
    truncation: Truncation::Drop,
    max_samples: None::<NonZeroU64>,
    packing: false,
};

const ROW: &str = "{\"input_ids\": [1, 2]}\n";

fn surveyed(name: &str, contents: &[u8]) -> Result<Survey, String> {
    surveyed_with("", name, contents)
}

fn surveyed_with(columns: &str, name: &str, contents: &[u8]) -> Result<Survey, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, contents).unwrap();
    let columns: Columns = columns.parse().unwrap();
    let options = EncoderOptions { columns, ..EncoderOptions::new(100) };
    let encoder = Encoder::open(folder.path(), options).unwrap();
    let place = format!("{}/", folder.path().display());
    survey(&[path], &encoder, &OPTIONS, 3).map_err(|error| error.to_string().replace(&place, ""))
}

/// Token ids of the rows, and the problems with their positions.
fn read(name: &str, contents: &[u8]) -> (Vec<Vec<i32>>, Vec<String>) {
    let found = surveyed(name, contents).unwrap_or_else(|error| panic!("{name}: {error}"));
    let problems = found.problems.first.iter().map(|found| format!("{}: {}", found.place.at, found.message));
    (found.first.iter().map(|first| first.row.ids.clone()).collect(), problems.collect())
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 0).unwrap();
    // As the zstd command does.
    encoder.include_checksum(true).unwrap();
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn utf_16(text: &str, mark: bool, bytes: fn(u16) -> [u8; 2]) -> Vec<u8> {
    let mark = mark.then_some(0xFEFF);
    mark.into_iter().chain(text.encode_utf16()).flat_map(bytes).collect()
}

#[test]
fn unsupported_formats_are_reported_once() {
    let utf_16_as = |name| format!("UTF-16 text: convert it to UTF-8, e.g. with iconv -f {name} -t UTF-8");
    let mut tar = vec![0; 512];
    tar[257..262].copy_from_slice(b"ustar");
    for (name, contents, expected) in [
        ("a.jsonl", utf_16(ROW, true, u16::to_le_bytes), utf_16_as("UTF-16")),
        ("a.jsonl", utf_16(ROW, true, u16::to_be_bytes), utf_16_as("UTF-16")),
        ("a.jsonl", utf_16(ROW, false, u16::to_le_bytes), utf_16_as("UTF-16LE")),
        ("a.jsonl", utf_16(ROW, false, u16::to_be_bytes), utf_16_as("UTF-16BE")),
        (
            "a.arrow",
            b"ARROW1\0\0".to_vec(),
            "an Arrow file: convert it to JSONL or Parquet, e.g. with to_json or to_parquet of `datasets`"
                .to_owned(),
        ),
        ("a.xz", b"\xFD7zXZ\0".to_vec(), "compressed with xz: decompress it with unxz".to_owned()),
        ("a.tar.gz", gzip(&tar), "a tar archive: unpack it with tar -x".to_owned()),
        (
            "a.parquet.gz",
            gzip(b"PAR1"),
            "a Parquet file: decompress it: Parquet compresses its columns itself".to_owned(),
        ),
        ("a.gz", zstd(&gzip(b"{}")), "compressed twice, with gzip inside: decompress it once".to_owned()),
    ] {
        let found = surveyed(name, &contents).unwrap_err();
        assert_eq!(found, format!("{name} is {expected}"));
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
    assert_eq!(surveyed("a.csv", ROW.as_bytes()).unwrap().totals.samples, 1);
}

#[test]
fn elements_of_an_array_are_rows() {
    let array = " [ {\"input_ids\": [1, 2], \"labels\": [1, 2]},\n\n{\"a\": \"],[ \\\" \\\\\", \"input_ids\":\n[3, 4]}\n] \n";
    let expected = (vec![vec![1, 2], vec![3, 4]], vec![]);
    assert_eq!(read("a.json", array.as_bytes()), expected);
    assert_eq!(read("a.jsonl", format!("\u{FEFF}{array}").as_bytes()), expected, "by its bytes");
    assert_eq!(read("a.json.zst", &zstd(array.as_bytes())), expected);

    // Invalid elements are rows with problems, at their row and line.
    let (ids, problems) = read("a.json", b"[{\"input_ids\": [1\n2]}, 7,\n{\"input_ids\": [3, 4]} {},\n]");
    assert!(ids.is_empty());
    assert_eq!(
        problems,
        [
            "row 1 (line 1): not JSON: expected `,` or `]`, line 2, column 1 of the row",
            "row 2 (line 2): a row must be a JSON object, as in {\"input_ids\": [1, 2, 3]}: found a number",
            "row 3 (line 3): not JSON: trailing characters, line 1, column 23 of the row",
            "row 4 (line 4): no row follows the comma: remove it",
        ]
    );
    for (contents, expected) in [
        ("[]", "a.json has no rows: it is empty, or all lines are blank"),
        (
            "[\n{\"input_ids\": [1]},\n{\"input",
            "a.json ends inside row 2 (line 3) of its JSON array: a bracket or a quote is not closed; is the file complete?",
        ),
        (
            "[{\"input_ids\": [1]}]\n[{\"input_ids\": [1]}]",
            "a.json: line 2: text follows the end of the JSON array: a file is one array, or JSONL with one object per \
             line",
        ),
    ] {
        assert_eq!(surveyed("a.json", contents.as_bytes()).unwrap_err(), expected);
    }
}

#[test]
fn records_of_a_table_are_rows() {
    let tokens = "id,input_ids,labels\n7,\"[1, 2]\",\n\n8,\"[3,\n4]\",\"[-100,4]\"\n";
    let expected = (vec![vec![1, 2], vec![3, 4]], vec![]);
    assert_eq!(read("a.csv", tokens.as_bytes()), expected);
    assert_eq!(read("a.csv", format!("\u{FEFF}{}", tokens.replace('\n', "\r\n")).as_bytes()), expected);
    assert_eq!(read("a.csv", tokens.trim_end().as_bytes()), expected, "no line end at the end");
    assert_eq!(read("a.csv.gz", &gzip(tokens.as_bytes())), expected);
    assert_eq!(read("a.csv", b"id;input_ids\n7;[1, 2]\n8;[3, 4]\n"), expected);
    assert_eq!(read("a.tsv", b"id\tinput_ids\n7\t[1, 2]\n8\t[3, 4]\n"), expected);
    assert_eq!(read("a.txt", b"id;input_ids\n7;[1, 2]\n8;[3, 4]\n"), expected, "by its lines");

    let (ids, problems) = read(
        "a.csv",
        b"id,input_ids\r\n1,\"[1,\r\n2]\"\r\n\r\n2\r\n3,\"[1, 2]\",\r\n4,\"['a']\"\r\n5,\xFF\r\n",
    );
    assert_eq!(ids, [[1, 2]]);
    assert_eq!(
        problems,
        [
            "row 2 (line 5): the row has 1 field, but the header names 2 columns: fields with a delimiter, a quote or a \
             line end must be quoted",
            "row 3 (line 6): the row has 3 fields, but the header names 2 columns: fields with a delimiter, a quote or a \
             line end must be quoted",
            "row 4 (line 7): `input_ids` must be JSON, as json.dumps of Python writes it: expected value at line 1 \
             column 2",
            "row 5 (line 8): `input_ids` is not UTF-8 text",
        ]
    );
}

#[test]
fn tables_without_a_known_header_are_refused() {
    let known = "known formats are {\"input_ids\": [...], \"labels\": [...]}, ";
    for (name, contents, expected) in [
        ("a.csv", "Why?,Because.\nHow?,So.\n", "no row format has these columns: `Why?`, `Because.`; "),
        ("a.csv", "one column\nof text\n", "no row format has these columns: `one column`; "),
        (
            "a.tsv",
            "questions\tanswer\n1\t2\n",
            "`questions`, `answer` (`questions` is similar to `question`); ",
        ),
    ] {
        let found = surveyed(name, contents.as_bytes()).unwrap_err();
        assert!(found.starts_with(&format!("{name}: the first line must name the columns: ")), "{found}");
        assert!(found.contains(expected) && found.contains(known), "{found}");
        assert!(
            found.ends_with("--columns maps other names, as in --columns question=problem,answer=solution")
        );
    }
    let mapped = surveyed_with("input_ids=ids", "a.csv", b"ids\n\"[1, 2]\"\n").unwrap();
    assert_eq!(mapped.first[0].row.ids, [1, 2]);
    assert_eq!(mapped.first[0].place.at, RowNumber::RowAtLine { row: 1, line: 2 });
    let found = surveyed_with("input_ids=idz", "a.csv", b"ids\n\"[1, 2]\"\n").unwrap_err();
    assert!(
        found.contains("--columns input_ids=idz: the row has no column `idz` (did you mean `ids`?)"),
        "{found}"
    );
    for (contents, expected) in [
        ("text,text\n1,2\n", "a.csv: the header names the column `text` twice"),
        (
            "text\nok\n\"open\nnever closed\n",
            "a.csv: row 2 (line 3): a quote is opened and never closed: a quote inside a quoted field is written twice",
        ),
        ("text\n", "a.csv has no rows: it is empty, or all lines are blank"),
    ] {
        assert_eq!(surveyed("a.csv", contents.as_bytes()).unwrap_err(), expected);
    }
}

#[test]
fn compressed_files_are_read_or_say_where_they_end() {
    let row = |row: usize| format!("{{\"input_ids\": [{}, {}]}}\n", row % 97, row * 7 % 97);
    let rows = (0..2000).map(row).collect::<Vec<_>>().concat();
    let plain = read("a.jsonl", rows.as_bytes());
    let (first, second) = rows.split_at(rows.len() / 3 + 5);
    let parts =
        |compress: fn(&[u8]) -> Vec<u8>| [compress(first.as_bytes()), compress(second.as_bytes())].concat();
    for compressed in [parts(gzip), parts(zstd)] {
        // Names say nothing.
        assert_eq!(read("a.jsonl", &compressed), plain);
        let whole = surveyed("a.jsonl", &compressed).unwrap();
        assert_eq!(whole.rows, 2000);
        let cut = surveyed("a.jsonl", &compressed[..compressed.len() * 9 / 10]).unwrap_err();
        let (name, check) = if compressed[0] == 0x1F { ("gzip", "gzip") } else { ("Zstandard", "zstd") };
        assert!(
            cut.starts_with(&format!("a.jsonl is cut short: its {name} stream ends after line ")),
            "{cut}"
        );
        assert!(cut.contains(&format!(": copy or download it again; `{check} -t ")), "{cut}");
        let mut damaged = compressed.clone();
        let middle = damaged.len() / 4;
        damaged[middle..middle + 64].fill(0xA5);
        let found = surveyed("a.jsonl", &damaged).err().unwrap_or_default();
        assert!(found.contains(&format!(" cannot be decompressed with {name} ")), "{found}");
    }
    let found = surveyed("a.gz", b"\x1F\x8B\x08").unwrap_err();
    assert!(
        found.starts_with("a.gz is cut short: its gzip stream ends before the end of its first row"),
        "{found}"
    );
}

#[test]
fn a_row_of_a_compressed_file_is_bounded() {
    // 100 MB of a single line, of an array's element and of a quoted field, in a few kilobytes.
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    for _ in 0..100 {
        encoder.write_all(&vec![b' '; 1_000_000]).unwrap();
    }
    let blanks = encoder.finish().unwrap();
    for (name, begin, at) in [
        ("a.jsonl.zst", "{\"text\": \"", "line 1"),
        ("a.json.zst", "[{\"text\": \"", "row 1 (line 1)"),
        ("a.csv.zst", "text\n\"", "row 1 (line 2)"),
    ] {
        let found = surveyed(name, &[zstd(begin.as_bytes()), blanks.clone()].concat()).unwrap_err();
        assert_eq!(found, format!("{name}: {at} is longer than 67.1 MB: is it text?"));
    }
}

#[test]
fn folders_and_patterns_are_lists_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in [
        "b/2.jsonl",
        "b/.cache/x.jsonl",
        "a.csv.gz",
        "B.PARQUET",
        "README.md",
        ".hidden.jsonl",
        "b/dataset_info.json",
    ] {
        std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        std::fs::write(at(name), ROW).unwrap();
    }
    std::os::unix::fs::symlink(at("b/2.jsonl"), at("c.jsonl")).unwrap();
    let found = find_files(&[folder.path().to_owned()]).unwrap();
    assert_eq!(found.files, ["B.PARQUET", "a.csv.gz", "b/2.jsonl", "c.jsonl"].map(at));
    assert_eq!(found.skipped, ["README.md", "b/dataset_info.json"].map(at));

    let pattern =
        |text: &str| find_files(&[at(text)]).map(|found| found.files).map_err(|error| error.to_string());
    assert_eq!(pattern("**/*.jsonl").unwrap(), ["b/2.jsonl", "c.jsonl"].map(at));
    assert_eq!(pattern("?.[c-j]*").unwrap(), ["a.csv.gz", "c.jsonl"].map(at));
    std::fs::write(at("odd[1].jsonl"), ROW).unwrap();
    assert_eq!(pattern("odd[1].jsonl").unwrap(), [at("odd[1].jsonl")], "a file's name is not a pattern");
    for (text, expected) in [
        ("x*.jsonl", "it matches no file"),
        ("b*", "it matches folders only; name a folder itself to read it"),
        ("a**b", "recursive wildcards must form a single path component"),
    ] {
        let found = pattern(text).unwrap_err();
        assert_eq!(found, format!("data files `{}`: {expected}", at(text).display()));
    }
    assert_eq!(
        pattern("none.jsonl").unwrap_err(),
        format!("data file {} does not exist", at("none.jsonl").display())
    );

    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("a.txt"), ROW).unwrap();
    let found = find_files(&[empty.path().to_owned()]).unwrap_err().to_string();
    let shown = empty.path().display();
    assert_eq!(
        found,
        format!(
            "{shown} has no data files: found {shown}/a.txt; names of data files end in .jsonl, .ndjson, .json, .csv, .tsv, \
             .parquet, .jsonlines, also with .gz or .zst"
        )
    );
    std::os::unix::fs::symlink(empty.path(), empty.path().join("loop")).unwrap();
    let found = find_files(&[empty.path().to_owned()]).unwrap_err().to_string();
    assert_eq!(found, format!("cannot list the folder {shown}/loop: a symlink leads back to it"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Damaged files are rows, problems or an error, in every format.
    #[test]
    fn damaged_files_never_panic(
        format in 0_usize..6,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<proptest::sample::Index>(),
    ) {
        let array = "[{\"input_ids\": [1, 2], \"a\": \"]\\\"\"},\n {\"input_ids\": [3]}, {}]";
        let table = "input_ids,id\n\"[1, 2]\",7\n\"[3]\",\"a \"\"b\"\"\n\"\n";
        let (name, mut bytes) = match format {
            0 => ("a.json", array.as_bytes().to_vec()),
            1 => ("a.csv", table.as_bytes().to_vec()),
            2 => ("a.tsv", table.replace(',', "\t").into_bytes()),
            3 => ("a.json.gz", gzip(array.as_bytes())),
            4 => ("a.csv.zst", zstd(table.as_bytes())),
            _ => ("a.jsonl.zst", [zstd(ROW.as_bytes()), zstd(ROW.as_bytes())].concat()),
        };
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len() * 3).max(1));
        match surveyed(name, &bytes) {
            Ok(found) => prop_assert!(found.rows <= 40),
            Err(error) => prop_assert!(error.contains(name), "{}", error),
        }
    }
}

/// Rows as JSON for tests of other formats.
fn objects(jsonl: &str) -> Vec<Value> {
    jsonl.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Paths of files in a folder.
fn in_folder(folder: &std::path::Path, names: &[&str]) -> Vec<PathBuf> {
    names.iter().map(|name| folder.join(name)).collect()
}
