//! Encoder-decoder models: pairs of a source and a target, with the flags of transformers' run_translation.

use std::fs;
use std::path::{Path, PathBuf};

use super::{golden, json, metrics, number, text, train_on, written};
use crate::common::{Ended, model, root, zeroth, zeroth_json};

/// A new T5 with the tokenizer of zeroth-data's golden rows.
fn new_t5(folder: &Path, more: &[(&str, serde_json::Value)]) -> PathBuf {
    let mut config = serde_json::json!({
        "model_type": "t5", "vocab_size": 354, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2,
        "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    });
    for (key, value) in more {
        config[*key] = value.clone();
    }
    let model = folder.join("t5");
    fs::create_dir_all(&model).unwrap();
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden_data().join(name), model.join(name)).unwrap();
    }
    model
}

fn golden_data() -> PathBuf {
    root().join("crates/zeroth-data/tests/golden/translation")
}

/// Rows of numbers and their words, which a tiny model learns.
fn digits(folder: &Path) -> PathBuf {
    const WORDS: [&str; 6] = ["casa", "mare", "veche", "foarte", "ieri", "verde"];
    let row = |number: usize| {
        let places = [number % 6, number / 6 % 6, number / 36 % 6];
        let places = &places[..=number % 3];
        let words = |names: &dyn Fn(&usize) -> String| places.iter().map(names).collect::<Vec<_>>().join(" ");
        let (en, ro) = (words(&|place| place.to_string()), words(&|place| WORDS[*place].to_owned()));
        serde_json::json!({"translation": {"en": en, "ro": ro}}).to_string()
    };
    written(folder, "digits.jsonl", &(0..60).map(row).collect::<Vec<_>>())
}

const LANGUAGES: [&str; 4] = ["--source_lang", "en", "--target-lang", "ro"];

fn losses(run: &Path) -> Vec<f64> {
    metrics(run).iter().filter_map(|line| line.get("loss")).map(number).collect()
}

#[test]
fn pairs_are_learnt_and_ranks_stages_and_packing_agree() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (model, data) = (new_t5(folder, &[]), digits(folder));
    let flags =
        [&LANGUAGES[..], &["--max-steps", "4", "--fp32", "--learning-rate", "1e-2", "--deepspeed", "zero0"]]
            .concat();
    let train = |name: &str, more: &[&str]| {
        let ended = train_on(&model, &data, &folder.join(name), &[&flags, more].concat());
        ended.assert_done();
        ended
    };
    let ended = train("one", &["--per_device_train_batch_size", "4"]);
    assert!(ended.stderr.contains("the longest source has"), "{}", ended.stderr);
    assert!(ended.stderr.contains("planned for micro-batches of up to"), "{}", ended.stderr);
    let rows = json(&folder.join("one/plan.json"))["rows"].clone();
    assert!(rows.as_array().unwrap().iter().all(|rows| rows.as_array().unwrap().len() == 2), "{rows}");
    let one = losses(&folder.join("one"));
    assert_eq!(one.len(), 4);
    // All tokens of both streams count.
    let tokens = number(&metrics(&folder.join("one"))[0]["tokens"]);
    assert!(tokens > 4.0 * 4.0, "{tokens}");
    for (name, more) in [
        ("ranks", &["--ranks", "2", "--per_device_train_batch_size", "2"][..]),
        ("accumulated", &["--gradient_accumulation_steps", "4"]),
        ("sharded", &["--ranks", "2", "--per_device_train_batch_size", "2", "--deepspeed", "zero3_offload"]),
        ("recomputed", &["--per_device_train_batch_size", "4", "--gradient_checkpointing"]),
    ] {
        train(name, more);
        for (found, expected) in losses(&folder.join(name)).iter().zip(&one) {
            assert!((found - expected).abs() < 1e-4 * expected, "{name}: {found} {expected}");
        }
    }
    // A pack holds several pairs, each attending to its own source.
    let ended = train("packed", &["--packing", "--max-source-length", "24", "--max_target_length", "24"]);
    assert!(ended.stderr.contains("packed into"), "{}", ended.stderr);
    assert!(losses(&folder.join("packed")).iter().all(|loss| loss.is_finite()));
}

