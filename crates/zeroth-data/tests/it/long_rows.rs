//! Rows that are too long whatever their tokens are: dropped without being tokenised, or refused, in every format.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use tempfile::TempDir;
use zeroth_data::{
    CacheFolder, Encode, Encoded, Encoder, EncoderOptions, PrepareOptions, RowProblem, SkipRule, Totals,
    Truncation, prepare, survey,
};

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 64, truncation: Truncation::Drop, max_samples: None, packing: false };
/// More values than a row may have.
const VALUES: usize = (4 << 20) + 1;

/// A model folder with the small tokenizer and a template of contents and line ends.
fn folder() -> TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden.join("tokenizer/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let special = json!({"eos_token": "<|im_end|>"});
    fs::write(folder.path().join("tokenizer_config.json"), special.to_string()).unwrap();
    let template = "{% for message in messages %}{{ message.content }}\n{% endfor %}";
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

fn encoder(folder: &Path) -> Encoder {
    Encoder::open(folder, EncoderOptions::new(10_000)).unwrap()
}

fn written(folder: &Path, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, contents).unwrap();
    path
}

fn prepared(folder: &Path, file: &Path, options: &PrepareOptions) -> Result<Totals, String> {
    let found = prepare(&[file.to_owned()], &encoder(folder), options, &CacheFolder::at(folder));
    let error =
        |error: zeroth_data::DataError| error.to_string().replace(&format!("{}/", folder.display()), "");
    found.map(|found| found.samples.totals()).map_err(error)
}

#[test]
fn certainly_too_long_rows_are_not_tokenised() {
    let folder = folder();
    let encoder = encoder(folder.path());
    let rows = [
        json!({"text": "word ".repeat(400)}),
        json!({"prompt": "word ".repeat(390), "completion": "word ".repeat(10)}),
        json!({"messages": [{"role": "user", "content": "word ".repeat(399)}, {"role": "assistant", "content": "Yes"}]}),
        json!({"question": "word ".repeat(399), "answer": "Yes"}),
    ];
    for row in rows {
        let row = row.as_object().unwrap();
        let read = |skips| {
            let mut into = Encoded { skips, ..Encoded::default() };
            encoder.encode(row, &mut into).unwrap();
            into
        };
        let tokens = read(None).ids.len() as u64;
        // The longest token of this tokenizer has 25 bytes.
        let skipped = read(Some(SkipRule { tokens: 64, bytes: 0 }));
        assert_eq!((skipped.ids.len(), skipped.skipped), (0, Some(80)), "{tokens} tokens");
        assert!(tokens > 80);
        for rule in [SkipRule { tokens: 80, bytes: 0 }, SkipRule { tokens: 64, bytes: 5000 }] {
            let found = read(Some(rule));
            assert_eq!((found.ids.len() as u64, found.skipped), (tokens, None), "{rule:?}");
        }
    }
}

#[test]
fn rows_that_are_not_tokenised_are_counted() {
    let folder = folder();
    let rows = [json!({"text": "Hi"}), json!({"text": "word ".repeat(40_000)}), json!({"text": "Ho"})];
    let rows = rows.map(|row| row.to_string()).join("\n");
    let file = written(folder.path(), "rows.jsonl", rows);
    let totals = prepared(folder.path(), &file, &OPTIONS).unwrap();
    assert_eq!((totals.samples, totals.too_long), (2, 1));
    let truncated = PrepareOptions { truncation: Truncation::Right, ..OPTIONS };
    let totals = prepared(folder.path(), &file, &truncated).unwrap();
    assert_eq!((totals.samples, totals.truncated, totals.longest), (3, 1, 64));
    // Previews show how long it is.
    let found = survey(&[file], &encoder(folder.path()), &OPTIONS, 1).unwrap();
    assert_eq!((found.too_long.count, found.totals.too_long), (1, 1));
    assert!(found.lengths.last().unwrap().to > 100_000, "{:?}", found.lengths);
}

#[test]
fn longer_texts_than_are_tokenised_are_dropped_or_refused() {
    let folder = folder();
    let text = "word ".repeat(2 << 20);
    let rows = [json!({"text": "Hi"}), json!({ "text": text })].map(|row| row.to_string()).join("\n");
    let file = written(folder.path(), "rows.jsonl", rows);
    assert_eq!(prepared(folder.path(), &file, &OPTIONS).map(|totals| totals.too_long), Ok(1));
    let found = survey(std::slice::from_ref(&file), &encoder(folder.path()), &OPTIONS, 1).unwrap();
    assert_eq!((found.rows, found.too_long.count, found.problems.count), (2, 1, 0));
    let truncated = PrepareOptions { truncation: Truncation::Right, ..OPTIONS };
    let error = prepared(folder.path(), &file, &truncated).unwrap_err();
    let expected = "rows.jsonl: line 2: the row has 10.5 MB of text: at most 8.39 MB are tokenised; split it into several rows";
    assert_eq!(error, expected);
}

#[test]
fn the_values_of_a_row_are_bounded_in_every_text_format() {
    let folder = folder();
    let list = format!("[{}1]", "1,".repeat(VALUES));
    let problem = "the row has more than 4,194,304 values, counting list entries, fields and cells: is it several rows? \
                   A row is one sample";
    for (name, contents, place) in [
        ("a.jsonl", format!("{{\"input_ids\": {list}}}"), "line 1"),
        ("a.json", format!("[{{\"input_ids\": {list}}}]"), "row 1 (line 1)"),
        ("a.csv", format!("input_ids\n\"{list}\"\n"), "row 1 (line 2)"),
        ("b.csv", format!("text,input\nHi{}\n", ",1".repeat(VALUES)), "row 1 (line 2)"),
    ] {
        let file = written(folder.path(), name, contents);
        let error = prepared(folder.path(), &file, &OPTIONS).unwrap_err();
        assert_eq!(error, format!("{name}: {place}: {problem}"));
    }
}

