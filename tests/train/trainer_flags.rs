//! Flags with the names of Hugging Face's Trainer and ms-swift: each of them acts, or says why it does not.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{json, metrics, new_data, new_model, number, text};
use crate::common::{Ended, zeroth};

/// A tiny model and eight rows of ready tokens.
struct Tiny {
    folder: tempfile::TempDir,
    model: PathBuf,
    data: PathBuf,
}

impl Tiny {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = new_model(folder.path(), 16, 1, 16, 32);
        let data = new_data(folder.path(), 8, 6, 32);
        Self { folder, model, data }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn train(&self, run: &str, flags: &[&str]) -> Ended {
        let (output, model, data) = (self.path(run), text(&self.model), text(&self.data));
        let output = text(&output);
        let base =
            ["train", "--device", "cpu", "--threads-per-rank", "1", "--model", model, "--output", output];
        let data = if flags.contains(&"--dataset") { &[][..] } else { &["--data", data][..] };
        let ended = zeroth(&[&base, data, flags].concat());
        assert!(ended.is_orderly(), "{flags:?}: {}", ended.stderr);
        ended
    }

    /// Trains and returns the steps of the run.
    fn steps(&self, run: &str, flags: &[&str]) -> Vec<Value> {
        self.train(run, flags).assert_done();
        metrics(&self.path(run)).into_iter().filter(|line| line.get("loss").is_some()).collect()
    }

    fn losses(&self, run: &str, flags: &[&str]) -> Vec<f64> {
        self.steps(run, flags).iter().map(|line| number(&line["loss"])).collect()
    }

    fn rates(&self, run: &str, flags: &[&str]) -> Vec<f64> {
        self.steps(run, flags).iter().map(|line| number(&line["lr"])).collect()
    }

    fn config(&self, run: &str) -> Value {
        json(&self.path(run).join("config.json"))
    }
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let near = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= 1e-12 * 1e-3);
    assert!(near, "{what}: {found:?}, expected {expected:?}");
}

#[test]
fn schedules_have_the_rates_of_transformers() {
    let tiny = Tiny::new();
    // transformers.get_scheduler 5.23.0 with a learning rate of 1e-3 over five steps.
    for (run, name, warmup, kwargs, expected) in [
        (
            "a",
            "cosine_with_min_lr",
            "1",
            r#"{"min_lr": 1e-4}"#,
            [0.0, 0.001, 0.000_868_198_051_533_946_4, 0.000_55, 0.000_231_801_948_466_053_65],
        ),
        ("b", "cosine_with_restarts", "1", r#"{"num_cycles": 2}"#, [0.0, 0.001, 0.0005, 0.001, 0.0005]),
        (
            "c",
            "warmup_stable_decay",
            "1",
            r#"{"num_decay_steps": 2, "decay_type": "linear"}"#,
            [0.0, 0.001, 0.001, 0.001, 0.0005],
        ),
        (
            "d",
            "cosine_warmup_with_min_lr",
            "2",
            r#"{"min_lr_rate": 0.1}"#,
            [0.0005, 0.001, 0.000_775, 0.000_325, 0.0001],
        ),
        (
            "e",
            "polynomial",
            "0",
            r#"{"power": 2, "lr_end": 1e-5}"#,
            [0.001, 0.000_643_6, 0.000_366_4, 0.000_168_4, 0.000_049_6],
        ),
        (
            "f",
            "inverse_sqrt",
            "2",
            r#"{"timescale": 4}"#,
            [0.0, 0.0005, 0.001, 0.000_894_427_190_999_915_9, 0.000_816_496_580_927_726_2],
        ),
    ] {
        let flags = [
            ["--lr_scheduler_type", name],
            ["--lr_scheduler_kwargs", kwargs],
            ["--warmup_steps", warmup],
            ["--learning_rate", "1e-3"],
            ["--max_steps", "5"],
        ];
        assert_near(&tiny.rates(run, flags.as_flattened()), &expected, name);
        assert_eq!(tiny.config(run)["zeroth"]["lr_scheduler_type"], name);
    }
}

#[test]
fn the_warmup_ratio_is_a_share_of_all_steps() {
    let tiny = Tiny::new();
    let linear = ["--max_steps", "5", "--learning_rate", "1e-3", "--lr_scheduler_type", "linear"];
    let rates = |run: &str, more: &[&str]| tiny.rates(run, &[&linear, more].concat());
    // ⌈0.3 · 5⌉ = 2 steps.
    let two = [0.0, 5e-4, 1e-3, 2e-3 / 3.0, 1e-3 / 3.0];
    assert_near(&rates("a", &["--warmup_ratio", "0.3"]), &two, "ratio");
    assert_near(&rates("b", &["--warmup_ratio", "0.3", "--warmup_steps", "0"]), &two, "0 steps");
    assert_near(
        &rates("c", &["--warmup_ratio", "0.3", "--warmup-steps", "1"]),
        &[0.0, 1e-3, 7.5e-4, 5e-4, 2.5e-4],
        "steps win",
    );
    assert_near(&rates("d", &["--warmup_ratio", "1"]), &[0.0, 2e-4, 4e-4, 6e-4, 8e-4], "all steps");
    let file = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}}}"#;
    tiny.train("e", &["--warmup_ratio", "0.3", "--max_steps", "5", "--deepspeed", file, "--save_steps", "0"])
        .assert_done();
    assert_eq!(tiny.config("e")["scheduler"]["params"]["warmup_num_steps"], 2);
    assert_eq!(
        json(&tiny.path("e/origin.json"))["scheduler.params.warmup_num_steps"]["detail"],
        "command line, --warmup-ratio"
    );
}