#[test]
fn a_trained_model_is_evaluated_resumed_and_answers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (model, data, run) = (new_t5(folder, &[]), digits(folder), folder.join("run"));
    let flags = [
        &LANGUAGES[..],
        &["--source_prefix", "translate ", "--per_device_train_batch_size", "20", "--learning_rate", "1e-2"],
        &["--weight-decay", "0", "--lr-scheduler-type", "constant", "--save_steps", "30"],
    ]
    .concat();
    let evaluation = ["--eval-data", text(&data), "--eval-steps", "30"];
    train_on(&model, &data, &run, &[&flags, &evaluation[..], &["--max-steps", "30"]].concat()).assert_done();
    let more = ["--max-steps", "240", "--resume", "auto"];
    train_on(&model, &data, &run, &[&flags, &evaluation[..], &more].concat()).assert_done();
    let evaluated: Vec<f64> =
        metrics(&run).iter().filter_map(|line| line.get("eval_loss")).map(number).collect();
    assert_eq!(evaluated.len(), 8);
    assert!(evaluated[7] < 0.2 * evaluated[0], "{evaluated:?}");

    let exported = run.join("model");
    let generate =
        [&["generate", "--device", "cpu", "--model", text(&exported), "--source-prefix", "translate "][..]];
    let rows = ["--data", text(&data), "--source-lang", "en", "--target-lang", "ro"];
    let (code, greedy) = zeroth_json(&[generate[0], &rows].concat());
    assert_eq!(code, 0);
    assert!(greedy["exact_matches"].as_u64().unwrap() >= 30, "{}", greedy["exact_match"]);
    let (code, beams) = zeroth_json(&[generate[0], &rows, &["--num-beams", "4"]].concat());
    assert_eq!(code, 0);
    assert!(
        beams["exact_matches"].as_u64().unwrap() + 2 >= greedy["exact_matches"].as_u64().unwrap(),
        "{} {}",
        beams["exact_match"],
        greedy["exact_match"]
    );
    // One prompt has the answer of its row, whatever the others of its batch.
    let first = &greedy["answers"][5];
    let source = first["prompt"].as_str().unwrap().trim_start_matches("translate").trim().to_owned();
    for (more, all) in [(&[][..], &greedy), (&["--num_beams", "4"], &beams)] {
        let (code, alone) = zeroth_json(&[generate[0], &["--prompt", &source], more].concat());
        assert_eq!(code, 0);
        assert_eq!(alone["ids"], all["answers"][5]["ids"], "{alone}");
        assert_eq!(alone["prompt_ids"], first["prompt_ids"]);
    }
    let several = ["--prompt", &source, "--temperature", "3", "--num-return-sequences", "5"];
    let (code, sampled) = zeroth_json(&[generate[0], &several].concat());
    assert_eq!(code, 0);
    let mut answers: Vec<String> =
        sampled["sequences"].as_array().unwrap().iter().map(|one| one["ids"].to_string()).collect();
    assert_eq!(answers.len(), 5);
    answers.sort();
    answers.dedup();
    assert!(answers.len() > 1, "{sampled}");
    let printed = zeroth(&[generate[0], &["--prompt", &source]].concat());
    assert_eq!(printed.stdout.trim(), first["text"].as_str().unwrap(), "{}", printed.stderr);
    // Sources are truncated as those of training, and that is said.
    let said = |more: &[&str]| zeroth(&[generate[0], more].concat()).stderr;
    let short = said(&[&rows[..], &["--max-source-length", "2"]].concat());
    assert!(
        short
            .contains("note: the sources of 60 rows were truncated to --max-source-length: the longest has "),
        "{short}"
    );
    let short = said(&["--prompt", &source, "--max-source-length", "2"]);
    assert!(short.contains("note: the source was truncated to 2 tokens, of "), "{short}");
    assert!(!printed.stderr.contains("truncated"), "{}", printed.stderr);
}

