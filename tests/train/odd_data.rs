//! Tiny datasets and rows with few trained tokens: a run works wherever its numbers are defined.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::{golden, metrics, new_model, number, text, train_on, written};
use crate::common::zeroth_json;

/// Trains the untied golden model on these rows.
fn trained(rows: &[&str], flags: &[&str]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let data = written(folder.path(), "rows.jsonl", rows);
    let run = folder.path().join("run");
    train_on(&golden("llama-one-kv-head"), &data, &run, &[&["--fp32"], flags].concat()).assert_done();
    metrics(&run)
}

const ROW: &str = r#"{"input_ids": [1, 2, 3, 4]}"#;

#[test]
fn one_sample_fills_every_batch() {
    // The mean over copies of a row is that of the row: 12 copies on 3 ranks equal 1 on 1 rank.
    let alone = trained(&[ROW], &["--max-steps", "3"]);
    let many = trained(&[ROW], &["--max-steps", "3", "--ranks", "3", "--per-device-train-batch-size", "4"]);
    for (alone, many) in alone.iter().zip(&many) {
        assert!((number(&alone["loss"]) - number(&many["loss"])).abs() < 1e-5, "{alone} {many}");
        assert!((number(&alone["grad_norm"]) - number(&many["grad_norm"])).abs() < 1e-4, "{alone} {many}");
        assert_eq!((&alone["tokens"], &many["tokens"]), (&4.into(), &48.into()));
    }
    assert_eq!(many[2]["samples_seen"], 36);
}

