//! Unreadable weights are refused: random weights are used only for a folder without any.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::{golden, text, train_on, written};
use crate::common::{Ended, zeroth};

/// A folder with the config of the untied golden model, and no weights.
fn config_only(folder: &Path) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    fs::copy(golden("llama-one-kv-head").join("config.json"), folder.join("config.json")).unwrap();
    folder.to_owned()
}

fn trained(model: &Path) -> (Ended, bool) {
    let folder = tempfile::tempdir().unwrap();
    let data = written(folder.path(), "rows.jsonl", &[r#"{"input_ids": [1, 2, 3, 4]}"#]);
    let run = folder.path().join("run");
    let ended = train_on(model, &data, &run, &["--fp32", "--max-steps", "1", "--seed", "7"]);
    (ended, run.exists())
}

/// Asserts that neither training nor generation accepts the model.
fn assert_refused(model: &Path, words: &[&str]) {
    let (ended, wrote) = trained(model);
    assert!(!wrote, "a refused run wrote something");
    let said = zeroth(&["generate", "--model", text(model), "--prompt-ids", "1,2", "--device", "cpu"]);
    for ended in [ended, said] {
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?} is not in: {}", ended.stderr);
        }
    }
}

#[test]
fn other_weight_formats_are_refused_with_a_remedy() {
    for names in [
        &["pytorch_model.bin"][..],
        &[
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
            "pytorch_model.bin.index.json",
        ],
        &["pytorch_model.bin.index.json"],
        &["consolidated.00.pth"],
        &["model.pt"],
        &["last.ckpt"],
        &["tf_model.h5"],
        &["flax_model.msgpack"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = config_only(folder.path());
        for name in names {
            fs::write(model.join(name), "weights").unwrap();
        }
        let convert = "save_pretrained(NEW_DIR, safe_serialization=True)";
        assert_refused(&model, &[&[convert, "download the model again"], names].concat());
    }
    let folder = tempfile::tempdir().unwrap();
    let model = config_only(folder.path());
    fs::write(model.join("m.Q4_K_M.gguf"), "GGUF").unwrap();
    assert_refused(&model, &["from_pretrained(DIR, gguf_file=\"m.Q4_K_M.gguf\")"]);
}

#[test]
fn an_index_without_its_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = config_only(folder.path());
    let index = r#"{"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}"#;
    fs::write(model.join("model.safetensors.index.json"), index).unwrap();
    assert_refused(&model, &["model-00001-of-00001.safetensors", "download the model again"]);
}

#[test]
fn incomplete_downloads_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cached = folder.path().join("models--owner--name");
    let snapshot = config_only(&cached.join("snapshots/0123abc"));
    assert_refused(&snapshot, &["a snapshot in the Hub's cache without weights: download the model again"]);

    fs::create_dir(cached.join("blobs")).unwrap();
    fs::write(cached.join("blobs/99ff.incomplete"), "half").unwrap();
    assert_refused(&snapshot, &["whose download was not finished (blobs/*.incomplete)"]);

    symlink("../../blobs/99ff", snapshot.join("model.safetensors")).unwrap();
    let link =
        "model.safetensors is a link to ../../blobs/99ff, which is not there: the download was not finished";
    assert_refused(&snapshot, &[link]);
}

#[test]
fn a_bare_config_trains_random_weights() {
    let folder = tempfile::tempdir().unwrap();
    let model = config_only(folder.path());
    // Optimizer state beside weights does not count.
    fs::write(model.join("training_args.bin"), "arguments").unwrap();
    let (ended, _) = trained(&model);
    ended.assert_done();
    let note = "note: the model folder has no weights: initialised randomly with seed 7\n";
    assert!(ended.stderr.contains(note), "{}", ended.stderr);
}
