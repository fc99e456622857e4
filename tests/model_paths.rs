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
fn a_run_of_adapters_as_model_names_its_base_and_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let (run, golden) = (folder.path().join("run"), root().join("tests/golden/qwen3-tied"));
    let base = golden.canonicalize().unwrap();
    let [run_text, base_text] = [&run, &base].map(|path| path.to_str().unwrap());
    let data = golden.join("data.jsonl");
    let with = ["train", "--device", "cpu", "--model", base_text, "--data", data.to_str().unwrap()];
    let flags = ["--train-type", "lora", "--max-steps", "1", "--output", run_text];
    assert_eq!(zeroth(&[&with[..], &flags].concat()).code, 0);
    let advice = format!("--model {base_text} --adapter {}", run.join("model").display());
    let merge = format!("`zeroth checkpoint export {run_text} --merge --output MODEL`");
    refused(&run, &["is a run's folder", "it has trained an adapter", &advice, &merge]);
    // The flags that it names work.
    let words: Vec<&str> = advice.split(' ').collect();
    let flags = ["--prompt-ids", "1,2", "--max-new-tokens", "1", "--device", "cpu"];
    let ended = zeroth(&[&["generate"], &words[..], &flags].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    std::fs::remove_dir_all(run.join("model")).unwrap();
    refused(&run, &["has not written it yet", &merge]);
    let merged = folder.path().join("merged");
    let merged = merged.to_str().unwrap();
    let ended = zeroth(&["checkpoint", "export", run_text, "--merge", "--output", merged]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let ended = zeroth(&[&["generate", "--model", merged], &flags[..]].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
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