#[test]
fn previews_and_dry_runs_show_source_decoder_input_and_labels() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (model, data) = (new_t5(folder, &[]), digits(folder));
    let preview = ["data", "preview", "--model", text(&model), "--data", text(&data)];
    let ended =
        zeroth(&[&preview[..], &LANGUAGES, &["--source-prefix", "translate ", "--rows", "1"]].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    for shown in ["source:\n  translate 0", "decoder input:\n  <pad>casa", "labels:\n  «casa</s>»"] {
        assert!(ended.stdout.contains(shown), "{shown}: {}", ended.stdout);
    }
    assert!(ended.stdout.contains("Rows by their target tokens:"), "{}", ended.stdout);
    let (code, found) = zeroth_json(&[&preview[..], &LANGUAGES].concat());
    assert_eq!(code, 0);
    let first = &found["first"][0];
    let labels = first["labels"].as_array().unwrap();
    assert_eq!(first["decoder_input_ids"].as_array().unwrap()[1..], labels[..labels.len() - 1]);

    let ended = train_on(&model, &data, &folder.join("run"), &[&LANGUAGES[..], &["--dry-run"]].concat());
    ended.assert_done();
    let shown = ["  source: ", "  decoder input: <pad>", "  labels: [", "[</s>]"];
    assert!(shown.iter().all(|shown| ended.stdout.contains(shown)), "{}", ended.stdout);
}

#[test]
fn ready_tokens_need_no_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = new_t5(folder, &[]);
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    let row = |row: u32| {
        serde_json::json!({"input_ids": [row + 3, 5, 1], "labels": [row + 4, -100, 1]}).to_string()
    };
    let data = written(folder, "tokens.jsonl", &(0..9).map(row).collect::<Vec<_>>());
    let run = folder.join("run");
    train_on(&model, &data, &run, &["--max-steps", "2", "--fp32"]).assert_done();
    // Sources and targets of three tokens each.
    assert_eq!(number(&metrics(&run)[0]["tokens"]), 6.0);
}

fn refused(ended: &Ended, messages: &[&str]) {
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    for message in messages {
        assert!(ended.stderr.contains(message), "{message}: {}", ended.stderr);
    }
}

