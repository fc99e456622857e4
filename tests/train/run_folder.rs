//! The run folder: metrics, plan, config with origins, logs, loss curve and model; and a second run.

use std::fs;

use serde_json::Value;

use super::{golden, json, metrics, tensors, text, train, written};

/// The keys of a step, in documented order.
const KEYS: [&str; 12] = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "step_ms",
    "loss_scale",
    "skipped",
    "device_bytes_peak",
    "host_bytes_peak",
    "samples_seen",
];

#[test]
fn metrics_have_one_exact_line_per_step() {
    let folder = tempfile::tempdir().unwrap();
    train("llama-one-kv-head", folder.path(), &["--max-steps", "12", "--ranks", "2"]).assert_done();
    let text = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    assert!(text.ends_with('\n'));
    for (at, line) in text.lines().enumerate() {
        // Values contain neither commas nor colons, so digits can be compared as written.
        let inner = line.strip_prefix('{').unwrap().strip_suffix('}').unwrap();
        let pairs: Vec<(&str, &str)> = inner.split(',').map(|pair| pair.split_once(':').unwrap()).collect();
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| key.trim_matches('"')).collect();
        assert_eq!(keys, KEYS);
        let value = |key: &str| pairs[KEYS.iter().position(|known| *known == key).unwrap()].1;
        let float = |key: &str| value(key).parse::<f64>().unwrap();
        assert_eq!(value("step"), (at + 1).to_string());
        for key in ["loss", "grad_norm", "lr", "tokens_per_second", "step_ms", "loss_scale"] {
            assert_eq!(serde_json::to_string(&float(key)).unwrap(), value(key), "{key}");
        }
        // Both sides were parsed and printed, so a lost digit would show.
        assert_eq!(float("tokens_per_second"), float("tokens") / (float("step_ms") / 1000.0));
        assert!(float("loss") > 0.0 && float("grad_norm") > 0.0 && value("loss_scale") == "1.0");
    }
    assert_eq!(text.lines().count(), 12);
}

#[test]
fn plan_json_is_consistent_with_metrics() {
    let folder = tempfile::tempdir().unwrap();
    for (at, (preset, ranks)) in [("zero0", "1"), ("zero2", "2"), ("zero3", "3")].into_iter().enumerate() {
        let run = folder.path().join(at.to_string());
        let flags = ["--deepspeed", preset, "--ranks", ranks, "--max-steps", "1"];
        train("mistral-window", &run, &flags).assert_done();
        let plan = json(&run.join("plan.json"));
        let bytes = |key: &str| plan["device_bytes"][key].as_u64().unwrap();
        let parts = ["parameters", "gradients", "optimizer", "activations", "buffers"].map(bytes);
        assert_eq!(parts.iter().sum::<u64>(), bytes("total"));
        assert!(parts.iter().all(|part| *part > 0), "{plan}");
        assert_eq!(metrics(&run)[0]["device_bytes_peak"], bytes("total"));
        assert_eq!(plan["ranks"].to_string(), ranks);
        // With one byte less than this --device-memory, another program is chosen.
        let chooses = |memory: u64| {
            let memory = memory.to_string();
            let flags = ["--dry-run", "--deepspeed", preset, "--ranks", ranks, "--max-steps", "1"];
            let ended = train("mistral-window", &run, &[&flags[..], &["--device-memory", &memory]].concat());
            ended.assert_done();
            ended.stderr.contains("chosen to fit the memory")
        };
        assert_eq!([bytes("total"), bytes("total") - 1].map(chooses), [false, true]);
    }
}

