//! `--model` given a run or a checkpoint: the message suggests the model folder.

use std::path::Path;

use crate::common::{root, zeroth};

/// Runs every command that takes a model with an invalid one.
fn refused(model: &Path, words: &[&str]) {
    let model = model.to_str().unwrap();
    let data = root().join("tests/golden/qwen3-tied/data.jsonl");
    let output = model.to_owned() + "-new";
    for arguments in [
        vec![
            "train",
            "--device",
            "cpu",
            "--model",
            model,
            "--data",
            data.to_str().unwrap(),
            "--output",
            &output,
        ],
        vec!["plan", "--model", model, "--ranks", "2"],
        vec!["generate", "--device", "cpu", "--model", model, "--prompt", "x"],
        vec!["config", "resolve", "zero3", "--model", model],
    ] {
        let ended = zeroth(&arguments);
        assert_eq!(ended.code, 2, "{arguments:?}: {}", ended.stderr);
        for words in words {
            assert!(ended.stderr.contains(words), "{arguments:?}: {words}: {}", ended.stderr);
        }
    }
}

#[test]
fn runs_and_checkpoints_as_model_give_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let model = root().join("tests/golden/qwen3-tied");
    let ended = zeroth(&[
        "train",
        "--device",
        "cpu",
        "--model",
        model.to_str().unwrap(),
        "--data",
        model.join("data.jsonl").to_str().unwrap(),
        "--output",
        run.to_str().unwrap(),
        "--max-steps",
        "1",
    ]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let trained = format!("the model it has trained is {}", run.join("model").display());
    refused(&run, &["is a run's folder", &trained]);
    refused(&run.join("config.json"), &["is a run's folder", &trained]);
    refused(&run.join("checkpoints"), &["is a run's folder", &trained]);
    let step = run.join("checkpoints/step-1");
    let export = format!("`zeroth checkpoint export {} --output MODEL`", step.display());
    refused(&step, &["is a checkpoint", &export]);
    std::fs::remove_dir_all(run.join("model")).unwrap();
    let export = format!("`zeroth checkpoint export {} --output MODEL`", run.display());
    refused(&run, &["it has written no model yet", &export]);
}
