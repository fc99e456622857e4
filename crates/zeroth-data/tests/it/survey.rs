//! Surveys read all rows without stopping at invalid ones.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use zeroth_data::{
    Encoder, EncoderOptions, LIST_LIMIT, LengthBucket, PrepareOptions, RowLocation, RowNumber, Survey,
    Truncation, survey,
};

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 100, truncation: Truncation::Drop, max_samples: None, packing: false };

fn surveyed(files: &[&str], options: &PrepareOptions, shown: usize) -> Survey {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> =
        (0..files.len()).map(|file| folder.path().join(format!("{file}.jsonl"))).collect();
    for (path, contents) in paths.iter().zip(files) {
        std::fs::write(path, contents).unwrap();
    }
    let encoder = Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(1000)).unwrap();
    survey(&paths, &encoder, options, shown).unwrap()
}

fn row(length: usize) -> String {
    format!("{{\"input_ids\": {:?}}}\n", vec![1; length])
}

#[test]
fn surveys_list_invalid_rows() {
    let first = row(3) + "17\n\n" + &row(101) + "{\"input_ids\": [5, 6], \"labels\": [5, -100]}\n";
    let second = row(1) + "{\"input_ids\": [1000]}\n" + &row(4);
    let found = surveyed(&[&first, &second], &OPTIONS, 2);
    assert_eq!((found.rows, found.problems.count), (7, 2));
    let at = |file, line| RowLocation { file, at: RowNumber::Line(line) };
    let problems: Vec<_> = found.problems.first.iter().map(|one| (&one.place, &one.message[..])).collect();
    let beyond = "input_ids[0] is 1000: the model's vocabulary has 1,000 tokens, 0 to 999; was the data made with \
                  another tokenizer?";
    assert_eq!(
        problems,
        [
            (&at(0, 2), "a row must be a JSON object, as in {\"input_ids\": [1, 2, 3]}: found a number"),
            (&at(1, 2), beyond)
        ]
    );
    assert_eq!((found.too_long.count, &found.too_long.first), (1, &vec![at(0, 4)]));
    assert_eq!((found.untrained.count, &found.untrained.first), (2, &vec![at(0, 5), at(1, 1)]));
    let shown: Vec<_> = found.first.iter().map(|one| (&one.place, one.row.ids.len())).collect();
    assert_eq!(shown, [(&at(0, 1), 3), (&at(0, 4), 101)]);
    assert_eq!((found.totals.samples, found.totals.tokens, found.totals.trained_tokens), (4, 10, 5));
}

#[test]
fn lists_are_capped() {
    let found = surveyed(&["x\n".repeat(1000).as_str()], &OPTIONS, 5);
    assert_eq!((found.rows, found.problems.count, found.problems.first.len()), (1000, 1000, LIST_LIMIT));
    assert!(found.lengths.is_empty() && found.first.is_empty());
}

#[test]
fn histograms_have_round_buckets() {
    let text: String = [1, 5, 6, 43, 99, 100, 101, 250].map(row).concat();
    let found = surveyed(&[&text], &OPTIONS, 0);
    let bucket =
        |from, to, rows, tokens| LengthBucket { from, to, rows, tokens, trained_tokens: tokens - rows };
    let filled: Vec<LengthBucket> = found.lengths.iter().copied().filter(|bucket| bucket.rows > 0).collect();
    assert_eq!(
        filled,
        [
            bucket(1, 5, 2, 6),
            bucket(6, 10, 1, 6),
            bucket(41, 45, 1, 43),
            bucket(96, 100, 2, 199),
            bucket(101, 250, 2, 351),
        ]
    );
    assert_eq!(found.lengths.len(), 21);
    assert!(found.lengths.windows(2).all(|pair| pair[0].to + 1 == pair[1].from));
    // All rows have one length: one bar.
    assert_eq!(surveyed(&[&row(7)], &OPTIONS, 0).lengths, [bucket(7, 7, 1, 7)]);
}

#[test]
fn surveys_stop_at_max_samples() {
    let text = row(200) + &row(1) + &row(2) + "wrong\n";
    let two = PrepareOptions { max_samples: NonZeroU64::new(2), ..OPTIONS };
    let found = surveyed(&[&text], &two, 0);
    assert_eq!((found.rows, found.problems.count, found.totals.samples), (3, 0, 2));
}
