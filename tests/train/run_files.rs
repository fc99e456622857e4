//! `--config`: flags in a YAML or JSON file.

use std::fs;
use std::path::{Path, PathBuf};

use super::{json, metrics, new_data, new_model, number, text, written};
use crate::common::{Ended, zeroth, zeroth_in};

/// Writes a run file and trains with it.
fn try_file(folder: &Path, name: &str, contents: &str, more: &[&str]) -> Ended {
    let file = folder.join(name);
    fs::write(&file, contents).unwrap();
    let ended = zeroth(&[&["train", "--config", text(&file)], more].concat());
    assert!(ended.is_orderly(), "{contents}: {}", ended.stderr);
    ended
}

fn tiny(folder: &Path) -> (PathBuf, PathBuf) {
    (new_model(folder, 16, 1, 16, 32), new_data(folder, 8, 6, 32))
}

#[test]
fn a_run_file_trains_as_the_same_flags_do() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = tiny(folder.path());
    let more = written(folder.path(), "more.jsonl", &["{\"input_ids\": [3, 1, 4, 1, 5]}"]);
    let flags = [
        "--model",
        text(&model),
        "--data",
        text(&data),
        text(&more),
        "--device",
        "cpu",
        "--ranks",
        "2",
        "--threads-per-rank",
        "1",
        "--learning-rate",
        "1e-2",
        "--max-steps",
        "3",
        "--fp32",
        "--shuffle",
        "false",
        "--lr-scheduler-type",
        "cosine_with_min_lr",
        "--lr-scheduler-kwargs",
        r#"{"min_lr": 1e-3}"#,
    ];
    let typed = folder.path().join("typed");
    zeroth(&[&["train", "--output", text(&typed)], &flags[..]].concat()).assert_done();
    let lines = format!(
        "# a comment\nmodel: {}\ndata:\n  - {}\n  - {}\ndevice: cpu\nranks: 2\nthreads-per-rank: 1\nlearning_rate: 1e-2\n\
         max_steps: 7\nfp32: true\nshuffle: False\nlr_scheduler_type: 'cosine_with_min_lr'\n\
         lr_scheduler_kwargs:\n  min_lr: 1e-3\nreport_to: none\nresume: null\ndataloader_num_workers: 4\n",
        text(&model),
        text(&data),
        text(&more)
    );
    // Typed flags win, by any of their names.
    let output = folder.path().join("yaml");
    let ended =
        try_file(folder.path(), "run.yaml", &lines, &["--max_steps", "3", "--output_dir", text(&output)]);
    ended.assert_done();
    assert!(ended.stderr.contains("note: --dataloader-num-workers has no effect"), "{}", ended.stderr);
    let json_file = serde_json::json!({
        "model": text(&model), "dataset": [text(&data), text(&more)], "device": "cpu", "ranks": 2, "threads_per_rank": 1,
        "learning_rate": 1e-2, "max_steps": 3, "bf16": true, "shuffle": false, "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-3}, "output": text(&folder.path().join("json")),
        "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}},
    });
    // A precision typed replaces another one of the file.
    try_file(folder.path(), "run.json", &json_file.to_string(), &["--fp32"]).assert_done();
    // A pipe can be read once: ranks get the flags that the launcher has read.
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let piped = folder.path().join("piped");
    std::thread::scope(|scope| {
        scope.spawn(|| fs::write(&pipe, &lines).unwrap());
        let ended = zeroth(&["train", "--config", text(&pipe), "--max_steps", "3", "--output", text(&piped)]);
        ended.assert_done();
    });
    let losses = |run: &str| -> Vec<f64> {
        metrics(&folder.path().join(run)).iter().map(|line| number(&line["loss"])).collect()
    };
    assert_eq!(losses("typed"), losses("yaml"));
    assert_eq!(losses("typed"), losses("json"));
    assert_eq!(losses("typed"), losses("piped"));
    assert_eq!(json(&typed.join("config.json")), json(&output.join("config.json")));
}

