//! Rows of ready tokens: what is accepted and removed, and the message for each error.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use zeroth_data::{
    CacheFolder, DataError, Encoder, EncoderOptions, PrepareOptions, Samples, Totals, Truncation, prepare,
};

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 8, truncation: Truncation::Drop, max_samples: None, packing: false };

/// Reads files with an encoder that has no tokenizer, for a vocabulary of 100.
fn read_ready(files: &[PathBuf], options: &PrepareOptions) -> Result<Samples, DataError> {
    let cache = tempfile::tempdir().unwrap();
    let encoder = Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(100)).unwrap();
    prepare(files, &encoder, options, &CacheFolder::at(cache.path())).map(|prepared| prepared.samples)
}

fn read_files(contents: &[&[u8]], options: &PrepareOptions) -> Result<Samples, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = contents
        .iter()
        .enumerate()
        .map(|(index, contents)| {
            let path = folder.path().join(format!("{index}.jsonl"));
            std::fs::write(&path, contents).unwrap();
            path
        })
        .collect();
    read_ready(&files, options)
}

fn read(text: &str) -> Result<Samples, DataError> {
    read_files(&[text.as_bytes()], &OPTIONS)
}

/// The message, from the file's name on.
fn refusal(text: &str) -> String {
    let message = read(text).unwrap_err().to_string();
    message.split_once("0.jsonl").map_or_else(|| message.clone(), |(_, rest)| rest.to_owned())
}

#[test]
fn rows_are_taken_with_and_without_labels() {
    let text = "\u{FEFF}{\"input_ids\": [1, 2, 3], \"labels\": [-100, 2, 99], \"token_type_ids\": [0, 0, 0]}\r\n\n  \n\
                {\"id\": \"x\", \"input_ids\": [4, 5]}\n{\"input_ids\":[6],\"labels\":null}";
    let samples = read(text).unwrap();
    assert_eq!(
        samples.totals(),
        Totals { samples: 3, tokens: 6, trained_tokens: 3, longest: 3, untrained: 1, ..Totals::default() }
    );
    assert_eq!((samples.ids(0).unwrap(), samples.labels(0).unwrap()), (vec![1, 2, 3], vec![-100, 2, 99]));
    assert_eq!((samples.ids(1).unwrap(), samples.labels(1).unwrap()), (vec![4, 5], vec![4, 5]));
    assert_eq!((samples.ids(2).unwrap(), samples.labels(2).unwrap()), (vec![6], vec![6]));
}

#[test]
fn trailing_padding_is_removed() {
    let text = r#"{"input_ids": [1, 2, -1, -1], "labels": [1, 2, 3, 4], "attention_mask": [1, 1, 0, 0]}"#;
    let samples = read(text).unwrap();
    assert_eq!((samples.ids(0).unwrap(), samples.labels(0).unwrap()), (vec![1, 2], vec![1, 2]));
}

#[test]
fn too_long_rows_are_counted_after_padding_is_removed() {
    let text = "{\"input_ids\": [1,2,3,4,5,6,7,8,9]}\n\
                {\"input_ids\": [1,2,3,4,5,6,7,8,9], \"attention_mask\": [1,1,1,1,1,1,1,1,0]}\n";
    let totals = read(text).unwrap().totals();
    assert_eq!((totals.samples, totals.too_long, totals.longest), (1, 1, 8));
}

#[test]
fn several_files_form_one_dataset() {
    let files: &[&[u8]] =
        &[b"{\"input_ids\": [1, 2]}\n{\"input_ids\": [3]}", b"{\"input_ids\": [4]}\nnot read"];
    let two = |most| PrepareOptions { max_samples: NonZeroU64::new(most), ..OPTIONS };
    let three = read_files(files, &two(3)).unwrap();
    assert_eq!([0, 1, 2].map(|sample| three.ids(sample).unwrap()), [vec![1, 2], vec![3], vec![4]]);
    assert_eq!(read_files(files, &two(1)).unwrap().count().get(), 1);
    assert!(read_files(files, &OPTIONS).is_err());
    // The split over files does not matter.
    let joined = read("{\"input_ids\": [1, 2]}\n{\"input_ids\": [3]}\n{\"input_ids\": [4]}\n").unwrap();
    assert_eq!(joined.hash(), three.hash());
    assert_eq!(joined, three);
}