#[test]
fn the_data_seed_orders_the_samples_and_nothing_else() {
    let tiny = Tiny::new();
    // With a learning rate of 0 a loss depends on the weights and the sample alone; one epoch has every sample.
    let still = ["--seed", "1", "--learning_rate", "0", "--max_steps", "8", "--save_steps", "0"];
    let losses = |run: &str, more: &[&str]| tiny.losses(run, &[&still, more].concat());
    let (plain, same, other) =
        (losses("a", &[]), losses("b", &["--data_seed", "1"]), losses("c", &["--data_seed", "2"]));
    assert_eq!(plain, same);
    assert_ne!(plain, other, "another order");
    let sorted = |mut losses: Vec<f64>| {
        losses.sort_by(f64::total_cmp);
        losses
    };
    assert_eq!(sorted(plain), sorted(other), "the same weights");
    // A checkpoint resumes with its own.
    let moving =
        ["--seed", "1", "--learning_rate", "1e-2", "--save_steps", "2", "--lr_scheduler_type", "constant"];
    let whole = tiny.losses("d", &[&moving[..], &["--data_seed", "2", "--max_steps", "4"]].concat());
    tiny.losses("e", &[&moving[..], &["--data_seed", "2", "--max_steps", "2"]].concat());
    assert_eq!(json(&tiny.path("e/checkpoints/step-2/manifest.json"))["data"]["seed"], 2);
    let ended = tiny.train("e", &[&moving[..], &["--max_steps", "4", "--resume", "auto"]].concat());
    ended.assert_done();
    assert!(ended.stderr.contains("--data-seed 2"), "{}", ended.stderr);
    let resumed: Vec<f64> = metrics(&tiny.path("e")).iter().map(|line| number(&line["loss"])).collect();
    assert_eq!(whole, resumed);
    let idle = tiny.train("f", &["--data_seed", "2", "--shuffle", "false", "--dry-run"]);
    assert!(idle.stderr.contains("--data-seed has no effect with --shuffle false"), "{}", idle.stderr);
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_run_has_its_name_and_its_folder_of_reports() {
    let tiny = Tiny::new();
    let logs = tiny.path("logs");
    let flags =
        ["--run_name", "first try", "--logging_dir", text(&logs), "--max_steps", "2", "--save_steps", "0"];
    let reported = [&flags[..], &["--report_to", "tensorboard", "csv"]].concat();
    let ended = tiny.train("a", &reported);
    ended.assert_done();
    assert!(ended.stderr.lines().any(|line| line == "run: first try"), "{}", ended.stderr);
    assert_eq!(json(&tiny.path("a/plan.json"))["run_name"], "first try");
    assert_eq!(names(&logs), ["first try", "metrics.csv"]);
    let events = names(&logs.join("first try"));
    assert!(events.len() == 1 && events[0].starts_with("events.out.tfevents."), "{events:?}");
    let table = fs::read_to_string(logs.join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 3);
    assert!(!tiny.path("a/tensorboard").exists() && !tiny.path("a/metrics.csv").exists());
    // A table of another run is not replaced.
    let refused = tiny.train("b", &reported);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("metrics.csv is there already"), "{}", refused.stderr);
    assert_eq!(fs::read_to_string(logs.join("metrics.csv")).unwrap(), table);
    assert!(!tiny.path("b").exists());
    // In the run folder, overwriting removes the events of a named run.
    let named = ["--run_name", "x", "--report_to", "tensorboard", "--max_steps", "1", "--save_steps", "0"];
    tiny.train("c", &named).assert_done();
    let again = tiny.train("c", &[&named[..], &["--overwrite_output_dir"]].concat());
    again.assert_done();
    assert!(!again.stderr.contains("was kept"), "{}", again.stderr);
    assert_eq!(names(&tiny.path("c/tensorboard")), ["x"]);
    assert_eq!(names(&tiny.path("c/tensorboard/x")).len(), 1);
    let idle = tiny.train("b", &[&flags[..], &["--dry-run"]].concat());
    assert!(idle.stderr.contains("--logging-dir has no effect without --report-to"), "{}", idle.stderr);
    for name in ["a/b", "..", "", "a\u{1b}b"] {
        let refused = tiny.train("b", &["--run_name", name]);
        assert_eq!(refused.code, 2, "{name:?}: {}", refused.stderr);
        assert!(refused.stderr.contains("--run-name"), "{name:?}: {}", refused.stderr);
    }
}

