//! Pairs of encoder-decoder models: equal to what transformers' run_translation makes of the same rows.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use zeroth_data::{
    CacheFolder, DecoderStart, Encode, Encoded, Encoder, EncoderOptions, LengthLimits, PairLimits,
    PairOptions, Pairs, PrepareOptions, Prepared, Truncation, check_trained, eval_rows, prepare, preview,
    survey,
};

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 7, truncation: Truncation::Drop, max_samples: None, packing: false };
const START: DecoderStart = DecoderStart { token: 0, pad: Some(0) };

fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/translation")
}

fn read_json(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(golden_folder().join(name)).unwrap()).unwrap()
}

fn options(limits: PairLimits) -> PairOptions {
    PairOptions::new(Pairs { limits, start: START })
}

fn encoder(folder: &Path, pairs: PairOptions) -> Encoder {
    Encoder::open(folder, EncoderOptions { pairs: Some(pairs), ..EncoderOptions::new(354) }).unwrap()
}

/// English to Romanian, of the golden tokenizer.
fn english(source: u64, target: u64) -> Encoder {
    let languages = ("en".to_owned(), "ro".to_owned());
    let pairs = PairOptions {
        source_lang: Some(languages.0),
        target_lang: Some(languages.1),
        ..options(PairLimits { source, target })
    };
    encoder(&golden_folder(), pairs)
}

fn prepared(encoder: &Encoder, files: &[PathBuf], packing: bool) -> Prepared {
    let cache = tempfile::tempdir().unwrap();
    prepare(files, encoder, &PrepareOptions { packing, ..OPTIONS }, &CacheFolder::at(cache.path())).unwrap()
}

fn encoded(encoder: &Encoder, row: &str) -> Result<Encoded, String> {
    let row: Map<String, Value> = serde_json::from_str(row).unwrap();
    let mut into = Encoded::default();
    encoder.encode(&row, &mut into).map(|()| into).map_err(|problem| problem.to_string())
}

/// `tests/golden/make_translation.py` has the calls.
#[test]
fn a_thousand_rows_are_those_of_run_translation() {
    let golden = read_json("golden.json");
    for case in golden.as_array().unwrap() {
        let text = |key: &str| case[key].as_str().unwrap().to_owned();
        let limit = |key: &str| case[key].as_u64().unwrap();
        let limits = PairLimits { source: limit("max_source_length"), target: limit("max_target_length") };
        let pairs = PairOptions {
            prefix: text("prefix"),
            source_lang: Some(text("source_lang")),
            target_lang: Some(text("target_lang")),
            ..options(limits)
        };
        let folder = tempfile::tempdir().unwrap();
        let mut config: Value = read_json("tokenizer_config.json");
        if let Some(side) = case.get("truncation_side") {
            config["truncation_side"] = side.clone();
        }
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        fs::copy(golden_folder().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        let encoder = encoder(folder.path(), pairs);
        let samples = prepared(&encoder, &[golden_folder().join("rows.jsonl.gz")], false).samples;
        let totals = samples.totals();
        assert_eq!(totals.samples, 1000);
        assert_eq!(totals.longest, limits.source);
        assert_eq!(totals.targets.unwrap().longest, case["longest_target"].as_u64().unwrap());
        let mut digest = Sha256::new();
        let mut full_sources = 0;
        for sample in 0..1000 {
            let labels = samples.labels(sample).unwrap();
            let sequences = [samples.ids(sample).unwrap(), labels.clone(), START.inputs(&labels)];
            full_sources += u64::from(sequences[0].len() as u64 == limits.source);
            for (ids, key) in sequences.iter().zip(["input_ids", "labels", "decoder_input_ids"]) {
                digest.update((ids.len() as i32).to_le_bytes());
                for id in ids {
                    digest.update(id.to_le_bytes());
                }
                if let Some(first) = case["first"].get(sample as usize) {
                    assert_eq!(serde_json::to_value(ids).unwrap(), first[key], "{key} of row {sample}");
                }
            }
        }
        assert_eq!(full_sources, case["full_sources"].as_u64().unwrap());
        let digest: Vec<String> = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest.concat(), case["sha256"].as_str().unwrap());
    }
}

