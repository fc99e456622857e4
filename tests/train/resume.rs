//! Resuming with any number of ranks and any stage, in the same data order, and bit-identical if nothing else changed.

use std::fs;
use std::path::{Path, PathBuf};

use super::{golden, json, metrics, number, text, train, train_on, written};

/// Trains a golden model with a batch of 12, shuffled, in fp32.
fn trained(run: &Path, more: &[&str]) {
    let flags = ["--shuffle", "true", "--fp32", "--learning-rate", "3e-3", "--save-steps", "5"];
    train("qwen3-tied", run, &[&flags, more].concat()).assert_done();
}

fn losses(run: &Path) -> Vec<(u64, f64)> {
    metrics(run).iter().map(|line| (line["step"].as_u64().unwrap(), number(&line["loss"]))).collect()
}

/// The weights of a run's model, byte by byte.
fn model(run: &Path) -> Vec<u8> {
    fs::read(run.join("model/model.safetensors")).unwrap()
}

#[test]
fn resuming_works_across_ranks_and_stages() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let batch = ["--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "3"];
    trained(
        &at("whole"),
        &[&batch[..], &["--ranks", "2", "--deepspeed", "zero3", "--max-steps", "20"]].concat(),
    );
    let whole = losses(&at("whole"));
    // The schedule knows the whole length from the start: stops come from outside, as a limit of steps would change it.
    let parts = [("2", "zero3", 5), ("1", "zero2", 10), ("3", "zero3_offload", 15), ("2", "zero1", 20)];
    let mut from: Option<PathBuf> = None;
    for (ranks, preset, until) in parts {
        let run = at(&format!("until-{until}"));
        let mut flags = vec!["--ranks", ranks, "--deepspeed", preset, "--max-steps", "20"];
        match &from {
            None => flags.extend(batch),
            Some(from) => flags.extend(["--resume", text(from)]),
        }
        trained(&run, &flags);
        let found = losses(&run);
        let first = until - 5 + 1;
        assert_eq!(found[0].0, first, "the file starts at the next step");
        for (step, loss) in &found {
            let expected = whole[*step as usize - 1].1;
            assert!((loss - expected).abs() < 1e-3, "step {step} on {ranks} of {preset}: {loss}, {expected}");
        }
        from = Some(run.join(format!("checkpoints/step-{until}")));
    }
}

#[test]
fn resuming_is_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    // Three moments, stochastically rounded, and schedules that go on.
    let ademamix = serde_json::json!({
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "zeroth": {"moments": "bf16"},
        "optimizer": {"type": "AdEMAMix", "params": {"t_alpha": 10, "t_beta3": 10, "weight_decay": 0.1}},
    });
    let ademamix = written(folder.path(), "ds.json", &[ademamix.to_string()]);
    for (name, precision, config) in [
        ("bf16", "--bf16", "zero3"),
        ("fp16", "--fp16", "zero3"),
        ("fp32", "--fp32", "zero3"),
        ("ademamix", "--bf16", text(&ademamix)),
    ] {
        let at = |what: &str| folder.path().join(format!("{name}-{what}"));
        let flags =
            ["--ranks", "2", "--deepspeed", config, precision, "--shuffle", "true", "--max-steps", "12"];
        let run = |output: &Path, more: &[&str]| {
            train("llama-one-kv-head", output, &[&flags[..], &["--save-steps", "4"], more].concat())
                .assert_done();
        };
        run(&at("whole"), &[]);
        let from = at("whole").join("checkpoints/step-4");
        run(&at("rest"), &["--resume", text(&from)]);
        assert_eq!(losses(&at("whole"))[4..], losses(&at("rest"))[..], "{name}");
        assert_eq!(model(&at("whole")), model(&at("rest")), "{name}");
        let part = |run: &str, rank: u32| {
            fs::read(at(run).join(format!("checkpoints/step-12/rank-0000{rank}-of-00002.safetensors")))
                .unwrap()
        };
        for rank in 0..2 {
            assert_eq!(part("whole", rank), part("rest", rank), "{name}: the state of rank {rank}");
        }
    }
}

#[test]
fn decoupled_saving_is_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    let run = |decoupled: bool| {
        let config = serde_json::json!({
            "zero_optimization": {"stage": 3}, "checkpoint": {"writer": {"decoupled": decoupled}},
        });
        let config = written(folder.path(), "ds.json", &[config.to_string()]);
        let output = folder.path().join(format!("decoupled-{decoupled}"));
        let flags = ["--ranks", "2", "--deepspeed", text(&config), "--max-steps", "9", "--save-steps", "2"];
        let ended = train("llama-one-kv-head", &output, &flags);
        ended.assert_done();
        assert_eq!(ended.stderr.matches(" · saved").count(), 5, "{}", ended.stderr);
        output
    };
    let (beside, before) = (run(true), run(false));
    assert_eq!(losses(&beside), losses(&before));
    assert_eq!(model(&beside), model(&before));
    for step in [2, 4, 6, 8, 9] {
        for rank in 0..2 {
            let part = format!("checkpoints/step-{step}/rank-0000{rank}-of-00002.safetensors");
            assert_eq!(
                fs::read(beside.join(&part)).unwrap(),
                fs::read(before.join(&part)).unwrap(),
                "{part}"
            );
        }
    }
    assert_eq!(fs::read_to_string(beside.join("checkpoints/latest")).unwrap().trim(), "step-9");
}

