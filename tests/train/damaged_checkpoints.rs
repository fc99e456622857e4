//! Damaged checkpoints: a run does not start over on top of them, nor reports them as its own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{json, metrics, text, train};
use crate::common::Ended;

fn go_on(run: &Path, more: &[&str]) -> Ended {
    train("qwen3-tied", run, &[&["--save-steps", "2", "--resume", "auto"], more].concat())
}

/// Flips a bit in the weights of a step.
fn damage(run: &Path, step: u64) {
    let part = run.join(format!("checkpoints/step-{step}/rank-00000-of-00001.safetensors"));
    let mut bytes = fs::read(&part).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&part, bytes).unwrap();
}

#[test]
fn auto_does_not_start_over_on_damaged_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    go_on(&run, &["--max-steps", "4"]).assert_done();
    let before = (
        fs::read(run.join("metrics.jsonl")).unwrap(),
        fs::read(run.join("model/model.safetensors")).unwrap(),
    );
    damage(&run, 4);
    fs::write(run.join("checkpoints/step-2/manifest.json"), "{}").unwrap();
    let refused = |words: &[&str]| {
        let ended = go_on(&run, &["--max-steps", "8"]);
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        for words in words.iter().chain(&["--overwrite-output-dir"]) {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        let after = (
            fs::read(run.join("metrics.jsonl")).unwrap(),
            fs::read(run.join("model/model.safetensors")).unwrap(),
        );
        assert!(after == before, "metrics and model are as they were");
    };
    refused(&["step-4 was skipped: ", "is damaged", "step-2 was skipped: ", "manifest.json is invalid"]);
    // An unmounted disk, and no folder at all.
    let aside = folder.path().join("aside");
    fs::rename(run.join("checkpoints"), &aside).unwrap();
    symlink(folder.path().join("not-mounted"), run.join("checkpoints")).unwrap();
    refused(&["checkpoints cannot be read", "No such file"]);
    fs::remove_file(run.join("checkpoints")).unwrap();
    fs::create_dir(run.join("checkpoints")).unwrap();
    symlink(folder.path().join("not-mounted"), run.join("checkpoints/step-4")).unwrap();
    refused(&["step-4 was skipped: "]);
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    fs::write(run.join("checkpoints"), "").unwrap();
    refused(&["checkpoints cannot be read", "Not a directory"]);
    fs::remove_file(run.join("checkpoints")).unwrap();
    // Starting over is possible on request, and without checkpoints auto starts fresh.
    fs::rename(&aside, run.join("checkpoints")).unwrap();
    let anew =
        train("qwen3-tied", &run, &["--max-steps", "3", "--overwrite-output-dir", "--save-steps", "0"]);
    anew.assert_done();
    go_on(&run, &["--max-steps", "2"]).assert_done();
    assert_eq!(metrics(&run).len(), 2);
}

/// Root can read everything, so another user runs this.
#[test]
fn auto_does_not_start_over_on_unreadable_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    go_on(&run, &["--max-steps", "2"]).assert_done();
    let owned = Command::new("chown").args(["-R", "65534:65534", text(folder.path())]).status();
    if !owned.is_ok_and(|status| status.success()) {
        println!("skipped: another user needs root");
        return;
    }
    let mode = |mode: &str, name: &str| {
        let path = run.join(name);
        assert!(Command::new("chmod").args([mode, text(&path)]).status().unwrap().success());
    };
    let program = folder.path().join("zeroth");
    fs::copy(env!("CARGO_BIN_EXE_zeroth"), &program).unwrap();
    for name in ["config.json", "model.safetensors", "data.jsonl"] {
        fs::copy(super::golden("qwen3-tied").join(name), folder.path().join(name)).unwrap();
    }
    assert!(Command::new("chmod").args(["-R", "a+rX", text(folder.path())]).status().unwrap().success());
    let before = fs::read(run.join("metrics.jsonl")).unwrap();
    for (mode_, name) in [("000", "checkpoints"), ("444", "checkpoints"), ("000", "checkpoints/step-2")] {
        mode(mode_, name);
        let ended = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&program)
            .args(["train", "--device", "cpu", "--model", ".", "--data", "data.jsonl", "--output", "run"])
            .args(["--max-steps", "4", "--resume", "auto"])
            .current_dir(folder.path())
            .env("ZEROTH_CACHE", folder.path().join("cache"))
            .output()
            .unwrap();
        mode("755", name);
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{mode_} {name}: {said}");
        assert!(said.contains("Permission denied") && said.contains("--overwrite-output-dir"), "{said}");
        assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), before);
    }
}

/// Writes a modified manifest with a matching checksum.
pub(super) fn forge(step: &Path, change: impl Fn(&mut Value)) {
    let path = step.join("manifest.json");
    let mut manifest = json(&path);
    change(&mut manifest);
    fs::write(&path, serde_json::to_string_pretty(&manifest).unwrap()).unwrap();
    let output = Command::new("sha256sum").arg(&path).output().unwrap();
    let hash = &String::from_utf8(output.stdout).unwrap()[..64];
    let sums = fs::read_to_string(step.join("SHA256SUMS")).unwrap();
    fs::write(step.join("SHA256SUMS"), format!("{hash}{}", &sums[64..])).unwrap();
}

#[test]
fn implausible_manifest_numbers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    go_on(&run, &["--max-steps", "2"]).assert_done();
    let step = run.join("checkpoints/step-2");
    let (manifest, sums) =
        (fs::read(step.join("manifest.json")).unwrap(), fs::read(step.join("SHA256SUMS")).unwrap());
    for (pointer, words) in
        [("/batch/train_batch_size", "`batch.train_batch_size` is 46116860"), ("/step", "`step` is 46116860")]
    {
        forge(&step, |manifest| *manifest.pointer_mut(pointer).unwrap() = (1_u64 << 62).into());
        for ranks in ["1", "3"] {
            let begun = Instant::now();
            let ended = go_on(&run, &["--max-steps", "4", "--ranks", ranks]);
            assert_eq!(ended.code, 2, "{}", ended.stderr);
            assert!(ended.stderr.contains(words), "{}", ended.stderr);
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        }
        fs::write(step.join("manifest.json"), &manifest).unwrap();
        fs::write(step.join("SHA256SUMS"), &sums).unwrap();
    }
    fs::rename(&step, run.join("checkpoints/step-9")).unwrap();
    let ended = go_on(&run, &["--max-steps", "4"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("its `step` is 2, but its folder is step-9"), "{}", ended.stderr);
}

#[test]
fn the_summary_names_the_runs_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    go_on(&run, &["--max-steps", "8"]).assert_done();
    for step in [6, 8] {
        damage(&run, step);
    }
    let newest = |ended: &Ended| {
        ended.assert_done();
        let line = ended.stderr.lines().find(|line| line.starts_with("newest checkpoint in ")).unwrap();
        let said = Path::new(line).file_name().unwrap().to_str().unwrap().to_owned();
        let found: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert!(found["checkpoint"].as_str().unwrap().ends_with(&format!("/{said}")), "{found}");
        said
    };
    // Nothing is saved, so the resumed one is named. Damaged ones of later and earlier steps are not.
    let flags = ["--max-steps", "7", "--format", "json"];
    let nothing =
        train("qwen3-tied", &run, &[&["--resume", "auto", "--save-steps", "0"], &flags[..]].concat());
    assert!(nothing.stderr.contains("step-8 was skipped"), "{}", nothing.stderr);
    assert_eq!(newest(&nothing), "step-4");
    // Step 6 is written again, and step 7 for the first time.
    assert_eq!(newest(&go_on(&run, &flags)), "step-7");
}
