//! The exported model belongs to the last step: a run is complete only with that model.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::{metrics, text, train};
use crate::common::{Ended, zeroth};

/// Resumes to `steps` steps, with a rate that changes the weights.
fn goes_on(run: &Path, steps: &str) -> Ended {
    let flags = ["--fp32", "--learning-rate", "3e-3", "--lr-scheduler-type", "constant", "--save-steps", "1"];
    train("qwen3-tied", run, &[&flags[..], &["--resume", "auto", "--max-steps", steps]].concat())
}

/// The files of a folder, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect()
}

/// Restores a folder's files.
fn put_back(folder: &Path, files: &BTreeMap<String, Vec<u8>>) {
    fs::remove_dir_all(folder).unwrap();
    fs::create_dir(folder).unwrap();
    for (name, bytes) in files {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

fn assert_complete(ended: &Ended) {
    ended.assert_done();
    assert!(ended.stderr.contains("this run is already complete"), "{}", ended.stderr);
}

/// Asserts that the model is exported again, without a step.
fn assert_exported(ended: &Ended, run: &Path, expected: &BTreeMap<String, Vec<u8>>) {
    ended.assert_done();
    assert!(!ended.stderr.contains("this run is already complete"), "{}", ended.stderr);
    assert_eq!(files(&run.join("model"))["model.safetensors"], expected["model.safetensors"]);
    assert_eq!(metrics(run).len(), 4, "no step is done twice");
    assert_complete(&goes_on(run, "4"));
}

#[test]
fn an_outdated_model_is_exported_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let model = run.join("model");
    goes_on(&run, "2").assert_done();
    let earlier = files(&model);
    goes_on(&run, "4").assert_done();
    let last = files(&model);
    assert_ne!(earlier["model.safetensors"], last["model.safetensors"]);
    assert_complete(&goes_on(&run, "4"));
    // As after a kill between the last save and the export.
    put_back(&model, &earlier);
    assert_exported(&goes_on(&run, "4"), &run, &last);
    // As after a kill during the export: new weights, old config and tokenizer.
    put_back(&model, &earlier);
    fs::write(model.join("model.safetensors"), &last["model.safetensors"]).unwrap();
    assert_exported(&goes_on(&run, "4"), &run, &last);
    // A model of an earlier step is outdated too.
    let step = run.join("checkpoints/step-2");
    let exported = zeroth(&["checkpoint", "export", text(&step), "--output", text(&model), "--overwrite"]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    assert_exported(&goes_on(&run, "4"), &run, &last);
    // The last one is current.
    let step = run.join("checkpoints/step-4");
    let exported = zeroth(&["checkpoint", "export", text(&step), "--output", text(&model), "--overwrite"]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    assert_complete(&goes_on(&run, "4"));
}

#[test]
fn an_incomplete_model_is_exported_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let model = run.join("model");
    goes_on(&run, "4").assert_done();
    let whole = files(&model);
    for name in whole.keys() {
        fs::remove_file(model.join(name)).unwrap();
        assert_exported(&goes_on(&run, "4"), &run, &whole);
        assert_eq!(files(&model), whole, "{name}");
    }
    let weights = model.join("model.safetensors");
    fs::write(&weights, &whole["model.safetensors"][..1000]).unwrap();
    assert_exported(&goes_on(&run, "4"), &run, &whole);
    // User changes to config and tokenizer files are kept.
    fs::write(model.join("config.json"), "{}").unwrap();
    assert_complete(&goes_on(&run, "4"));
    assert_eq!(fs::read_to_string(model.join("config.json")).unwrap(), "{}");
}

#[test]
fn a_failed_export_is_repeated_on_resume() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let (model, aside) = (run.join("model"), folder.path().join("aside"));
    goes_on(&run, "2").assert_done();
    let config = model.join("config.json");
    fs::rename(&config, &aside).unwrap();
    fs::create_dir(&config).unwrap();
    let ended = goes_on(&run, "4");
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    fs::remove_dir(&config).unwrap();
    fs::rename(&aside, &config).unwrap();
    let ended = goes_on(&run, "4");
    ended.assert_done();
    assert!(!ended.stderr.contains("this run is already complete"), "{}", ended.stderr);
    assert_complete(&goes_on(&run, "4"));
    let fresh = folder.path().join("fresh");
    goes_on(&fresh, "4").assert_done();
    assert_eq!(files(&model)["model.safetensors"], files(&fresh.join("model"))["model.safetensors"]);
}