#[test]
fn token_row_errors_have_positions() {
    let good = "{\"input_ids\": [1]}\n\n";
    for (row, message) in [
        (
            "{\"input_ids\": [1, 2",
            "not JSON: EOF while parsing a list, column 19; a row is one JSON object on one line",
        ),
        ("[", "not JSON: EOF while parsing a list, column 1; a row is one JSON object on one line"),
        ("17", "a row must be a JSON object, as in {\"input_ids\": [1, 2, 3]}: found a number"),
        (
            "{\"messages\": []}",
            "`messages` must be a list of messages, as in [{\"role\": \"user\", \"content\": \"Hi\"}]: found an empty list",
        ),
        (
            "{\"text\": \"hello\"}",
            "the format {\"text\"} needs a tokenizer, but there is no tokenizer has no tokenizer.json",
        ),
        (
            "{\"question\": \"?\", \"answer\": \"!\"}",
            "the format {\"question\", \"answer\"} needs a tokenizer, but there is no tokenizer has no tokenizer.json",
        ),
        (
            "{\"inputs_ids\": [1], \"label\": 3}",
            "no row format has these columns: `inputs_ids`, `label` (`inputs_ids` is similar to `input_ids`); known formats are ",
        ),
        ("{}", "no row format has these columns: "),
        ("{\"input_ids\": \"1 2\"}", "`input_ids` must be a list of integers: found a string"),
        ("{\"input_ids\": [1, 2.5]}", "input_ids[1] must be an integer: found 2.5"),
        ("{\"input_ids\": [[1, 2]]}", "input_ids[0] must be an integer: found [1,2]"),
        ("{\"input_ids\": [1], \"labels\": [null]}", "labels[0] must be an integer: found null"),
        (
            "{\"input_ids\": [1, 2], \"labels\": [1]}",
            "`labels` has 1 entry but `input_ids` has 2: they must have the same length",
        ),
        ("{\"input_ids\": [], \"labels\": []}", "the row has no tokens; remove it"),
        ("{\"input_ids\": [7], \"attention_mask\": [0]}", "the row has no tokens; remove it"),
        (
            "{\"input_ids\": [1, 100]}",
            "input_ids[1] is 100: the model's vocabulary has 100 tokens, 0 to 99; was the data made with another tokenizer?",
        ),
        (
            "{\"input_ids\": [-1]}",
            "input_ids[0] is -1: the model's vocabulary has 100 tokens, 0 to 99; was the data made with another tokenizer?",
        ),
        (
            "{\"input_ids\": [1], \"labels\": [-1]}",
            "labels[0] is -1: a label must be a token id, 0 to 99, or -100 for untrained tokens",
        ),
        (
            "{\"input_ids\": [1, 2], \"attention_mask\": [0, 1]}",
            "attention_mask[0] is 0 but tokens follow: only padding at the end of a row is supported; write the row without padding",
        ),
        (
            "{\"input_ids\": [1, 2], \"attention_mask\": [1, 2]}",
            "attention_mask[1] is 2: it must be 0 (padding) or 1",
        ),
    ] {
        let told = refusal(&format!("{good}{row}\n{good}"));
        assert!(told.starts_with(&format!(": line 3: {message}")), "{row}: {told}");
    }
}

#[test]
fn empty_files_are_reported() {
    assert_eq!(refusal(" \n\n"), " has no rows: it is empty, or all lines are blank");
    assert_eq!(refusal(""), " has no rows: it is empty, or all lines are blank");
    assert_eq!(
        refusal("PAR1…"),
        " as Parquet (row 1): EOF: Parquet file too small. Size is 7 but need 8; is it complete?"
    );
    assert!(matches!(read_ready(&[], &OPTIONS), Err(DataError::NoFiles)));

    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good.jsonl");
    std::fs::write(&good, "{\"input_ids\": [1]}").unwrap();
    let absent = folder.path().join("absent.jsonl");
    let error = read_ready(&[good.clone(), absent.clone()], &OPTIONS).unwrap_err();
    assert_eq!(error.to_string(), format!("data file {} does not exist", absent.display()));
    let error = read_ready(&[good, folder.path().to_owned()], &OPTIONS).unwrap_err();
    assert!(error.to_string().contains(" is a folder: find_files lists the data files in it"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_samples_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_files(&[&bytes], &OPTIONS);
    }

    #[test]
    fn what_is_written_is_read(rows in proptest::collection::vec(proptest::collection::vec(0_i32..100, 1..8), 1..20)) {
        let lines: Vec<String> = rows.iter().map(|row| format!("{{\"input_ids\": {row:?}}}")).collect();
        let text = lines.join("\n");
        let samples = read(&text).unwrap();
        prop_assert_eq!(samples.count().get(), rows.len() as u64);
        for (sample, row) in (0..).zip(&rows) {
            prop_assert_eq!(samples.ids(sample).unwrap(), &row[..]);
            prop_assert_eq!(samples.trained(sample), row.len() as u64 - 1);
        }
    }
}
