//! Non-finite weights are not saved, and a run without a final loss fails.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{golden, text, train, train_on, written};
use crate::common::{Ended, zeroth};

const RUN: [&str; 5] = ["--fp32", "--lr-scheduler-type", "constant", "--save-steps", "1"];

/// The names in a folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn non_finite_weights_are_not_saved() {
    for ranks in ["1", "2"] {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let flags = [&RUN[..], &["--ranks", ranks, "--deepspeed", "zero3"]].concat();
        train("qwen3-tied", &run, &[&flags[..], &["--max-steps", "2"]].concat()).assert_done();
        let model = fs::read(run.join("model/model.safetensors")).unwrap();
        // The loss of a step is computed before its update, which produces the non-finite weights.
        let more = ["--max-steps", "3", "--resume", "auto", "--learning-rate", "1e38"];
        let ended = train("qwen3-tied", &run, &[&flags[..], &more].concat());
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        for words in ["cannot save step 3", "`model.", "weights", "not finite", "--learning-rate"] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        assert_eq!(names(&run.join("checkpoints")), ["latest", "step-1", "step-2"]);
        assert_eq!(fs::read(run.join("model/model.safetensors")).unwrap(), model);
        let verified = zeroth(&["checkpoint", "verify", text(&run)]);
        assert_eq!(verified.code, 0, "{}", verified.stderr);
    }
}

#[test]
fn non_finite_models_are_not_exported() {
    for ranks in ["1", "2"] {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let flags = ["--fp32", "--save-steps", "0", "--max-steps", "1", "--learning-rate", "1e38"];
        let ended = train("qwen3-tied", &run, &[&flags[..], &["--ranks", ranks]].concat());
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        assert!(ended.stderr.contains("`model.") && ended.stderr.contains("not finite"), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{}", ended.stderr);
        assert!(!run.join("model").exists(), "a model that was not written");
    }
}

/// A copy of a golden model in which the embedding of token 7 overflows in fp16.
fn overflows_at_7(folder: &Path) -> PathBuf {
    let copy = folder.join("overflows");
    fs::create_dir_all(&copy).unwrap();
    fs::copy(golden("llama-one-kv-head").join("config.json"), copy.join("config.json")).unwrap();
    let mut file = fs::read(golden("llama-one-kv-head").join("model.safetensors")).unwrap();
    let all = super::tensors(&file);
    let tensor = all.iter().find(|tensor| tensor.name == "model.embed_tokens.weight").unwrap();
    let place = tensor.bytes.start + 4 * 7 * 24;
    file[place..place + 4].copy_from_slice(&1e5_f32.to_le_bytes());
    fs::write(copy.join("model.safetensors"), file).unwrap();
    copy
}

/// Trains in fp16 on rows of which those in `broken` contain token 7.
fn trained(folder: &Path, broken: &[u64], steps: u64) -> Ended {
    let row = |row| {
        let token = if broken.contains(&row) { 7 } else { 8 };
        format!("{{\"input_ids\": [5, {token}, 9, {}]}}", 10 + row)
    };
    let rows: Vec<String> = (1..=steps).map(row).collect();
    let data = written(folder, "rows.jsonl", &rows);
    let flags = ["--fp16", "--max-steps", &steps.to_string(), "--save-steps", "4", "--format", "json"];
    // The row of token 7 is beyond fp16.
    let flags = [&flags[..], &["--save-dtype", "bf16"]].concat();
    train_on(&overflows_at_7(folder), &data, &folder.join("run"), &flags)
}

#[test]
fn the_summary_counts_skipped_steps() {
    let folder = tempfile::tempdir().unwrap();
    let ended = trained(folder.path(), &[1, 3], 6);
    ended.assert_done();
    assert!(ended.stderr.contains("2 of 6 steps were skipped"), "{}", ended.stderr);
    let summary: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(
        (&summary["steps"], &summary["skipped"], &summary["non_finite"]),
        (&6.into(), &2.into(), &2.into())
    );
    let folder = tempfile::tempdir().unwrap();
    let ended = trained(folder.path(), &[], 3);
    ended.assert_done();
    assert!(!ended.stderr.contains("skipped"), "{}", ended.stderr);
}

#[test]
fn a_run_without_a_final_loss_fails() {
    let folder = tempfile::tempdir().unwrap();
    let ended = trained(folder.path(), &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 12);
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    for words in ["the loss of the last step (12) is not finite", "11 of 12 steps were skipped"] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    let summary: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&summary["last_loss"], &summary["skipped"]), (&Value::Null, &11.into()));
    // Its state is saved, but resuming does not make the run succeed.
    let data = folder.path().join("rows.jsonl");
    let flags = ["--fp16", "--save-dtype", "bf16", "--max-steps", "12", "--resume", "auto"];
    let again = train_on(&folder.path().join("overflows"), &data, &folder.path().join("run"), &flags);
    assert_eq!(again.code, 1, "{}", again.stderr);
    assert!(again.stderr.contains("the loss of the last step (12) is not finite"), "{}", again.stderr);
}
