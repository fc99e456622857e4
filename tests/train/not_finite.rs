//! Non-finite weights: the update is not applied, and the run stops or skips as configured.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{golden, metrics, tensors, text, train_on, written};

/// A copy of a golden model with one element replaced by `value`.
fn broken(folder: &Path, model: &str, tensor: &str, element: usize, value: f32) -> PathBuf {
    let copy = folder.join("broken");
    fs::create_dir_all(&copy).unwrap();
    fs::copy(golden(model).join("config.json"), copy.join("config.json")).unwrap();
    let mut file = fs::read(golden(model).join("model.safetensors")).unwrap();
    let all = tensors(&file);
    let place = all.iter().find(|found| found.name == tensor).unwrap().bytes.start + 4 * element;
    file[place..place + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(copy.join("model.safetensors"), file).unwrap();
    copy
}

#[test]
fn a_non_finite_loss_stops_before_the_update() {
    let folder = tempfile::tempdir().unwrap();
    let data = golden("qwen3-tied").join("data.jsonl");
    for (value, ranks) in [(f32::NAN, "1"), (f32::INFINITY, "1"), (f32::NAN, "2")] {
        let model = broken(folder.path(), "qwen3-tied", "model.layers.1.mlp.up_proj.weight", 5, value);
        let run = folder.path().join(format!("{value}-{ranks}"));
        let ended = train_on(&model, &data, &run, &["--ranks", ranks, "--max-steps", "10"]);
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        for words in ["step 1: the loss of rank 0 is not finite", "not applied", "--max-skipped-steps"] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        let lines = metrics(&run);
        assert_eq!(lines.len(), 1);
        let of = |key: &str| &lines[0][key];
        assert_eq!((of("loss"), of("grad_norm"), of("skipped")), (&Value::Null, &Value::Null, &true.into()));
        assert!(!run.join("model").exists(), "a model of such weights helps nobody");
    }
}

#[test]
fn finite_weights_whose_squares_overflow_in_a_norm_are_no_gradient_of_zero() {
    // The root of the mean of squares is infinite, and 1 over it would make the whole row zero: no loss of it, no gradient.
    let folder = tempfile::tempdir().unwrap();
    let model = broken(folder.path(), "llama-one-kv-head", "model.embed_tokens.weight", 7 * 24, 3e38);
    let data = written(folder.path(), "rows.jsonl", &[r#"{"input_ids": [5, 7, 9]}"#; 2]);
    for dtype in ["--bf16", "--fp32"] {
        let ended = train_on(&model, &data, &folder.path().join(dtype), &[dtype, "--max-steps", "2"]);
        assert_eq!(ended.code, 1, "{dtype}: {}", ended.stderr);
        assert!(ended.stderr.contains("step 1: the loss of rank 0 is not finite"), "{}", ended.stderr);
    }
}

#[test]
fn the_rank_with_the_non_finite_loss_is_reported() {
    // Only the second row has token 7, and the untied head keeps the embedding out of the other's loss.
    let folder = tempfile::tempdir().unwrap();
    let model = broken(folder.path(), "llama-one-kv-head", "model.embed_tokens.weight", 7 * 24, f32::NAN);
    let rows = [r#"{"input_ids": [1, 2, 3, 4]}"#, r#"{"input_ids": [5, 7, 9]}"#];
    let data = written(folder.path(), "rows.jsonl", &rows);
    let ended = train_on(&model, &data, &folder.path().join("run"), &["--ranks", "2", "--max-steps", "2"]);
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("step 1: the loss of rank 1 is not finite"), "{}", ended.stderr);
    assert!(ended.stderr.contains("in file order: 1. "), "{}", ended.stderr);
    // One row of two is held out, whichever: the other is the first of those that are trained.
    let rows = [r#"{"input_ids": [5, 7, 9]}"#; 2];
    let data = written(folder.path(), "alike.jsonl", &rows);
    let split = ["--split-dataset-ratio", "0.5", "--max-steps", "2"];
    let ended = train_on(&model, &data, &folder.path().join("split"), &split);
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    let words = "in file order: 0 (not counting those held out for evaluation). ";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
}

#[test]
fn max_skipped_steps_limits_skips() {
    let folder = tempfile::tempdir().unwrap();
    let model = broken(folder.path(), "qwen3-tied", "model.layers.0.mlp.gate_proj.weight", 0, f32::NAN);
    let data = golden("qwen3-tied").join("data.jsonl");
    for ranks in ["1", "2"] {
        let run = folder.path().join(ranks);
        let flags = ["--ranks", ranks, "--max-steps", "10", "--max-skipped-steps", "3"];
        let ended = train_on(&model, &data, &run, &flags);
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        assert!(ended.stderr.contains("step 4: "), "{}", ended.stderr);
        let lines = metrics(&run);
        assert_eq!(lines.len(), 4);
        for line in &lines {
            assert_eq!((&line["loss"], &line["skipped"]), (&Value::Null, &true.into()), "{line}");
            assert_eq!(line["lr"], lines[0]["lr"], "a skipped step does not move the schedule");
        }
        assert!(!run.join("model").exists());
    }
}

#[test]
fn skipped_steps_leave_no_trace() {
    // Token 7 overflows in fp16 and occurs only in the first row: one step is skipped without a trace.
    let folder = tempfile::tempdir().unwrap();
    let model = broken(folder.path(), "llama-one-kv-head", "model.embed_tokens.weight", 7 * 24, 1e5);
    let config = r#"{"fp16": {"enabled": true, "loss_scale": 1024}}"#;
    let config = written(folder.path(), "ds.json", &[config]);
    let good =
        [r#"{"input_ids": [1, 2, 3, 4]}"#, r#"{"input_ids": [9, 8, 3]}"#, r#"{"input_ids": [6, 1, 6, 2]}"#];
    let all = [&[r#"{"input_ids": [5, 7, 9]}"#][..], &good].concat();
    let columns = |run: &str, rows: &[&str], steps: &str, skipped: &str| -> Vec<Value> {
        let data = written(folder.path(), "rows.jsonl", rows);
        let flags = [
            ["--max-steps", steps],
            ["--max-skipped-steps", skipped],
            ["--lr-scheduler-type", "constant"],
            ["--deepspeed", text(&config)],
            // The row of token 7 is beyond fp16.
            ["--save-dtype", "bf16"],
        ];
        let run = folder.path().join(run);
        train_on(&model, &data, &run, &flags.concat()).assert_done();
        assert!(run.join("model/model.safetensors").is_file());
        metrics(&run)
    };
    let skipping = columns("skipping", &all, "4", "1");
    assert_eq!((&skipping[0]["loss"], &skipping[0]["skipped"]), (&Value::Null, &true.into()));
    for (found, expected) in skipping[1..].iter().zip(columns("without", &good, "3", "0")) {
        for key in ["loss", "grad_norm", "lr", "skipped"] {
            assert_eq!(found[key], expected[key], "{key}");
        }
    }
}

#[test]
fn a_router_that_is_not_finite_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let name = "moe/qwen3-moe-normalized";
    let model = broken(folder.path(), name, "model.layers.1.mlp.gate.weight", 3, f32::NAN);
    let data = golden(name).join("data.jsonl");
    let ended = train_on(&model, &data, &folder.path().join("run"), &["--ranks", "2", "--max-steps", "3"]);
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    let words = "step 1: the weights of the router of block 1, and so the loss of rank 0, are not finite";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
    let skipped = ["--max-steps", "3", "--max-skipped-steps", "5"];
    let ended = train_on(&model, &data, &folder.path().join("skipped"), &skipped);
    let words = "step 1 is skipped: the router of block 1 gives weights that are not finite";
    assert_eq!(ended.stderr.matches(words).count(), 1, "{}", ended.stderr);
    assert!(!ended.stderr.contains("the router of block 0"), "{}", ended.stderr);
}