#[test]
fn bad_pairs_are_refused_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (model, data) = (new_t5(folder, &[]), digits(folder));
    let train = |model: &Path, data: &Path, more: &[&str]| train_on(model, data, &folder.join("run"), more);
    refused(
        &train(&model, &data, &["--source-lang", "en", "--target-lang", "de"]),
        &["digits.jsonl: line 1: --target-lang de: the row has no such language", "it has `en`, `ro`"],
    );
    refused(
        &train(&model, &data, &[]),
        &[
            "line 1: --source-lang is missing: the row has the languages en, ro",
            "--source-lang en --target-lang ro",
        ],
    );
    let rows = [r#"{"translation": {"en": "a", "ro": "b"}}"#, r#"{"translation": {"en": "a", "ro": " "}}"#];
    let empty = written(folder, "empty.jsonl", &rows);
    refused(
        &train(&model, &empty, &LANGUAGES),
        &["empty.jsonl: line 2: `translation.ro` is empty: there is nothing to train"],
    );
    refused(
        &train(&model, &data, &[&LANGUAGES[..], &["--system", "Be kind."]].concat()),
        &["--system is for chat templates", "--source-prefix"],
    );
    let ended = train(&model, &data, &[&LANGUAGES[..], &["--max-length", "9", "--dry-run"]].concat());
    ended.assert_done();
    assert!(
        ended.stderr.contains("--max-length does not apply to an encoder-decoder model"),
        "{}",
        ended.stderr
    );
    let ended = train(&model, &data, &[&LANGUAGES[..], &["--max_source_length", "2", "--dry-run"]].concat());
    assert!(
        ended.stderr.contains("rows were truncated to 2 source and 128 target tokens"),
        "{}",
        ended.stderr
    );
    let evaluated =
        ["--eval-data", text(&data), "--eval-steps", "1", "--max_source_length", "2", "--dry-run"];
    let ended = train(&model, &data, &[&LANGUAGES[..], &evaluated].concat());
    let note = "note: --eval-data: 60 rows were truncated to 2 source and 128 target tokens";
    assert!(ended.stderr.contains(note), "{}", ended.stderr);

    // Texts in two columns.
    let columns = written(folder, "columns.jsonl", &[r#"{"de": "eins", "en": "one"}"#]);
    let table = written(folder, "columns.csv", &["de,en", "eins,one"]);
    for file in [&columns, &table] {
        refused(
            &train(&model, file, &["--columns", "source=de,target=en"]),
            &["`de` and `en` are no row format", "--columns prompt=de,completion=en"],
        );
        train(&model, file, &["--columns", "prompt=de,completion=en", "--dry-run"]).assert_done();
    }
    let named = written(folder, "named.jsonl", &[r#"{"source": "eins", "target": "one"}"#]);
    refused(&train(&model, &named, &[]), &["--columns prompt=source,completion=target"]);

    // The tokenizer names no end of a text.
    let no_end = new_t5(&folder.join("no_end"), &[("eos_token_id", serde_json::Value::Null)]);
    fs::write(no_end.join("tokenizer_config.json"), r#"{"pad_token": "<pad>"}"#).unwrap();
    refused(&train(&no_end, &data, &LANGUAGES), &["line 1: no end-of-text token is defined"]);
    // A folder with a SentencePiece model alone.
    fs::remove_file(no_end.join("tokenizer.json")).unwrap();
    fs::write(no_end.join("spiece.model"), "x").unwrap();
    refused(
        &train(&no_end, &data, &LANGUAGES),
        &["has spiece.model, which transformers converts", "AutoTokenizer.from_pretrained", "sentencepiece"],
    );
    let no_start = new_t5(&folder.join("no_start"), &[("decoder_start_token_id", serde_json::Value::Null)]);
    refused(
        &train(&no_start, &data, &LANGUAGES),
        &["no decoder_start_token_id in config.json", "for T5 that is the padding token, 0"],
    );
    // Adapters on the layers of a llama.
    refused(
        &train(
            &model,
            &data,
            &[&LANGUAGES[..], &["--train-type", "lora", "--target-modules", "q_proj"]].concat(),
        ),
        &["q_proj"],
    );
}

#[test]
fn decoder_only_models_refuse_the_flags_of_pairs() {
    let folder = tempfile::tempdir().unwrap();
    let llama = golden("llama-one-kv-head");
    let data = llama.join("data.jsonl");
    for flags in [
        ["--source-lang", "en"],
        ["--target_lang", "ro"],
        ["--source-prefix", "translate "],
        ["--max-source-length", "9"],
        ["--max_target_length", "9"],
    ] {
        let ended = train_on(&llama, &data, &folder.path().join("run"), &flags);
        let flag = flags[0].replace('_', "-");
        refused(
            &ended,
            &[&format!("{flag} is for encoder-decoder models such as t5, and llama is decoder-only")],
        );
    }
    let plan = ["plan", "--model", &model("Qwen3-0.6B"), "--ranks", "1", "--max-source-length", "9"];
    refused(&zeroth(&plan), &["--max-source-length is for encoder-decoder models"]);
    let t5 = new_t5(folder.path(), &[]);
    let ended = zeroth(&["generate", "--model", text(&t5), "--prompt", "a"]);
    refused(&ended, &["no *.safetensors"]);
    // Distillation stays with decoder-only models.
    let data = digits(folder.path());
    let student = train_on(
        &t5,
        &data,
        &folder.path().join("run"),
        &[&LANGUAGES[..], &["--teacher", text(&llama)]].concat(),
    );
    refused(&student, &["encoder-decoder"]);
}

/// The command of the ZeRO-3 guide, as it is typed, on a smaller model.
#[test]
fn the_flags_of_run_translation_train() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (model, data, run) = (new_t5(folder, &[]), digits(folder), folder.join("output_dir"));
    let command = [
        &[
            "train",
            "--deepspeed",
            "crates/zeroth-config/tests/configs/guide-zero3.json",
            "--num_gpus=1",
            "--device",
            "cpu",
        ][..],
        &["--model_name_or_path", text(&model), "--train_file", text(&data), "--output_dir", text(&run)],
        &["--per_device_train_batch_size", "1", "--overwrite_output_dir", "--fp16", "--do_train"],
        &[
            "--max_train_samples",
            "5",
            "--num_train_epochs",
            "1",
            "--source_lang",
            "en",
            "--target_lang",
            "ro",
        ],
        &[
            "--source_prefix",
            "translate English to Romanian: ",
            "--max_source_length",
            "64",
            "--max_target_length",
            "64",
        ],
        &["--pad_to_max_length", "False", "--ignore_pad_token_for_loss", "--val_max_target_length", "64"],
        &["--preprocessing_num_workers", "2", "--predict_with_generate", "False"],
    ]
    .concat();
    let ended = zeroth(&command);
    ended.assert_done();
    assert_eq!(losses(&run).len(), 5);
    for flag in ["pad-to-max-length", "ignore-pad-token-for-loss", "val-max-target-length"] {
        assert!(ended.stderr.contains(&format!("--{flag} has no effect: ")), "{flag}: {}", ended.stderr);
    }
}