#[test]
fn a_complete_run_is_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    trained(&run, &["--max-steps", "3"]);
    let before: Vec<_> = fs::read_dir(&run)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().modified())
        .map(Result::unwrap)
        .collect();
    let flags = ["--shuffle", "true", "--fp32", "--max-steps", "3", "--resume", "auto"];
    let ended = train("qwen3-tied", &run, &flags);
    ended.assert_done();
    assert!(ended.stderr.contains("this run is already complete (3 steps"), "{}", ended.stderr);
    let after: Vec<_> = fs::read_dir(&run)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().modified())
        .map(Result::unwrap)
        .collect();
    assert_eq!(before, after);
}

#[test]
fn auto_starts_fresh_and_skips_damaged_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    trained(&run, &["--max-steps", "12", "--resume", "auto"]);
    let whole = losses(&run);
    // A flipped bit in the newest, and a half-written line as a kill leaves it.
    let part = run.join("checkpoints/step-12/rank-00000-of-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&part, bytes).unwrap();
    let torn = fs::read_to_string(run.join("metrics.jsonl")).unwrap() + r#"{"step": 13, "lo"#;
    fs::write(run.join("metrics.jsonl"), torn).unwrap();
    let kept = model(&run);
    fs::remove_dir_all(run.join("model")).unwrap();
    let flags =
        ["--shuffle", "true", "--fp32", "--learning-rate", "3e-3", "--save-steps", "5", "--max-steps", "12"];
    let ended = train("qwen3-tied", &run, &[&flags[..], &["--resume", "auto"]].concat());
    ended.assert_done();
    assert!(ended.stderr.contains("step-12 was skipped"), "{}", ended.stderr);
    assert!(ended.stderr.contains("after 10 of 12 steps"), "{}", ended.stderr);
    assert_eq!(losses(&run), whole, "each step appears once");
    assert_eq!(model(&run), kept);
}

#[test]
fn invalid_resumes_are_refused_with_alternatives() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let batch = ["--per-device-train-batch-size", "3", "--gradient-accumulation-steps", "2"];
    train("qwen3-tied", &run, &[&batch[..], &["--ranks", "2", "--max-steps", "2"]].concat()).assert_done();
    let refused = |model: &str, flags: &[&str], words: &[&str]| {
        let ended = train(model, &folder.path().join("new"), &[&["--resume", text(&run)], flags].concat());
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        for words in words {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
    };
    refused(
        "qwen3-tied",
        &["--ranks", "5"],
        &["12 samples per step", "5 ranks cannot share", "1, 2, 3, 4, 6, 12 can"],
    );
    refused(
        "qwen3-tied",
        &["--ranks", "2", "--per-device-train-batch-size", "4"],
        &["train_micro_batch_size_per_gpu 4 on 2 ranks", "1 × 6, 2 × 3, 3 × 2, 6 × 1"],
    );
    refused("llama-one-kv-head", &["--ranks", "2"], &["another model"]);
    let rows = written(folder.path(), "rows.jsonl", &[r#"{"input_ids": [1, 2, 3]}"#]);
    let other = train_on(
        &golden("qwen3-tied"),
        &rows,
        &folder.path().join("new"),
        &["--resume", text(&run), "--ranks", "2"],
    );
    assert_eq!(other.code, 2, "{}", other.stderr);
    assert!(other.stderr.contains("trained on other data"), "{}", other.stderr);
    let nothing = train("qwen3-tied", &folder.path().join("new"), &["--resume", text(folder.path())]);
    assert_eq!(nothing.code, 2, "{}", nothing.stderr);
    assert!(nothing.stderr.contains("no valid checkpoint found"), "{}", nothing.stderr);
    assert!(!folder.path().join("new").exists(), "a refusal leaves nothing behind");
}

#[test]
fn save_limits_keep_the_newest_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    trained(&run, &["--max-steps", "22", "--save-total-limit", "2"]);
    let mut names: Vec<String> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["latest", "step-20", "step-22"]);
    let none = folder.path().join("none");
    train("qwen3-tied", &none, &["--max-steps", "3", "--save-steps", "0"]).assert_done();
    assert!(!none.join("checkpoints").exists());
    let manifest = json(&run.join("checkpoints/step-22/manifest.json"));
    assert_eq!((&manifest["step"], &manifest["samples_seen"]), (&22.into(), &22.into()));
}
