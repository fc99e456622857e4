//! Runs that read from the folder they write to: inputs stay intact, and removing them is refused.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{golden, metrics, text, train_on, written};
use crate::common::zeroth;

/// A small model with a tokenizer, and rows of ready tokens.
fn inputs(folder: &Path) -> (PathBuf, PathBuf) {
    let model = folder.join("given");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("qwen3-tied").join(name), model.join(name)).unwrap();
    }
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden("../../examples/gsm8k/tiny-qwen3").join(name), model.join(name)).unwrap();
    }
    fs::copy(golden("qwen3-tied").join("data.jsonl"), folder.join("data.jsonl")).unwrap();
    (model, folder.join("data.jsonl"))
}

fn carried(model: &Path) -> Vec<Vec<u8>> {
    ["tokenizer.json", "tokenizer_config.json"].map(|name| fs::read(model.join(name)).unwrap()).to_vec()
}

/// A bind mount of a folder; `None` without permission.
struct Bound(PathBuf);

impl Bound {
    fn mount(folder: &Path, at: PathBuf) -> Option<Self> {
        fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount").args(["--bind", text(folder), text(&at)]).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(at));
        }
        println!("skipped: mounting needs root (sudo -E cargo test -p zeroth-cli same_folder)");
        None
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", text(&self.0)]).status();
    }
}

#[test]
fn training_in_the_models_folder_keeps_its_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let (given, data) = inputs(folder.path());
    let run = folder.path().join("run");
    train_on(&given, &data, &run, &["--max-steps", "2", "--save-steps", "1"]).assert_done();
    let model = run.join("model");
    let link = folder.path().join("link");
    symlink(&model, &link).unwrap();
    for (named, steps) in [(&model, "3"), (&link, "4")] {
        train_on(named, &data, &run, &["--max-steps", steps, "--resume", "auto"]).assert_done();
        assert_eq!(carried(&model), carried(&given), "{}", named.display());
    }
    // A file shared with other folders is replaced, not written through.
    for name in ["tokenizer.json", "model.safetensors"] {
        fs::remove_file(model.join(name)).unwrap();
        fs::hard_link(given.join(name), model.join(name)).unwrap();
    }
    let weights = fs::read(given.join("model.safetensors")).unwrap();
    train_on(&model, &data, &run, &["--max-steps", "5", "--resume", "auto"]).assert_done();
    assert_eq!(carried(&model), carried(&given));
    assert_eq!(fs::read(given.join("model.safetensors")).unwrap(), weights);
    let verified = zeroth(&["checkpoint", "verify", text(&run)]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
}

#[test]
fn a_model_is_never_exported_into_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (given, data) = inputs(folder.path());
    let run = folder.path().join("run");
    train_on(&given, &data, &run, &["--max-steps", "1"]).assert_done();
    let step = run.join("checkpoints/step-1");
    let link = folder.path().join("link");
    symlink(step.join("model"), &link).unwrap();
    let bound = Bound::mount(&step.join("model"), folder.path().join("bound"));
    for to in [step.join("model"), step.join("new"), link]
        .into_iter()
        .chain(bound.iter().map(|bound| bound.0.clone()))
    {
        let ended = zeroth(&["checkpoint", "export", text(&step), "--output", text(&to), "--overwrite"]);
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        assert!(ended.stderr.contains("is inside the checkpoint"), "{}", ended.stderr);
    }
    assert_eq!(carried(&step.join("model")), carried(&given));
    let verified = zeroth(&["checkpoint", "verify", text(&step)]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
}

/// All files of a folder with their contents.
fn all(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(all(&path));
        } else {
            found.push((path.clone(), fs::read(&path).unwrap()));
        }
    }
    found.sort_unstable();
    found
}

#[test]
fn overwriting_is_refused_if_it_would_remove_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let (given, data) = inputs(folder.path());
    let run = folder.path().join("run");
    train_on(&given, &data, &run, &["--max-steps", "2", "--save-steps", "1"]).assert_done();
    // Inputs by other paths: a link to a file that goes, and a folder of links.
    let linked = folder.path().join("linked");
    fs::create_dir(&linked).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        symlink(run.join("model").join(name), linked.join(name)).unwrap();
    }
    let config = folder.path().join("ds.json");
    symlink(run.join("config.json"), &config).unwrap();
    let rows = run.join("logs/rank-7.log");
    fs::copy(&data, &rows).unwrap();
    let before = all(&run);
    let (model, other) = (run.join("model"), folder.path().join("other"));
    let bound = Bound::mount(&model, folder.path().join("bound"));
    let by_mount = bound.as_ref().map_or(&model, |bound| &bound.0);
    for (model, data, more, words) in [
        (by_mount, &data, vec![], ["--model ", " depends on it"]),
        (&model, &data, vec![], ["--model ", "run/model depends on it"]),
        (&linked, &data, vec![], ["--model ", "linked depends on it"]),
        (&given, &rows, vec![], ["--data ", "logs/rank-7.log depends on it"]),
        (&given, &data, vec!["--eval-data", text(&rows)], ["--eval-data ", "logs/rank-7.log depends on it"]),
        (&given, &data, vec!["--deepspeed", text(&config)], ["--deepspeed ", "ds.json depends on it"]),
    ] {
        let flags = [&["--max-steps", "2", "--overwrite-output-dir"], &more[..]].concat();
        let ended = train_on(model, data, &run, &flags);
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        for words in words.into_iter().chain(["--overwrite-output-dir would remove", text(&run)]) {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        assert_eq!(all(&run), before, "nothing was touched");
    }
    // What overwriting leaves alone may be read; so may the run, by another one.
    fs::create_dir(run.join("notes")).unwrap();
    let rows = run.join("notes/data.jsonl");
    fs::rename(run.join("logs/rank-7.log"), &rows).unwrap();
    train_on(&model, &rows, &other, &["--max-steps", "1"]).assert_done();
    train_on(&given, &rows, &run, &["--max-steps", "1", "--overwrite-output-dir"]).assert_done();
    assert_eq!(metrics(&run).len(), 1);
    assert!(rows.exists());
}

#[test]
fn overwriting_leaves_what_is_not_a_runs_and_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let (given, data) = inputs(folder.path());
    let run = folder.path().join("run");
    train_on(&given, &data, &run, &["--max-steps", "2", "--save-steps", "1"]).assert_done();
    let checkpoints = run.join("checkpoints");
    fs::create_dir(checkpoints.join("step-7-good")).unwrap();
    written(&checkpoints.join("step-7-good"), "notes.txt", &["mine"]);
    written(&checkpoints.join("step-1"), "notes.txt", &["mine"]);
    written(&run.join("model"), "model-best.safetensors", &["mine"]);
    let ended = train_on(&given, &data, &run, &["--max-steps", "1", "--overwrite-output-dir"]);
    ended.assert_done();
    for name in
        ["checkpoints/step-7-good/notes.txt", "checkpoints/step-1/notes.txt", "model/model-best.safetensors"]
    {
        assert_eq!(fs::read_to_string(run.join(name)).unwrap(), "mine\n", "{name}");
    }
    for name in [
        "checkpoints/step-7-good was kept",
        "checkpoints/step-1 was kept",
        "model/model-best.safetensors was kept",
    ] {
        assert!(ended.stderr.contains(name), "{name}: {}", ended.stderr);
    }
    assert!(!checkpoints.join("step-2").exists());
    let verified = zeroth(&["checkpoint", "verify", text(&run)]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
}
