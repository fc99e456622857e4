//! Symlinked run folders on another disk: links are kept, and the run's files behind them treated as its own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::{golden, metrics, text, train, written};
use crate::common::{Ended, zeroth};

fn trained(run: &Path, more: &[&str]) -> Ended {
    train("qwen3-tied", run, &[&["--save-steps", "1"], more].concat())
}

fn assert_link(path: &Path, to: &Path) {
    assert_eq!(fs::read_link(path).unwrap(), to);
}

/// A run whose folders of checkpoints and of the model lie elsewhere; the folder itself is reached by a link too.
fn linked(folder: &Path) -> (PathBuf, PathBuf, PathBuf) {
    let at = |name: &str| folder.join(name);
    for name in ["real", "scratch", "models"] {
        fs::create_dir(at(name)).unwrap();
    }
    symlink(at("real"), at("run")).unwrap();
    trained(&at("run"), &["--max-steps", "1"]).assert_done();
    for (name, to) in [("checkpoints", "scratch"), ("model", "models")] {
        fs::remove_dir(at(to)).unwrap();
        fs::rename(at("real").join(name), at(to)).unwrap();
        symlink(at(to), at("real").join(name)).unwrap();
    }
    (at("run"), at("scratch"), at("models"))
}

#[test]
fn overwriting_keeps_symlinks_and_foreign_files() {
    let folder = tempfile::tempdir().unwrap();
    let (run, scratch, models) = linked(folder.path());
    trained(&run, &["--max-steps", "3", "--resume", "auto"]).assert_done();
    assert!(scratch.join("step-3").is_dir());
    written(&scratch, "notes.txt", &["mine"]);
    written(&scratch.join("step-2"), "notes.txt", &["mine"]);
    written(&models, "README.md", &["mine"]);
    let ended = trained(&run, &["--max-steps", "1", "--overwrite-output-dir"]);
    ended.assert_done();
    assert_link(&run, &folder.path().join("real"));
    assert_link(&run.join("checkpoints"), &scratch);
    assert_link(&run.join("model"), &models);
    assert_eq!(metrics(&run).len(), 1);
    assert!(scratch.join("step-1").is_dir() && !scratch.join("step-3").exists(), "{}", ended.stderr);
    for path in [scratch.join("notes.txt"), scratch.join("step-2/notes.txt"), models.join("README.md")] {
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine\n", "{}", path.display());
    }
    for words in ["removed checkpoints/step-3", "checkpoints/step-2 was kept", "model/README.md was kept"] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    let verified = zeroth(&["checkpoint", "verify", text(&scratch.join("step-1"))]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
}

#[test]
fn inputs_behind_symlinks_are_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (run, scratch, models) = linked(folder.path());
    let before = fs::read(models.join("model.safetensors")).unwrap();
    let data = golden("qwen3-tied").join("data.jsonl");
    let ended = super::train_on(&models, &data, &run, &["--max-steps", "1", "--overwrite-output-dir"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("--model ") && ended.stderr.contains("depends on it"), "{}", ended.stderr);
    let from = scratch.join("step-1");
    let more = ["--max-steps", "2", "--overwrite-output-dir", "--resume", text(&from)];
    trained(&folder.path().join("other"), &more).assert_done();
    assert!(from.is_dir());
    assert_eq!(fs::read(models.join("model.safetensors")).unwrap(), before);
}

#[test]
fn foreign_models_behind_symlinks_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (run, _, models) = linked(folder.path());
    let theirs = folder.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("llama-one-kv-head").join(name), theirs.join(name)).unwrap();
    }
    fs::remove_file(folder.path().join("real/model")).unwrap();
    symlink(&theirs, folder.path().join("real/model")).unwrap();
    // It ends before it writes a model of its own.
    let more = ["--max-steps", "2", "--overwrite-output-dir", "--learning-rate", "1e38", "--fp32"];
    let ended = trained(&run, &more);
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(
            fs::read(theirs.join(name)).unwrap(),
            fs::read(golden("llama-one-kv-head").join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(ended.stderr.contains("model/model.safetensors was kept"), "{}", ended.stderr);
    drop(models);
}

#[test]
fn dangling_symlinks_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (run, scratch, _) = linked(folder.path());
    fs::remove_dir_all(&scratch).unwrap();
    let ended = trained(&run, &["--max-steps", "1", "--overwrite-output-dir"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("checkpoints is a dangling symlink"), "{}", ended.stderr);
    assert_link(&run.join("checkpoints"), &scratch);
    assert_eq!(metrics(&run).len(), 1, "nothing was removed");
}
