//! Invalid input: every error has a message and an exit code, and nothing panics.

use crate::common::{model, root, zeroth, zeroth_in, zeroth_json};

#[test]
fn invalid_arguments_exit_with_2() {
    for (arguments, phrase) in [
        (vec!["plan"], "--model"),
        (vec!["plan", "--params", "8X"], "unit `X`"),
        (vec!["plan", "--params", "-8B"], "negative"),
        (vec!["plan", "--params", "1e999"], "larger than"),
        (vec!["plan", "--params", "8B", "--ranks", "0"], "0"),
        (vec!["plan", "--params", "8B", "--device-memory", "lots"], "not a size"),
        (vec!["plan", "--params", "8B", "--deepspeed", "zero4"], "did you mean the preset"),
        (vec!["plan", "--params", "8B", "--card", "H1000"], "H100"),
        (vec!["plan", "--params", "8B", "--fp32"], "not yet"),
        (vec!["plan", "--params", "8B", "--bf16", "--fp16"], "one precision"),
        (vec!["plan", "--model", "no/such/folder"], "there is no"),
        (vec!["plan", "--model", "docs"], "no config.json"),
        (vec!["config", "explain", "stage3_max_resue_distance"], "did you mean"),
        (vec!["config", "presets", "zero5"], "did you mean"),
        (vec!["config", "resolve", "zero3"], "hidden_size"),
        (vec!["config", "resolve", "zero2", "--max-length", "5"], "not yet"),
        (vec!["config", "resolve", "no-such-file.json"], "there is no such file"),
        (vec!["config", "check", "docs"], "folder"),
        (vec!["config", "new", "--stage", "4"], "4"),
        (vec!["config", "new", "--micro-batch-size", "0"], "0"),
        (vec!["config", "new", "--stage3-prefetch-bucket-size", "many"], "--stage3-prefetch-bucket-size"),
        (vec!["train", "--model", "x"], "--data"),
        (
            vec!["train", "--model", "x", "--data", "y", "--output", "z", "--train-type", "lora"],
            "there is no",
        ),
        (vec!["checkpoint", "import", "x"], "not yet"),
        (vec!["frobnicate"], "frobnicate"),
    ] {
        let ended = zeroth(&arguments);
        assert_eq!(ended.code, 2, "{arguments:?}\n{}{}", ended.stdout, ended.stderr);
        assert!(ended.stderr.contains(phrase), "{arguments:?} should say `{phrase}`:\n{}", ended.stderr);
        assert!(ended.is_orderly(), "{}", ended.stderr);
    }
}

#[test]
fn invalid_model_folders_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let write = |text: &str| std::fs::write(folder.path().join("config.json"), text).unwrap();
    let plan = || zeroth(&["plan", "--model", folder.path().to_str().unwrap(), "--ranks", "2"]);
    for (text, phrase) in [
        ("{\"model_type\": \"llamma\"}", "llama"),
        ("{\"model_type\": \"gpt_bigcode\"}", "gpt_bigcode"),
        ("{\"model_type\": ", "line 1"),
        ("[]", "object"),
    ] {
        write(text);
        let ended = plan();
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        assert!(ended.stderr.contains(phrase), "{text} should say `{phrase}`:\n{}", ended.stderr);
    }
}

#[test]
fn flags_accept_both_spellings_and_the_last_wins() {
    let model = model("Qwen3-0.6B");
    let (_, dashes) =
        zeroth_json(&["plan", "--model", &model, "--per-device-train-batch-size", "4", "--ranks", "2"]);
    let (_, underscores) = zeroth_json(&[
        "plan",
        "--model_name_or_path",
        &model,
        "--per_device_train_batch_size=4",
        "--num_gpus",
        "8",
        "--nproc_per_node",
        "2",
    ]);
    assert_eq!(dashes["rows"], underscores["rows"]);
}

#[test]
fn every_command_has_help_and_completions() {
    for command in [
        vec!["train"],
        vec!["plan"],
        vec!["config"],
        vec!["config", "new"],
        vec!["config", "tiers"],
        vec!["config", "presets"],
        vec!["config", "check"],
        vec!["config", "resolve"],
        vec!["config", "explain"],
        vec!["config", "verify"],
        vec!["config", "schema"],
        vec!["init"],
        vec!["bench"],
        vec!["doctor"],
        vec!["monitor"],
        vec!["completions"],
    ] {
        let ended = zeroth(&[&command[..], &["--help"]].concat());
        assert_eq!(ended.code, 0, "{command:?}");
        if command != ["config"] {
            assert!(ended.stdout.contains("Example"), "{command:?} has no example:\n{}", ended.stdout);
        }
    }
    assert!(zeroth(&["completions", "bash"]).stdout.contains("zeroth"));
}

#[test]
fn the_first_command_of_the_readme_resolves() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let joined = readme.replace("\\\n", " ");
    let line = joined.lines().find(|line| line.contains("cargo run --release -- train")).unwrap();
    let (_, typed) = line.split_once(" -- ").unwrap();
    let (typed, _) = typed.split_once(" && ").unwrap_or((typed, ""));
    let arguments: Vec<&str> = typed.split_whitespace().collect();
    let ended = zeroth(&[&arguments[..], &["--dry-run"]].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stderr.contains("3,400 samples"), "{}", ended.stderr);
    assert!(ended.stdout.contains("[<|end|>]"), "every answer ends with its end token:\n{}", ended.stdout);
}

#[test]
fn outputs_are_written_atomically() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("absent/ds.json");
    let ended = zeroth_in(
        folder.path(),
        &[
            "config",
            "new",
            "--micro-batch-size",
            "1",
            "--device-memory",
            "40GB",
            "-o",
            missing.to_str().unwrap(),
        ],
    );
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("absent"), "{}", ended.stderr);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing half-written stays behind");
}

#[test]
fn doctor_reports_the_machine_and_the_environment() {
    let (code, doctor) = zeroth_json(&["doctor"]);
    assert_eq!(code, 0);
    assert!(doctor["machine"]["cpu"]["threads"].as_u64().unwrap() >= 1);
    assert!(doctor["kernels"]["checks"].as_u64().unwrap() > 50);
    assert_eq!(doctor["kernels"]["wrong"].as_array().unwrap().len(), 0);
    assert!(doctor["kernels"]["worst_error"]["fp32"].as_f64().unwrap() < 2e-6);
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(["doctor", "--format", "json"])
        .env("DS_SKIP_UNUSED_PARAMETERS", "true")
        .env("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,garbage_collection_threshold:0.9")
        .output()
        .unwrap();
    let doctor: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = doctor["environment"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["name"].as_str().unwrap())
        .collect();
    assert!(
        names.contains(&"DS_SKIP_UNUSED_PARAMETERS") && names.contains(&"PYTORCH_CUDA_ALLOC_CONF"),
        "{names:?}"
    );
}
