//! Ranks in groups: the keys of a config, runs of ranks as processes, and checkpoints that keep the groups.

use std::fs;
use std::path::{Path, PathBuf};

use super::damaged_checkpoints::forge;
use super::{json, text, train, written};

/// A config of stage 3 with these keys.
fn config(folder: &Path, name: &str, hpz: Option<u64>, sum_group: Option<u64>) -> PathBuf {
    let mut zero = serde_json::json!({ "stage": 3 });
    if let Some(size) = hpz {
        zero["zero_hpz_partition_size"] = size.into();
    }
    let mut config = serde_json::json!({ "zero_optimization": zero, "bf16": { "enabled": "auto" } });
    if let Some(group) = sum_group {
        config["zeroth"] = serde_json::json!({ "sum_group": group });
    }
    written(folder, &format!("{name}.json"), &[config.to_string()])
}

/// Trains on four ranks.
fn run(output: &Path, config: &Path, more: &[&str]) -> String {
    let flags = [
        "--ranks",
        "4",
        "--deepspeed",
        text(config),
        "--bf16",
        "--learning-rate",
        "3e-3",
        "--max-steps",
        "8",
    ];
    let ended = train("qwen3-tied", output, &[&flags[..], &["--save-steps", "4"], more].concat());
    ended.assert_done();
    ended.stderr
}

fn model(run: &Path) -> Vec<u8> {
    fs::read(run.join("model/model.safetensors")).unwrap()
}

#[test]
fn a_checkpoint_keeps_its_groups_and_hpz_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let plain = config(folder.path(), "plain", None, None);
    let groups = config(folder.path(), "groups", None, Some(2));
    let hpz = config(folder.path(), "hpz", Some(2), None);
    run(&at("flat"), &plain, &[]);
    run(&at("groups"), &groups, &[]);
    run(&at("hpz"), &hpz, &[]);
    assert_eq!(model(&at("groups")), model(&at("hpz")));
    let group = |run: &str, step: u64| {
        json(&at(run).join(format!("checkpoints/step-{step}/manifest.json")))["group"].clone()
    };
    assert_eq!([group("flat", 4), group("groups", 4)], [serde_json::Value::Null, 2.into()]);
    // A config that leaves the groups open keeps those of the checkpoint: the bits are those of the whole run.
    let from = at("groups").join("checkpoints/step-4");
    run(&at("rest"), &plain, &["--resume", text(&from)]);
    assert_eq!(model(&at("rest")), model(&at("groups")));
    assert_eq!(group("rest", 8), 2);
    // With other ranks they are not kept, which is said where they could not be.
    let flags =
        ["--ranks", "1", "--deepspeed", text(&plain), "--bf16", "--max-steps", "8", "--resume", text(&from)];
    let said = train("qwen3-tied", &at("one"), &flags);
    said.assert_done();
    assert!(said.stderr.contains("in groups of 2, which 1 rank cannot be"), "{}", said.stderr);
    forge(&from, |manifest| manifest["group"] = 3.into());
    let flags =
        ["--ranks", "4", "--deepspeed", text(&plain), "--bf16", "--max-steps", "8", "--resume", text(&from)];
    let refused = train("qwen3-tied", &at("forged"), &flags);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("`group` is 3, and 4 ranks cannot be groups of 3"), "{}", refused.stderr);
}

#[test]
fn groups_that_ranks_cannot_form_are_refused_before_data_is_read() {
    let folder = tempfile::tempdir().unwrap();
    for (name, hpz, sum_group, words) in [
        ("three", Some(3), None, "zero_hpz_partition_size is 3, and 4 ranks cannot be groups of 3"),
        (
            "eight",
            Some(8),
            None,
            "4 ranks cannot be groups of 8: write a divisor of 4 (2 or 4), or leave the key out",
        ),
        ("sums", None, Some(3), "zeroth.sum_group is 3, and 4 ranks cannot be groups of 3"),
    ] {
        let config = config(folder.path(), name, hpz, sum_group);
        let output = folder.path().join("run");
        let refused =
            train("qwen3-tied", &output, &["--ranks", "4", "--deepspeed", text(&config), "--max-steps", "2"]);
        assert_eq!(refused.code, 2, "{}", refused.stderr);
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
        assert!(!output.join("metrics.jsonl").exists());
    }
}
