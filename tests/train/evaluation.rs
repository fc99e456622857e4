//! Evaluation: the loss on held-out rows, equal on any number of ranks.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{golden, json, metrics, number, text, train, written};

/// Writes some of a golden model's rows to a file.
fn rows(folder: &Path, model: &str, range: std::ops::Range<usize>) -> PathBuf {
    let all = fs::read_to_string(golden(model).join("data.jsonl")).unwrap();
    let lines: Vec<&str> = all.lines().collect();
    written(folder, "eval.jsonl", &lines[range])
}

fn evaluations(run: &Path) -> Vec<Value> {
    metrics(run).into_iter().filter(|line| line.get("eval_loss").is_some()).collect()
}

#[test]
fn evaluation_loss_matches_pytorch() {
    // Step 3 of the golden run uses rows 8 to 12 with the weights after step 2, and so does an evaluation between
    // them.
    let folder = tempfile::tempdir().unwrap();
    let data = rows(folder.path(), "llama-one-kv-head", 8..12);
    let expected = &json(&golden("llama-one-kv-head").join("steps.json"))["runs"][0];
    assert_eq!(expected["name"], "batch-4-cosine");
    for (ranks, micro_batch) in [("1", "4"), ("2", "2")] {
        let run = folder.path().join(ranks);
        let flags = [
            ["--eval-data", text(&data)],
            ["--eval-steps", "2"],
            ["--ranks", ranks],
            ["--per-device-train-batch-size", micro_batch],
            ["--fp32", "true"],
            ["--max-steps", "20"],
            ["--learning-rate", "1e-3"],
            ["--warmup-steps", "3"],
        ];
        train("llama-one-kv-head", &run, &flags.concat()).assert_done();
        let lines = metrics(&run);
        assert_eq!(lines.len(), 30, "20 steps, 10 evaluations");
        assert!(lines[2].get("loss").is_none() && lines[2]["step"] == 2 && lines[2]["samples_seen"] == 8);
        let found = number(&lines[2]["eval_loss"]);
        assert!((found - number(&expected["loss"][2])).abs() < 1e-4, "{found} {}", expected["loss"][2]);
        assert_eq!(lines[2]["eval_tokens"], expected["tokens"][2]);
        assert!((number(&lines[2]["eval_perplexity"]) - found.exp()).abs() < 1e-9);
        // Evaluation does not affect training: later steps still match PyTorch.
        let last = lines.iter().rfind(|line| line.get("loss").is_some()).unwrap();
        assert!((number(&last["loss"]) - number(&expected["loss"][19])).abs() < 1e-4, "{last}");
    }
}

#[test]
fn evaluation_does_not_depend_on_ranks() {
    let folder = tempfile::tempdir().unwrap();
    // Seven rows are not divisible by any batch here: some ranks have fewer in the last round, or none.
    let data = rows(folder.path(), "qwen3-tied", 70..77);
    let mut first: Option<Vec<Value>> = None;
    for (ranks, micro_batch) in [("1", "6"), ("2", "3"), ("3", "2")] {
        let run = folder.path().join(ranks);
        let flags = [
            ["--eval-data", text(&data)],
            ["--eval-steps", "2"],
            ["--ranks", ranks],
            ["--per-device-train-batch-size", micro_batch],
            ["--fp32", "true"],
            ["--max-steps", "5"],
            ["--learning-rate", "1e-3"],
        ];
        let ended = train("qwen3-tied", &run, &flags.concat());
        ended.assert_done();
        assert!(ended.stderr.contains("step 5 · eval loss "), "{}", ended.stderr);
        let found = evaluations(&run);
        let steps: Vec<u64> = found.iter().map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [2, 4, 5]);
        let expected = first.get_or_insert_with(|| found.clone());
        for (found, expected) in found.iter().zip(expected) {
            let apart = number(&found["eval_loss"]) - number(&expected["eval_loss"]);
            assert!(apart.abs() < 1e-6, "{ranks} ranks: {found} {expected}");
        }
    }
}
