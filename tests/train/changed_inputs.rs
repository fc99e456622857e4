//! Inputs that change during a run: the files read at start count, for restarted ranks too.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::running::{Running, signal};
use super::{cache, json as read_json, metrics, new_data, new_model, text};

/// Steps of a run, beyond those before a rank is killed.
const STEPS: usize = 300;

/// A config with a constant learning rate.
fn config(rate: f64) -> String {
    json!({
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "train_micro_batch_size_per_gpu": 1,
    })
    .to_string()
}

/// Starts a run of two ranks with one restart, and waits for its first checkpoint.
fn start(folder: &Path, program: &Path, config: &Path) -> Running {
    start_with(folder, program, config, &[])
}

fn start_with(folder: &Path, program: &Path, config: &Path, more: &[&str]) -> Running {
    let model = new_model(folder, 64, 2, 128, 256);
    fs::write(model.join("generation_config.json"), r#"{"top_k": 1}"#).unwrap();
    let data = new_data(folder, 50, 24, 256);
    let output = folder.join("run");
    let mut command = Command::new(program);
    command
        .args(["train", "--device", "cpu", "--threads-per-rank", "1", "--ranks", "2"])
        .args(["--model", text(&model), "--data", text(&data), "--output", text(&output)])
        .args(["--deepspeed", text(config), "--lr-scheduler-type", "constant", "--max-restarts", "1"])
        .args(["--max-steps", &STEPS.to_string(), "--save-steps", "50"])
        .args(more)
        .env("ZEROTH_CACHE", cache());
    let mut running = Running::spawn(folder, command);
    running.wait_for_steps(&output, 60);
    running
}

/// Kills a rank, and waits for the restarted run to finish.
fn killed_and_done(running: &mut Running) {
    signal(running.ranks()[1], "KILL");
    assert_eq!(running.code(), Some(0), "{}", running.said());
    assert!(running.said().contains("restarting (1 of 1) from step "), "{}", running.said());
}

#[test]
fn restarted_ranks_keep_the_original_config() {
    for edited in [config(0.5), "{ not JSON".to_owned()] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, config(0.001)).unwrap();
        let mut running = start(folder.path(), Path::new(env!("CARGO_BIN_EXE_zeroth")), &path);
        fs::write(&path, edited).unwrap();
        killed_and_done(&mut running);
        let metrics = metrics(&folder.path().join("run"));
        assert_eq!(metrics.len(), STEPS);
        let changed = metrics.iter().find(|line| line["lr"] != 0.001);
        assert!(changed.is_none(), "{changed:?}");
    }
}

#[test]
fn restarted_ranks_keep_the_original_config_of_the_teacher() {
    for edited in [None, Some("{ not JSON")] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, config(0.001)).unwrap();
        let other = folder.path().join("other");
        fs::create_dir(&other).unwrap();
        let teacher = new_model(&other, 32, 1, 64, 256);
        let flags = ["--teacher", text(&teacher), "--random-weights"];
        let program = Path::new(env!("CARGO_BIN_EXE_zeroth"));
        let mut running = start_with(folder.path(), program, &path, &flags);
        let of_teacher = teacher.join("config.json");
        let mut changed = read_json(&of_teacher);
        changed["rms_norm_eps"] = 0.25.into();
        fs::write(&of_teacher, edited.map_or_else(|| changed.to_string(), str::to_owned)).unwrap();
        killed_and_done(&mut running);
        assert_eq!(metrics(&folder.path().join("run")).len(), STEPS);
    }
}

#[test]
fn exports_keep_the_original_model_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, config(0.001)).unwrap();
    let mut running = start(folder.path(), Path::new(env!("CARGO_BIN_EXE_zeroth")), &path);
    let model = folder.path().join("new-model");
    let mut changed = read_json(&model.join("config.json"));
    let before = changed.clone();
    changed["max_position_embeddings"] = 17.into();
    fs::write(model.join("config.json"), changed.to_string()).unwrap();
    fs::write(model.join("generation_config.json"), r#"{"top_k": 99}"#).unwrap();
    fs::write(model.join("tokenizer_config.json"), "{}").unwrap();
    killed_and_done(&mut running);
    let run = folder.path().join("run");
    for out in [format!("checkpoints/step-{STEPS}/model"), "model".to_owned()].map(|out| run.join(out)) {
        let config = read_json(&out.join("config.json"));
        assert_eq!(config["max_position_embeddings"], before["max_position_embeddings"], "{}", out.display());
        assert_eq!(read_json(&out.join("generation_config.json"))["top_k"], 1, "{}", out.display());
        assert!(!out.join("tokenizer_config.json").exists(), "{}", out.display());
    }
}

#[test]
fn restarted_ranks_keep_the_original_binary() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, config(0.001)).unwrap();
    let program = folder.path().join("zeroth");
    fs::copy(env!("CARGO_BIN_EXE_zeroth"), &program).unwrap();
    let mut running = start(folder.path(), &program, &path);
    // As installers do: a new file under the same name.
    let newer = folder.path().join("newer");
    fs::copy("/bin/false", &newer).unwrap();
    fs::rename(&newer, &program).unwrap();
    killed_and_done(&mut running);
    assert_eq!(metrics(&folder.path().join("run")).len(), STEPS);
}