#[test]
fn every_format_with_a_prompt_and_an_answer_is_a_pair() {
    let encoder = english(1024, 128);
    let expected = encoded(&encoder, r#"{"prompt": "the house", "completion": "casa"}"#).unwrap();
    assert_eq!((expected.ids.last(), expected.labels.last()), (Some(&1), Some(&1)));
    for row in [
        r#"{"translation": {"ro": "casa", "en": "the house"}}"#,
        r#"{"question": "the house", "answer": "casa"}"#,
        r#"{"query": "the house", "response": "casa"}"#,
        r#"{"instruction": "the", "input": "house", "output": "casa"}"#,
        r#"{"messages": [{"role": "user", "content": "the house"}, {"role": "assistant", "content": "casa"}]}"#,
        r#"{"conversations": [{"from": "system", "value": "the"}, {"from": "human", "value": "house"}, {"from": "gpt", "value": "casa"}]}"#,
        // One end-of-text token, also where the text has it.
        r#"{"prompt": "the house</s>", "completion": "casa </s>"}"#,
    ] {
        assert_eq!(encoded(&encoder, row).unwrap(), expected, "{row}");
    }
    let prefixed = PairOptions { prefix: "the ".to_owned(), ..options(PairLimits::default()) };
    let prefixed = self::encoder(&golden_folder(), prefixed);
    assert_eq!(encoded(&prefixed, r#"{"prompt": "house", "completion": "casa"}"#).unwrap(), expected);
}

#[test]
fn ready_tokens_have_labels_of_their_own_length() {
    let encoder = encoder(Path::new("there is no tokenizer"), options(PairLimits { source: 4, target: 3 }));
    let row = |text: &str| encoded(&encoder, text).map(|row| (row.ids, row.labels, row.cut));
    assert_eq!(row(r#"{"input_ids": [5, 1], "labels": [7, 8, 1]}"#), Ok((vec![5, 1], vec![7, 8, 1], [0, 0])));
    // Padding at the end is dropped; untrained labels between others stay.
    let padded = r#"{"input_ids": [5, 1, 0], "attention_mask": [1, 1, 0], "labels": [-100, 1, -100, -100]}"#;
    assert_eq!(row(padded), Ok((vec![5, 1], vec![-100, 1], [0, 0])));
    assert_eq!(row(r#"{"input_ids": [5], "labels": [-100, -100]}"#), Ok((vec![5], vec![-100], [0, 0])));
    // Both are truncated, and keep their end-of-text token.
    let long = r#"{"input_ids": [5, 6, 7, 8, 9, 1], "labels": [2, 3, 4, 1]}"#;
    assert_eq!(row(long), Ok((vec![5, 6, 7, 1], vec![2, 3, 1], [2, 1])));
    for (text, message) in [
        (r#"{"input_ids": [5, 1]}"#, "the row has no `labels`"),
        (r#"{"input_ids": [5, 1], "labels": []}"#, "`labels` is empty"),
        (r#"{"input_ids": [], "labels": [1]}"#, "the row has no tokens"),
        (r#"{"input_ids": [5, 354], "labels": [1]}"#, "input_ids[1] is 354"),
        (r#"{"input_ids": [5], "labels": [1, 354]}"#, "labels[1] is 354"),
        (r#"{"input_ids": [5], "labels": [-1, 3]}"#, "labels[0] is -1"),
    ] {
        let error = row(text).unwrap_err();
        assert!(error.contains(message), "{text}: {error}");
    }
    let start = DecoderStart { token: 0, pad: None };
    let unpadded = PairOptions::new(Pairs { limits: PairLimits::default(), start });
    let unpadded = self::encoder(Path::new("there is no tokenizer"), unpadded);
    let error = encoded(&unpadded, r#"{"input_ids": [5], "labels": [-100, 1]}"#).unwrap_err();
    assert!(error.contains("pad_token_id"), "{error}");
    assert!(encoded(&unpadded, r#"{"input_ids": [5], "labels": [1, -100]}"#).is_ok());
}

#[test]
fn rows_that_are_no_pairs_are_explained() {
    let two = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#;
    for (row, message) in [
        (r#"{"text": "all"}"#, "the format {\"text\"} has no source"),
        (two, "`messages` has 4 messages with 2 answers"),
        (r#"{"prompt": "a", "completion": " "}"#, "`completion` is empty"),
        (r#"{"translation": {"en": "a", "ro": ""}}"#, "`translation.ro` is empty"),
        (
            r#"{"translation": {"en": "a", "rom": "b"}}"#,
            "--target-lang ro: the row has no such language (did you mean `rom`?); it has `en`, `rom`",
        ),
        (r#"{"translation": {"en": "a", "ro": null}}"#, "`translation.ro` must be"),
        (r#"{"translation": "a"}"#, "`translation` must be an object"),
    ] {
        let error = encoded(&english(1024, 128), row).unwrap_err();
        assert!(error.contains(message), "{row}: {error}");
    }
    let unnamed = encoder(&golden_folder(), options(PairLimits::default()));
    let error = encoded(&unnamed, r#"{"translation": {"en": "a", "ro": "b"}}"#).unwrap_err();
    assert!(error.contains("--source-lang is missing: the row has the languages en, ro"), "{error}");
    assert!(error.contains("--source-lang en --target-lang ro"), "{error}");

    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("spiece.model"), "x").unwrap();
    let without = encoder(folder.path(), options(PairLimits::default()));
    let error = encoded(&without, r#"{"prompt": "a", "completion": "b"}"#).unwrap_err();
    assert!(error.contains("it has spiece.model, which transformers converts: python -c"), "{error}");
    // A tokenizer that names no end-of-text token.
    fs::copy(golden_folder().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"pad_token": "<pad>"}"#).unwrap();
    let no_end = encoder(folder.path(), options(PairLimits::default()));
    let error = encoded(&no_end, r#"{"prompt": "a", "completion": "b"}"#).unwrap_err();
    assert!(error.contains("no end-of-text token is defined"), "{error}");
}

#[test]
fn packs_hold_pairs_within_both_lengths() {
    let files = [golden_folder().join("rows.jsonl.gz")];
    let encoder = english(256, 96);
    let (plain, packed) =
        (prepared(&encoder, &files, false).samples, prepared(&encoder, &files, true).samples);
    let totals = packed.totals();
    assert!(packed.is_paired() && totals.packs > 100 && totals.packs < 1000, "{totals:?}");
    let mut members: Vec<u64> = (0..totals.packs).flat_map(|pack| packed.members(pack)).collect();
    members.sort_unstable();
    assert!(members.into_iter().eq(0..1000));
    let lengths = (0..totals.packs).map(|pack| packed.stream_lengths(pack));
    let longest = lengths.fold([0; 2], |most, [source, target]| [most[0].max(source), most[1].max(target)]);
    assert_eq!(longest, packed.longest_streams());
    assert!(longest[0] <= 256 && longest[1] <= 96);
    assert_eq!(totals.trained_tokens, totals.targets.unwrap().tokens);
    for sample in [0, 499, 999] {
        assert_eq!(packed.ids(sample).unwrap(), plain.ids(sample).unwrap());
        assert_eq!(packed.labels(sample).unwrap(), plain.labels(sample).unwrap());
    }
    assert_ne!(packed.hash(), plain.hash());
    let limits = LengthLimits::Pairs(PairLimits { source: 256, target: 96 });
    let notes = totals.notes(limits);
    assert!(
        notes[0].contains(
            "truncated to 256 source and 96 target tokens (--max-source-length, --max-target-length)"
        ),
        "{notes:?}"
    );
    assert!(notes[1].contains("1,000 samples were packed into"), "{notes:?}");
}

#[test]
fn evaluation_rows_and_surveys_have_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let rows =
        "{\"prompt\": \"the house\", \"completion\": \"casa\"}\n{\"prompt\": \"x\", \"completion\": \"\"}\n";
    fs::write(&path, rows).unwrap();
    let files = [path];
    let encoder = english(2, 128);
    let one = eval_rows(&files, &encoder, std::num::NonZeroU64::new(1)).unwrap();
    let row = encoded(&encoder, r#"{"prompt": "the house", "completion": "casa"}"#).unwrap();
    assert_eq!((&one[0].prompt, &one[0].expected), (&row.ids, &row.labels));
    let found = survey(&files, &encoder, &OPTIONS, 5).unwrap();
    assert_eq!((found.totals.samples, found.problems.count, found.too_long.count), (1, 1, 0));
    assert_eq!((found.lengths[0].from, row.cut), (3, [1, 0]));
    assert_eq!(found.target_lengths[0].to, row.labels.len() as u64);
    let text = preview(&found, &files, 7, ["«", "»"], &|ids| encoder.decode(ids));
    assert!(
        text.contains("2 source tokens (1 more truncated)") && text.contains("labels:\n  «casa»"),
        "{text}"
    );
    assert!(text.contains("rows.jsonl: line 2: `completion` is empty"), "{text}");

    let untrained = [folder.path().join("tokens.jsonl")];
    fs::write(&untrained[0], "{\"input_ids\": [5], \"labels\": [-100]}\n").unwrap();
    let samples = prepared(&encoder, &untrained, false).samples;
    let error = check_trained(&samples, &untrained, &encoder, &OPTIONS).unwrap_err().to_string();
    assert!(error.contains("every label is -100: labels other than -100 are trained"), "{error}");
}

#[test]
fn options_of_pairs_are_part_of_the_cache_key() {
    let print = |options: PairOptions| encoder(&golden_folder(), options).fingerprint();
    let base = || options(PairLimits::default());
    let mut seen = vec![Encoder::open(&golden_folder(), EncoderOptions::new(354)).unwrap().fingerprint()];
    let unpadded = Pairs { limits: PairLimits::default(), start: DecoderStart { token: 0, pad: None } };
    for options in [
        base(),
        PairOptions { prefix: "a".to_owned(), ..base() },
        PairOptions { source_lang: Some("a".to_owned()), ..base() },
        PairOptions { target_lang: Some("a".to_owned()), ..base() },
        options(PairLimits { source: 5, ..PairLimits::default() }),
        options(PairLimits { target: 5, ..PairLimits::default() }),
        PairOptions::new(unpadded),
    ] {
        let print = print(options);
        assert!(!seen.contains(&print));
        seen.push(print);
    }
}