#[test]
fn config_and_origin_record_every_value() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--learning-rate", "2e-4", "--max-steps", "1", "--ranks", "2", "--deepspeed", "zero3"];
    train("qwen3-tied", folder.path(), &flags).assert_done();
    let config = json(&folder.path().join("config.json"));
    assert_eq!(config["optimizer"]["params"]["lr"], 2e-4);
    assert_eq!(config["train_batch_size"], 2);
    assert_eq!(config["zero_optimization"]["stage"], 3);
    let origin = json(&folder.path().join("origin.json"));
    let word = |key: &str| origin[key]["origin"].as_str().unwrap().to_owned();
    assert_eq!(word("optimizer.params.lr"), "command line");
    assert_eq!(word("zero_optimization.stage"), "file");
    assert_eq!(word("train_batch_size"), "auto");
    assert_eq!(word("zero_optimization.reduce_scatter"), "default");
    assert_eq!(origin["optimizer.params.lr"]["value"], 2e-4);
}

#[test]
fn the_resolved_config_reproduces_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let flags = ["--deepspeed", "zero3", "--ranks", "2", "--learning-rate", "1e-3", "--warmup-steps", "2"];
    train("qwen3-tied", &first, &[&flags[..], &["--max-steps", "5"]].concat()).assert_done();
    let config = first.join("config.json");
    let flags = ["--deepspeed", config.to_str().unwrap(), "--ranks", "2", "--max-steps", "5"];
    train("qwen3-tied", &second, &flags).assert_done();
    let losses = |run| metrics(run).iter().map(|line| line["loss"].to_string()).collect::<Vec<_>>();
    assert_eq!(losses(&first), losses(&second));
}

#[test]
fn the_exported_model_has_the_right_tensors() {
    let folder = tempfile::tempdir().unwrap();
    for (flag, dtype, name) in [("--bf16", "BF16", "bfloat16"), ("--fp32", "F32", "float32")] {
        let run = folder.path().join(dtype);
        train("qwen2-yarn-tied", &run, &["--max-steps", "1", "--ranks", "2", flag]).assert_done();
        let before = fs::read(golden("qwen2-yarn-tied").join("model.safetensors")).unwrap();
        let after = fs::read(run.join("model/model.safetensors")).unwrap();
        let shapes = |file: &[u8]| -> Vec<(String, Vec<u64>)> {
            let mut all: Vec<_> =
                tensors(file).into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
            all.sort();
            all
        };
        assert_eq!(shapes(&before), shapes(&after));
        assert!(tensors(&after).iter().all(|tensor| tensor.dtype == dtype));
        let without_type = |path: &std::path::Path| {
            let mut config: Value = json(path);
            let dtype = config.as_object_mut().unwrap().remove("dtype").unwrap();
            (config, dtype)
        };
        let (given, _) = without_type(&golden("qwen2-yarn-tied").join("config.json"));
        assert_eq!(without_type(&run.join("model/config.json")), (given, name.into()));
        // The exported model can be trained.
        let again = folder.path().join(format!("{dtype}-again"));
        let data = golden("qwen2-yarn-tied").join("data.jsonl");
        super::train_on(&run.join("model"), &data, &again, &["--max-steps", "1"]).assert_done();
    }
}

#[test]
fn bf16_is_the_default() {
    let folder = tempfile::tempdir().unwrap();
    train("qwen3-tied", folder.path(), &["--max-steps", "1"]).assert_done();
    let file = fs::read(folder.path().join("model/model.safetensors")).unwrap();
    assert!(tensors(&file).iter().all(|tensor| tensor.dtype == "BF16"));
}

#[test]
fn the_config_can_disable_the_export() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}}"#;
    let config = written(folder.path(), "ds.json", &[config]);
    let run = folder.path().join("run");
    let ended =
        train("qwen3-tied", &run, &["--deepspeed", text(&config), "--ranks", "2", "--max-steps", "2"]);
    ended.assert_done();
    assert!(!run.join("model").exists());
    assert!(ended.stderr.contains("stage3_gather_16bit_weights_on_model_save is false"), "{}", ended.stderr);
}