/// Writes a Parquet file with one row group.
fn parquet(path: &Path, schema: &str, fill: impl FnOnce(&mut SerializedRowGroupWriter<'_, File>)) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    fill(&mut group);
    group.close().unwrap();
    writer.close().unwrap();
}

const LIST_OF_IDS: &str = "message schema {
  required group input_ids (LIST) { repeated group list { required int32 element; } }
}";
const LIST_OF_TEXTS: &str = "message schema {
  required group input_ids (LIST) { repeated group list { required binary element (UTF8); } }
}";

/// Levels of a row with two values and one with so many.
fn levels(values: usize) -> (Vec<i16>, Vec<i16>) {
    let mut repetition = vec![1; values + 2];
    (repetition[0], repetition[2]) = (0, 0);
    (vec![1; values + 2], repetition)
}

#[test]
fn a_list_of_a_parquet_file_is_bounded_before_it_is_decoded() {
    let folder = folder();
    let path = folder.path().join("rows.parquet");
    let ids = |values: usize| {
        parquet(&path, LIST_OF_IDS, |group| {
            let (definition, repetition) = levels(values);
            let mut column = group.next_column().unwrap().unwrap();
            let ids = vec![7; values + 2];
            column.typed::<Int32Type>().write_batch(&ids, Some(&definition), Some(&repetition)).unwrap();
            column.close().unwrap();
        });
        prepared(folder.path(), &path, &OPTIONS)
    };
    let error = ids(VALUES).unwrap_err();
    assert!(fs::metadata(&path).unwrap().len() < 2000, "runs of equal values take a few bytes");
    assert!(error.starts_with("rows.parquet: row 2: the row has more than 4,194,304 values"), "{error}");
    let totals = ids(100_000).unwrap();
    assert_eq!((totals.samples, totals.tokens, totals.too_long), (1, 2, 1));
}

#[test]
fn a_repeated_text_of_a_parquet_file_is_bounded_before_it_is_copied() {
    let folder = folder();
    let path = folder.path().join("rows.parquet");
    parquet(&path, LIST_OF_TEXTS, |group| {
        let (definition, repetition) = levels(1000);
        let mut column = group.next_column().unwrap().unwrap();
        let text = ByteArray::from("x".repeat(900_000).as_str());
        let texts = vec![text; 1002];
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&definition), Some(&repetition)).unwrap();
        column.close().unwrap();
    });
    assert!(fs::metadata(&path).unwrap().len() < 200_000, "the dictionary has it once");
    let error = prepared(folder.path(), &path, &OPTIONS).unwrap_err();
    assert_eq!(error, "rows.parquet: row 2 is longer than 67.1 MB: is it text?");
}

#[test]
fn a_cell_of_a_parquet_file_is_bounded() {
    let folder = folder();
    let path = folder.path().join("rows.parquet");
    let text = |bytes: usize| {
        parquet(&path, "message schema { required binary text (UTF8); }", |group| {
            let mut column = group.next_column().unwrap().unwrap();
            let texts = [ByteArray::from("Hi"), ByteArray::from("word ".repeat(bytes / 5).into_bytes())];
            column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
            column.close().unwrap();
        });
        prepared(folder.path(), &path, &OPTIONS)
    };
    assert_eq!(text(20 << 20).map(|totals| (totals.samples, totals.too_long)), Ok((1, 1)));
    let error = text(65 << 20).unwrap_err();
    assert_eq!(error, "rows.parquet: row 2 is longer than 67.1 MB: is it text?");
}

#[test]
fn lists_on_several_pages_are_read() {
    const ROWS: usize = 60;
    let folder = folder();
    let path = folder.path().join("rows.parquet");
    let text = |at: usize| format!("{at} {}", "word ".repeat(20_000));
    parquet(&path, LIST_OF_TEXTS, |group| {
        let texts: Vec<ByteArray> = (0..2 * ROWS).map(|at| ByteArray::from(text(at).into_bytes())).collect();
        let repetition: Vec<i16> = (0..2 * ROWS).map(|at| (at % 2) as i16).collect();
        let mut column = group.next_column().unwrap().unwrap();
        let writer = column.typed::<ByteArrayType>();
        writer.write_batch(&texts, Some(&vec![1; 2 * ROWS]), Some(&repetition)).unwrap();
        column.close().unwrap();
    });
    let found = survey(&[path], &encoder(folder.path()), &OPTIONS, 1).unwrap();
    // Texts are no ids; every row is read, and has its own problem.
    assert_eq!((found.rows, found.problems.count), (ROWS as u64, ROWS as u64));
    for (at, problem) in found.problems.first.iter().enumerate() {
        let expected = format!("input_ids[0] must be an integer: found \"{}", &text(2 * at)[..20]);
        assert!(problem.message.starts_with(&expected), "{}", problem.message);
    }
}

#[test]
fn prompts_are_bounded_too() {
    let folder = folder();
    let encoder = encoder(folder.path());
    let text = "x".repeat((8 << 20) + 1);
    let expected = RowProblem::TextTooLong { bytes: (8 << 20) + 1 };
    assert_eq!(encoder.prompt(&text, None, false), Err(expected.clone()));
    let row = json!({ "text": text });
    let Value::Object(row) = row else { unreachable!() };
    assert_eq!(encoder.encode(&row, &mut Encoded::default()), Err(expected));
}