#[test]
fn a_batch_larger_than_the_data_repeats_rows() {
    let rows = [ROW, r#"{"input_ids": [9, 8]}"#, r#"{"input_ids": [6, 1, 6, 2, 5]}"#];
    let found = trained(&rows, &["--max-steps", "2", "--per-device-train-batch-size", "2", "--ranks", "2"]);
    // Rows 0, 1, 2, 0 and then 1, 2, 0, 1.
    let tokens: Vec<u64> = found.iter().map(|line| line["tokens"].as_u64().unwrap()).collect();
    assert_eq!(tokens, [4 + 2 + 5 + 4, 2 + 5 + 4 + 2]);
}

#[test]
fn a_rank_without_trained_tokens_does_not_change_the_loss() {
    let untrained = r#"{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}"#;
    let alone = trained(&[ROW], &["--max-steps", "4"]);
    let both = trained(&[ROW, untrained], &["--max-steps", "4", "--ranks", "2", "--deepspeed", "zero3"]);
    for (alone, both) in alone.iter().zip(&both) {
        assert!((number(&alone["loss"]) - number(&both["loss"])).abs() < 1e-5, "{alone} {both}");
        assert!((number(&alone["grad_norm"]) - number(&both["grad_norm"])).abs() < 1e-4, "{alone} {both}");
        assert_eq!(both["tokens"], 7);
    }
}

#[test]
fn steps_without_trained_tokens_have_zero_loss() {
    // A row of one token has no context to predict it from.
    let found = trained(&[r#"{"input_ids": [5]}"#, r#"{"input_ids": [6]}"#, ROW], &["--max-steps", "2"]);
    for line in &found {
        assert_eq!((number(&line["loss"]), number(&line["grad_norm"])), (0.0, 0.0));
    }
}

#[test]
fn too_long_rows_are_dropped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let data = written(folder.path(), "rows.jsonl", &[ROW, r#"{"input_ids": [6, 1, 6, 2, 5]}"#]);
    let run = folder.path().join("run");
    let flags = ["--max-length", "4", "--num-train-epochs", "2"];
    let ended = train_on(&golden("llama-one-kv-head"), &data, &run, &flags);
    ended.assert_done();
    assert!(ended.stderr.contains("data: 1 sample, "), "{}", ended.stderr);
    assert!(ended.stderr.contains("note: 1 row"), "{}", ended.stderr);
    let tokens: Vec<Value> = metrics(&run).iter().map(|line| line["tokens"].clone()).collect();
    assert_eq!(tokens, [4, 4], "two epochs of one row");
}

#[test]
fn a_folder_of_parts_trains_as_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let rows =
        [ROW, r#"{"input_ids": [9, 8, 7]}"#, r#"{"input_ids": [6, 1, 6, 2, 5]}"#, r#"{"input_ids": [3, 3]}"#];
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("parts/b")).unwrap();
    fs::write(at("parts/a.csv"), "id,input_ids\r\n1,\"[1, 2, 3, 4]\"\r\n2,\"[9,\r\n8, 7]\"\r\n").unwrap();
    assert!(Command::new("gzip").arg(at("parts/a.csv")).status().unwrap().success());
    fs::write(at("parts/b/c.json"), format!("[\n{},\n{}\n]\n", rows[2], rows[3])).unwrap();
    fs::write(at("parts/notes.md"), "none").unwrap();
    let one = written(folder.path(), "rows.jsonl", &rows);
    let model = golden("llama-one-kv-head");
    let eval = at("row?.jsonl");
    let flags = ["--fp32", "--max-steps", "3", "--ranks", "2", "--eval-data", text(&eval)];
    let runs = [(&one, at("one")), (&at("parts"), at("many"))].map(|(data, run)| {
        let ended = train_on(&model, data, &run, &flags);
        ended.assert_done();
        let lines = metrics(&run);
        let numbers = |key: &str| lines.iter().filter_map(|line| line[key].as_f64()).collect::<Vec<_>>();
        (numbers("loss"), numbers("eval_loss"), ended.stderr)
    });
    assert_eq!((&runs[0].0, &runs[0].1), (&runs[1].0, &runs[1].1));
    assert_eq!((runs[0].0.len(), runs[0].1.len()), (3, 1));
    assert!(runs[1].2.contains("note: 1 file skipped, not data by its name: "), "{}", runs[1].2);

    let inside = train_on(&model, &at("parts"), &at("parts/b/run"), &["--max-steps", "1"]);
    assert_eq!(inside.code, 2);
    assert!(inside.stderr.contains("is inside --data"), "{}", inside.stderr);
    assert!(!at("parts/b/run").exists());

    fs::write(at("parts/b/c.json"), format!("[\n{},\n{{\"input_ids\": 3}}]", rows[2])).unwrap();
    let (model, parts) = (text(&model), at("parts"));
    let (code, found) = zeroth_json(&["data", "preview", "--model", model, "--data", text(&parts)]);
    assert_eq!((code, &found["rows"]), (4, &4.into()));
    let expected = serde_json::json!({"file": at("parts/b/c.json"), "row": 2, "line": 3});
    assert_eq!(found["problems"]["first"][0]["place"], expected);
}

#[test]
fn rows_beyond_the_positions_of_the_model_are_noted() {
    let folder = tempfile::tempdir().unwrap();
    let data = written(folder.path(), "rows.jsonl", &[ROW]);
    let model = new_model(folder.path(), 16, 1, 16, 64);
    let noted = |length: &str| {
        let run = folder.path().join("run");
        let ended = train_on(&model, &data, &run, &["--dry-run", "--max-length", length]);
        ended.assert_done();
        let words = "note: --max-length 257 exceeds the 256 positions of the model (max_position_embeddings): longer rows train untrained positions, and `zeroth generate` stops at 256\n";
        ended.stderr.contains(words)
    };
    assert_eq!([noted("256"), noted("257")], [false, true]);
}

#[test]
fn dry_runs_shorten_long_rows() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u64> = (0..200_000).map(|place| place * 7 % 61).collect();
    let data = written(folder.path(), "rows.jsonl", &[serde_json::json!({ "input_ids": ids }).to_string()]);
    let run = folder.path().join("run");
    let flags = ["--dry-run", "--max-length", "200000"];
    let ended = train_on(&new_model(folder.path(), 16, 1, 16, 64), &data, &run, &flags);
    ended.assert_done();
    assert!(ended.stdout.contains(" […198,000 tokens omitted…] ["), "{}", ended.stdout);
    assert!(ended.stdout.len() < 20_000, "{}", ended.stdout.len());
}