#[test]
fn runs_write_logs_and_a_loss_curve() {
    let folder = tempfile::tempdir().unwrap();
    let ended = train("qwen3-tied", folder.path(), &["--max-steps", "6", "--ranks", "3"]);
    ended.assert_done();
    for rank in 0..3 {
        assert!(folder.path().join(format!("logs/rank-{rank}.log")).is_file(), "{rank}");
    }
    let log = fs::read_to_string(folder.path().join("logs/rank-0.log")).unwrap();
    for step in ["step 1/6 ", "step 5/6 ", "step 6/6 "] {
        assert!(log.contains(step) && ended.stderr.contains(step), "{log}");
    }
    let curve = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    assert!(curve.starts_with("<svg") && curve.trim_end().ends_with("</svg>"), "{curve}");
    assert!(!folder.path().join(".lock").exists());
}

#[test]
fn a_second_run_is_refused_unless_overwriting() {
    let folder = tempfile::tempdir().unwrap();
    let run = |more: &[&str]| train("qwen3-tied", folder.path(), &[&["--ranks", "2"], more].concat());
    run(&["--max-steps", "4"]).assert_done();
    let before = fs::read(folder.path().join("metrics.jsonl")).unwrap();
    let ended = run(&["--max-steps", "2"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    for words in ["already contains a run", "--resume auto", "--overwrite-output-dir"] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert_eq!(fs::read(folder.path().join("metrics.jsonl")).unwrap(), before, "nothing was touched");

    for foreign in ["notes.txt", "model/README.md", "logs/mine.log"] {
        fs::write(folder.path().join(foreign), "mine").unwrap();
    }
    run(&["--max-steps", "2", "--overwrite-output-dir"]).assert_done();
    assert_eq!(metrics(folder.path()).len(), 2);
    for foreign in ["notes.txt", "model/README.md", "logs/mine.log"] {
        assert_eq!(fs::read_to_string(folder.path().join(foreign)).unwrap(), "mine", "{foreign}");
    }
}

#[test]
fn folders_of_other_things_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mine = folder.path().join("mine");
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("notes.txt"), "mine").unwrap();
    let words = format!("{} holds notes.txt, which no run writes: ", mine.display());
    for more in [&[][..], &["--overwrite-output-dir"], &["--resume", "auto"]] {
        let ended = train("qwen3-tied", &mine, &[&["--max-steps", "1"], more].concat());
        assert!(ended.code == 2 && ended.stderr.contains(&words), "{}", ended.stderr);
        assert!(ended.stderr.contains("such as") && !ended.stderr.contains("tokenised"), "{}", ended.stderr);
        assert_eq!(fs::read_dir(&mine).unwrap().count(), 1);
    }
    // The home folder is refused even while it is empty.
    let home = folder.path().join("home");
    fs::create_dir(&home).unwrap();
    let model = golden("qwen3-tied");
    let data = model.join("data.jsonl");
    let ended = std::process::Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)])
        .args(["--max-steps", "1", "--overwrite-output-dir", "--output", text(&home)])
        .env("HOME", &home)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    let words = format!("--output {} is the home folder: ", home.display());
    assert!(ended.status.code() == Some(2) && said.contains(&words), "{said}");
    assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
}

#[test]
fn the_working_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("qwen3-tied");
    let data = model.join("data.jsonl");
    let arguments = ["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)];
    let ended = crate::common::zeroth_in(
        folder.path(),
        &[&arguments[..], &["--max-steps", "1", "--output", "."]].concat(),
    );
    assert!(
        ended.code == 2 && ended.stderr.contains("--output . is the working directory: "),
        "{}",
        ended.stderr
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn relative_outputs_work_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("qwen3-tied");
    let data = model.join("data.jsonl");
    let arguments = ["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)];
    let more = ["--ranks", "2", "--max-steps", "2", "--output", "runs/first"];
    let ended = crate::common::zeroth_in(folder.path(), &[&arguments[..], &more].concat());
    ended.assert_done();
    assert_eq!(metrics(&folder.path().join("runs/first")).len(), 2);
}