#[test]
fn optim_is_the_optimizer_of_the_file() {
    let tiny = Tiny::new();
    let flags = ["--max_steps", "3", "--learning_rate", "1e-2", "--save_steps", "0", "--fp32"];
    let mut seen = Vec::new();
    for (name, kind) in [
        ("adamw_torch_fused", "AdamW"),
        ("lion_32bit", "Lion"),
        ("ademamix", "AdEMAMix"),
        ("sgd", "SGD"),
        ("adagrad", "Adagrad"),
    ] {
        let by_flag = tiny.losses(name, &[&flags[..], &["--optim", name]].concat());
        assert_eq!(tiny.config(name)["optimizer"]["type"], kind);
        let params = tiny.config(name)["optimizer"]["params"].clone();
        let file = serde_json::json!({"optimizer": {"type": kind, "params": params}}).to_string();
        let by_file = tiny.losses(kind, &[&flags[..], &["--deepspeed", &file]].concat());
        assert_eq!(by_flag, by_file, "{name}");
        assert!(!seen.contains(&by_flag), "{name} trains like another one");
        seen.push(by_flag);
    }
    let contradiction =
        tiny.train("x", &["--optim", "sgd", "--deepspeed", r#"{"optimizer": {"type": "AdamW"}}"#]);
    assert_eq!(contradiction.code, 2);
    assert!(contradiction.stderr.contains("vs hf optim=SGD"), "{}", contradiction.stderr);
}

#[test]
fn torch_dtype_is_the_precision() {
    let tiny = Tiny::new();
    let flags = ["--max_steps", "3", "--learning_rate", "1e-2", "--save_steps", "0"];
    let losses = |run: &str, more: &[&str]| tiny.losses(run, &[&flags, more].concat());
    let full = losses("a", &["--fp32"]);
    assert_eq!(losses("b", &["--torch_dtype", "float32"]), full);
    assert_ne!(losses("c", &["--torch_dtype", "bfloat16"]), full);
    let mut config = json(&tiny.model.join("config.json"));
    config["torch_dtype"] = "float32".into();
    fs::write(tiny.model.join("config.json"), config.to_string()).unwrap();
    assert_eq!(losses("d", &["--torch_dtype", "auto"]), full);
    assert_eq!(json(&tiny.path("d/origin.json"))["bf16.enabled"]["detail"], "command line, --torch-dtype");
    for more in [&["--bf16", "--torch_dtype", "float32"], &["--fp16", "--torch_dtype", "bfloat16"]] {
        let refused = tiny.train("e", more);
        assert_eq!(refused.code, 2, "{more:?}: {}", refused.stderr);
        assert!(refused.stderr.contains("contradict each other"), "{}", refused.stderr);
    }
}

#[test]
fn other_names_of_data_and_length_are_read() {
    let tiny = Tiny::new();
    let (data, long) = (tiny.data.clone(), tiny.path("long.jsonl"));
    let longer =
        format!("{}{{\"input_ids\": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}\n", fs::read_to_string(&data).unwrap());
    fs::write(&long, longer).unwrap();
    let flags = [
        "--dataset",
        text(&long),
        "--val_dataset",
        text(&data),
        "--max_seq_length",
        "6",
        "--max_steps",
        "-1",
        "--num_train_epochs",
        "1",
        "--save_steps",
        "0",
        "--tuner_type",
        "full",
        "--lr",
        "1e-3",
    ];
    let ended = tiny.train("a", &flags);
    ended.assert_done();
    assert!(ended.stderr.contains("data: 8 samples"), "{}", ended.stderr);
    let lines = metrics(&tiny.path("a"));
    assert_eq!(lines.iter().filter(|line| line.get("loss").is_some()).count(), 8, "one epoch");
    assert_eq!(lines.iter().filter(|line| line.get("eval_loss").is_some()).count(), 1);
}

#[test]
fn flags_without_effect_are_noted_and_change_nothing() {
    let tiny = Tiny::new();
    let flags = ["--max_steps", "2", "--learning_rate", "1e-2", "--save_steps", "0"];
    let plain = tiny.losses("a", &flags);
    let noted = [
        "--dataloader_num_workers",
        "4",
        "--dataloader_pin_memory",
        "True",
        "--ddp_timeout",
        "1800",
        "--ddp_backend",
        "nccl",
        "--attn_impl",
        "flash_attn",
        "--attn_implementation",
        "flash_attention_2",
        "--trust_remote_code",
        "--group_by_length",
        "--remove_unused_columns",
        "false",
        "--dataset_num_proc",
        "8",
        "--use_hf",
        "true",
        "--model_type",
        "qwen2",
        "--gradient_checkpointing_kwargs",
        r#"{"use_reentrant": false}"#,
        "--local_rank",
        "-1",
        "--tf32",
        "True",
        "--push_to_hub",
        "false",
        "--report_to",
        "none",
    ];
    let ended = tiny.train("b", &[&flags[..], &noted].concat());
    ended.assert_done();
    let after: Vec<f64> = metrics(&tiny.path("b")).iter().map(|line| number(&line["loss"])).collect();
    assert_eq!(plain, after);
    for flag in noted.iter().filter(|word| word.starts_with("--") && **word != "--report_to") {
        let note = format!("note: {} has no effect: ", flag.replace('_', "-"));
        assert_eq!(ended.stderr.matches(&note).count(), 1, "{flag}: {}", ended.stderr);
    }
}

#[test]
fn values_that_ask_for_something_else_are_refused_at_once() {
    let tiny = Tiny::new();
    let ended = tiny.train(
        "a",
        &[
            "--push_to_hub",
            "--fsdp",
            "full_shard auto_wrap",
            "--optim",
            "adafactor",
            "--warmup_ratio",
            "2",
            "--lr_scheduler_kwargs",
            "[1]",
            "--lr_scheduler_type",
            "reduce_lr_on_plateau",
            "--torch_dtype",
            "int8",
            "--lerning_rate",
            "1",
            "--frobnicate",
            "--kd_alpha",
            "8",
            "--save_safetensors",
            "false",
        ],
    );
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    let errors: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 11, "{}", ended.stderr);
    for (flag, word) in [
        ("--push-to-hub", "connects to no service"),
        ("--fsdp", "--deepspeed zero3"),
        ("--optim", "not yet built; there are adamw_torch"),
        ("--warmup-ratio", "from 0 to 1"),
        ("--lr-scheduler-kwargs", "JSON object"),
        ("--torch-dtype", "bfloat16, float16, float32 or auto"),
        ("--lerning_rate", "did you mean `--learning_rate`?"),
        ("--frobnicate", "has no flag"),
        ("--kd-alpha", "from 0 to 1"),
        ("--save-safetensors", "always safetensors"),
    ] {
        assert!(
            errors.iter().any(|error| error.contains(flag) && error.contains(word)),
            "{flag}: {}",
            ended.stderr
        );
    }
    assert!(ended.stderr.contains("cosine_with_min_lr"), "the schedules there are: {}", ended.stderr);
    for (kwargs, word) in [
        (&["--lr_scheduler_type", "cosine_with_min_lr"][..], "needs min_lr or min_lr_rate"),
        (&["--lr_scheduler_kwargs", r#"{"power": 2}"#], "cosine has no parameter `power`"),
    ] {
        let ended = tiny.train("a", kwargs);
        assert_eq!(ended.code, 2);
        assert!(ended.stderr.contains(word), "{}", ended.stderr);
    }
}

#[test]
fn a_flag_given_twice_counts_last_also_with_several_values() {
    let tiny = Tiny::new();
    let (eight, three) = (tiny.data.clone(), tiny.path("three.jsonl"));
    fs::write(&three, "{\"input_ids\": [1, 2, 3]}\n".repeat(3)).unwrap();
    let missing = tiny.path("missing.jsonl");
    let dry = |flags: &[&str]| {
        let ended = tiny.train("a", &[flags, &["--dry-run"]].concat());
        ended.assert_done();
        ended.stderr
    };
    let said = dry(&["--data", text(&missing), text(&eight), "--dataset", text(&three)]);
    assert!(said.contains("data: 3 samples"), "{said}");
    let note = "note: --data is given 2 times, and the last counts";
    assert_eq!(said.matches(note).count(), 1, "{said}");
    let both = dry(&["--dataset", text(&eight), text(&three)]);
    assert!(both.contains("data: 11 samples") && !both.contains(" times"), "{both}");
    let evaluated =
        dry(&["--dataset", text(&eight), "--eval-data", text(&missing), "--val_dataset", text(&three)]);
    assert!(evaluated.contains("note: --eval-data is given 2 times"), "{evaluated}");
}