#[test]
fn relative_paths_start_at_the_working_directory() {
    let folder = tempfile::tempdir().unwrap();
    tiny(folder.path());
    fs::create_dir(folder.path().join("runs")).unwrap();
    let lines = ["model: new-model", "data: rows.jsonl", "device: cpu", "output: out", "dry_run: true"];
    written(&folder.path().join("runs"), "run.yaml", &lines);
    let ended = zeroth_in(folder.path(), &["train", "--config=runs/run.yaml"]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn config_resolve_reads_the_flags_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [
        "learning_rate: 3e-4",
        "warmup_ratio: 0.1",
        "max_steps: 50",
        "data: nowhere.jsonl",
        "output: nowhere",
    ];
    let file = written(folder.path(), "run.yaml", &lines);
    let arguments =
        ["config", "resolve", "zero3", "--model", "examples/gsm8k/tiny-qwen3", "--config", text(&file)];
    let ended = zeroth(&[&arguments[..], &["--learning-rate", "1e-3"]].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout.contains("0.001") && !ended.stdout.contains("0.0003"), "{}", ended.stdout);
    assert!(ended.stdout.contains("--warmup-ratio"), "{}", ended.stdout);
}

#[test]
fn wrong_files_are_refused_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let many = format!("data: [{}1{}]", "[".repeat(40), "]".repeat(40));
    for (contents, expected) in [
        (
            "model: x\nlerning_rate: 1\nrlhf_type: dpo\n",
            &[
                "run.yaml: line 2, column 1: `zeroth train` has no flag for the key lerning_rate: did you mean `learning_rate`?",
                "run.yaml: line 3, column 1: --rlhf_type is not yet built",
            ][..],
        ),
        ("frobnicate: 1\n", &["line 1, column 1: `zeroth train` has no flag for the key frobnicate"]),
        ("seed: 1\nmodel: x\nseed: 2\n", &["line 3, column 1: `seed` is there already, in line 1, column 1"]),
        ("data: a\ndataset: b\n", &["line 2, column 1: `dataset` is there already"]),
        ("learning_rate: fast\n", &["line 1, column 16: `learning_rate`: ", "is not a number"]),
        ("bf16: 3\n", &["line 1, column 7: `bf16`"]),
        ("bf16: [true]\n", &["line 1, column 7: `bf16` holds a list; it takes true or false"]),
        ("seed: [1, 2]\n", &["line 1, column 7: `seed` holds a list; it takes a single value"]),
        ("seed:\n  a: 1\n", &["line 2, column 3: `seed` holds an object"]),
        ("data:\n  - {a: 1}\n", &["line 2, column 5: `data` holds an object in its list"]),
        ("data: []\n", &["line 1, column 7: `data` is an empty list"]),
        ("push_to_hub: true\n", &["line 1, column 14: `push_to_hub`: ", "connects to no service"]),
        ("config: other.yaml\n", &["line 1, column 1: a run file cannot name another one"]),
        ("- 1\n- 2\n", &["line 1, column 1: this is a list; a run file is an object of flags"]),
        ("train\n", &["line 1, column 1: this is a single value"]),
        ("", &["the file is empty"]),
        ("# nothing\n", &["the file is empty"]),
        ("a: \"open\n", &["line 1, column 4", "a run file is YAML or JSON"]),
        ("seed: &s 1\ndata_seed: *s\n", &["line 2, column 12: references"]),
        ("seed: 1\n---\nseed: 2\n", &["line 2, column 1: a run file is one document"]),
        ("{\"seed\": 1,\n \"seed\": 2}", &["line 2, column 2: `seed` is there already"]),
        (&many, &["nested too deeply"]),
    ] {
        let ended = try_file(folder.path(), "run.yaml", contents, &[]);
        assert_eq!(ended.code, 2, "{contents}: {}", ended.stderr);
        assert!(ended.stdout.is_empty());
        for part in expected {
            assert!(ended.stderr.contains(part), "{contents}: {part}: {}", ended.stderr);
        }
    }
    fs::write(folder.path().join("bytes.yaml"), [0xff, 0xfe, 0x00]).unwrap();
    fs::write(folder.path().join("large.yaml"), "#".repeat((1 << 20) + 1)).unwrap();
    for (name, word) in [
        ("missing.yaml", "cannot read it"),
        ("", "cannot read it"),
        ("bytes.yaml", "not UTF-8"),
        ("large.yaml", "more than 1 MiB"),
    ] {
        let file = folder.path().join(name);
        let ended = zeroth(&["train", "--config", text(&file)]);
        assert_eq!(ended.code, 2, "{name}: {}", ended.stderr);
        assert!(
            ended.stderr.contains("--config ") && ended.stderr.contains(word),
            "{name}: {}",
            ended.stderr
        );
    }
    // Without a file name the parser explains, and flags that are missing in both are named.
    assert!(zeroth(&["train", "--config"]).stderr.contains("--config"));
    let ended = try_file(folder.path(), "run.yaml", "seed: 1\n", &["--output", "x"]);
    assert!(
        ended.code == 2 && ended.stderr.contains("--data") && ended.stderr.contains("--model"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_run_file_in_the_output_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = tiny(folder.path());
    let output = folder.path().join("run");
    let flags =
        ["--model", text(&model), "--data", text(&data), "--output", text(&output), "--device", "cpu"];
    zeroth(&[&["train", "--max-steps", "1"], &flags[..]].concat()).assert_done();
    // A name that overwriting removes.
    let file = output.join("plan.json");
    fs::write(&file, "{\"max_steps\": 1}").unwrap();
    let ended = zeroth(&[&["train", "--config", text(&file), "--overwrite-output-dir"], &flags[..]].concat());
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("--config"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"max_steps\": 1}");
}

#[test]
fn keys_of_an_axolotl_file_are_answered_with_ours() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "base_model: x\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\nsequence_len: 4096\nsample_packing: true\n\
                 micro_batch_size: 2\nnum_epochs: 3\nlr_scheduler: cosine\noptimizer: adamw_torch\nval_set_size: 0.1\n\
                 bf16: auto\nflash_attention: true\nadapter: qlora\nlora_r: 8\n";
    let ended = try_file(folder.path(), "axolotl.yaml", lines, &[]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    for (key, answer) in [
        ("base_model", "write `model`"),
        ("datasets", "write `data`"),
        ("sequence_len", "write `max_length`"),
        ("sample_packing", "write `packing`"),
        ("micro_batch_size", "write `per_device_train_batch_size`"),
        ("num_epochs", "write `num_train_epochs`"),
        ("lr_scheduler", "write `lr_scheduler_type`"),
        ("optimizer", "write `optim`"),
        ("val_set_size", "write `split_dataset_ratio`"),
        ("flash_attention", "leave it out: attention is one fused kernel"),
    ] {
        let is_it =
            |line: &&str| line.contains(&format!("no flag for the key {key}: ")) && line.ends_with(answer);
        assert!(ended.stderr.lines().any(|line| is_it(&line)), "{key}: {}", ended.stderr);
    }
    assert!(ended.stderr.contains("leave it out: runs are in bf16"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("lora_r") && !ended.stderr.contains("qlora"), "{}", ended.stderr);
}
