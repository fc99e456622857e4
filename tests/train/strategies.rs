//! `--eval-strategy`, `--save-strategy`, `--logging-strategy` and fractional steps, by the steps at which things happen;
//! and flags of the training loop that contradict each other.

use std::fs;
use std::path::Path;

use super::{golden, metrics, new_data, new_model, text, train_on, written};
use crate::common::{Ended, zeroth};

/// The steps of a run's evaluation lines.
pub(super) fn evaluated(run: &Path) -> Vec<u64> {
    let lines = metrics(run).into_iter().filter(|line| line.get("eval_loss").is_some());
    lines.map(|line| line["step"].as_u64().unwrap()).collect()
}

/// The steps of a run's checkpoints.
pub(super) fn saved(run: &Path) -> Vec<u64> {
    let names = fs::read_dir(run.join("checkpoints")).into_iter().flatten();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> =
        names.filter_map(|name| name.strip_prefix("step-").map(|step| step.parse().unwrap())).collect();
    steps.sort_unstable();
    steps
}

/// The steps of progress lines, of the form `step 3/7 · loss …`.
fn logged(ended: &Ended) -> Vec<u64> {
    let steps = ended.stderr.lines().filter_map(|line| line.strip_prefix("step ")?.split_once('/'));
    steps.map(|(step, _)| step.trim().parse().unwrap()).collect()
}

/// A tiny model with 10 rows to train on and 3 to evaluate on.
struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        new_model(folder.path(), 16, 1, 32, 60);
        let rows = fs::read_to_string(new_data(folder.path(), 13, 8, 60)).unwrap();
        let rows: Vec<&str> = rows.lines().collect();
        written(folder.path(), "train.jsonl", &rows[..10]);
        written(folder.path(), "held-out.jsonl", &rows[10..]);
        Self(folder)
    }

    /// Trains steps of 4 samples: the epochs end within the steps 3, 5 and 8.
    fn train(&self, name: &str, more: &[&str]) -> Ended {
        let folder = self.0.path();
        let held_out = folder.join("held-out.jsonl");
        let flags =
            ["--per-device-train-batch-size", "4", "--max-steps", "7", "--eval-data", text(&held_out)];
        train_on(
            &folder.join("new-model"),
            &folder.join("train.jsonl"),
            &folder.join(name),
            &[&flags, more].concat(),
        )
    }

    fn run(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }
}

/// A name, flags, and the steps of evaluations, checkpoints and lines.
type Case<'a> = (&'a str, &'a [&'a str], &'a [u64], &'a [u64], &'a [u64]);

#[test]
fn strategies_decide_at_which_steps_things_happen() {
    let fixture = Fixture::new();
    let cases: [Case<'_>; 5] = [
        ("default", &[], &[7], &[7], &[1, 5, 7]),
        (
            "epoch",
            &["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_strategy", "epoch"],
            &[3, 5, 7],
            &[3, 5, 7],
            &[3, 5, 7],
        ),
        (
            "no",
            &["--evaluation_strategy", "no", "--save_strategy", "no", "--logging_strategy", "no"],
            &[],
            &[],
            &[],
        ),
        (
            "steps",
            &[
                "--eval_strategy",
                "steps",
                "--eval_steps",
                "2",
                "--save_strategy",
                "steps",
                "--save_steps",
                "3",
                "--logging_strategy",
                "steps",
                "--logging_steps",
                "4",
            ],
            &[2, 4, 6, 7],
            &[3, 6, 7],
            &[1, 4, 7],
        ),
        // Shares of 7 steps, rounded up: 3, 2 and 4.
        (
            "shares",
            &["--eval_steps", "0.4", "--save_steps", "0.2", "--logging_steps", "0.5"],
            &[3, 6, 7],
            &[2, 4, 6, 7],
            &[1, 4, 7],
        ),
    ];
    for (name, flags, evaluations, saves, lines) in cases {
        let ended = fixture.train(name, flags);
        ended.assert_done();
        let run = fixture.run(name);
        assert_eq!(evaluated(&run), evaluations, "{name}: {}", ended.stderr);
        assert_eq!(saved(&run), saves, "{name}: {}", ended.stderr);
        assert_eq!(logged(&ended), lines, "{name}: {}", ended.stderr);
        let losses = metrics(&run).iter().filter(|line| line.get("loss").is_some()).count();
        assert_eq!(losses, 7, "metrics.jsonl has every step, whatever is logged");
        assert!(run.join("model/model.safetensors").is_file(), "the model is always exported");
        assert_eq!(ended.stderr.contains("--eval-data is not read"), name == "no", "{}", ended.stderr);
    }
    let model = |name: &str| fs::read(fixture.run(name).join("model/model.safetensors")).unwrap();
    assert!(["epoch", "no", "steps", "shares"].iter().all(|name| model(name) == model("default")));
    // Nothing was saved, but the model says that the run is complete.
    let again = fixture.train("no", &["--eval_strategy", "no", "--save_strategy", "no", "--resume", "auto"]);
    again.assert_done();
    assert!(again.stderr.contains("already complete (7 steps)"), "{}", again.stderr);
    let longer = ["--eval_strategy", "no", "--save_strategy", "no", "--resume", "auto", "--max-steps", "8"];
    fixture.train("no", &longer).assert_done();
    assert_eq!(metrics(&fixture.run("no")).len(), 8, "more steps start again");
}

#[test]
fn epochs_do_not_depend_on_ranks() {
    let fixture = Fixture::new();
    let flags = ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--ranks", "2"];
    let smaller = ["--per-device-train-batch-size", "2"];
    fixture.train("ranks", &[&flags[..], &smaller].concat()).assert_done();
    assert_eq!(evaluated(&fixture.run("ranks")), [3, 5, 7]);
    assert_eq!(saved(&fixture.run("ranks")), [3, 5, 7]);
}

#[test]
fn a_requested_save_ignores_the_strategy() {
    let fixture = Fixture::new();
    let run = fixture.run("asked");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("save-now"), "").unwrap();
    fixture.train("asked", &["--save_strategy", "no"]).assert_done();
    assert_eq!(saved(&run).len(), 1, "{:?}", saved(&run));
}

#[test]
fn flags_that_others_leave_without_effect_are_noted() {
    let fixture = Fixture::new();
    let folder = fixture.0.path();
    let ended = train_on(
        &folder.join("new-model"),
        &folder.join("train.jsonl"),
        &fixture.run("idle"),
        &[
            "--max-steps",
            "2",
            "--save_strategy",
            "epoch",
            "--save_steps",
            "0.5",
            "--logging_strategy",
            "no",
            "--logging_steps",
            "5",
            "--split_dataset_ratio",
            "0",
            "--eval_steps",
            "2",
            "--per_device_eval_batch_size",
            "4",
        ],
    );
    ended.assert_done();
    for note in [
        "--save-steps has no effect: --save-strategy epoch",
        "--logging-steps has no effect: --logging-strategy no",
        "--eval-steps has no effect: there is no evaluation data",
        "--per-device-eval-batch-size has no effect: there is no evaluation data",
    ] {
        assert!(ended.stderr.contains(note), "{note}: {}", ended.stderr);
    }
}

#[test]
fn contradicting_flags_are_refused_all_at_once() {
    let folder = golden("qwen3-tied");
    let (model, data) = (text(&folder).to_owned(), folder.join("data.jsonl"));
    let output = tempfile::tempdir().unwrap();
    let refused = |more: &[&str]| {
        let output = output.path().join("run");
        let given =
            ["train", "--device", "cpu", "--model", &model, "--data", text(&data), "--output", text(&output)];
        let ended = zeroth(&[&given, more].concat());
        assert_eq!(ended.code, 2, "{more:?}: {}", ended.stderr);
        assert!(ended.is_orderly() && !output.exists(), "{more:?}: {}", ended.stderr);
        ended.stderr
    };
    let held_out = ["--eval-data", text(&data)];
    let cases: [(&[&str], &[&str]); 15] = [
        (&["--eval_strategy", "epoch"], &["--eval-strategy needs evaluation data", "--eval-data"]),
        (&["--metric_for_best_model", "loss"], &["--metric-for-best-model needs evaluation data"]),
        (
            &["--load_best_model_at_end", "--early_stopping_patience", "2"],
            &["--load-best-model-at-end, --early-stopping-patience need evaluation data"],
        ),
        (&["--save_strategy", "best"], &["--save-strategy best needs evaluation data"]),
        (
            &["--split_dataset_ratio", "0.1", "--eval_strategy", "no", "--metric_for_best_model", "loss"],
            &["--metric-for-best-model, --split-dataset-ratio need evaluations", "--eval-strategy is no"],
        ),
        (
            &["--split_dataset_ratio", "0.1", held_out[0], held_out[1]],
            &["--split-dataset-ratio and --eval-data"],
        ),
        (
            &["--split_dataset_ratio", "0.1", "--load_best_model_at_end", "--save_strategy", "epoch"],
            &["--save-strategy epoch and --eval-strategy steps must be the same"],
        ),
        (
            &[
                "--split_dataset_ratio",
                "0.1",
                "--load_best_model_at_end",
                "--save_steps",
                "3",
                "--eval_steps",
                "2",
            ],
            &["--save-steps 3 must be a multiple of --eval-steps 2"],
        ),
        (
            &[
                "--split_dataset_ratio",
                "0.1",
                "--load_best_model_at_end",
                "--save_steps",
                "0.3",
                "--eval_steps",
                "2",
            ],
            &["--save-steps 0.3 must be a multiple of --eval-steps 2"],
        ),
        (
            &["--split_dataset_ratio", "0.1", "--load_best_model_at_end", "--save_steps", "100"],
            &["--save-steps 100 must be a multiple of --eval-steps 500 (the default)"],
        ),
        (
            &["--split_dataset_ratio", "0.1", "--early_stopping_threshold", "0.1"],
            &["--early-stopping-threshold has no effect without --early-stopping-patience"],
        ),
        (&["--save_only_model", "--max_restarts", "1"], &["--max-restarts 1", "--save-only-model"]),
        (&["--metric_for_best_model", "accuracy"], &["accuracy", "eval_loss", "perplexity"]),
        (&["--eval_steps", "1.5"], &["a whole number of steps, or a share of all steps"]),
        (&["--eval_steps", "0"], &["at least 1"]),
    ];
    for (flags, words) in cases {
        let stderr = refused(flags);
        assert!(words.iter().all(|word| stderr.contains(word)), "{flags:?} {words:?}: {stderr}");
    }
    for ratio in ["1", "2", "-1", "nan", "x"] {
        let stderr = refused(&["--split_dataset_ratio", ratio]);
        assert!(stderr.contains("--split-dataset-ratio"), "{ratio}: {stderr}");
    }
    let stderr = refused(&[
        "--split_dataset_ratio",
        "0",
        "--load_best_model_at_end",
        "--early_stopping_threshold",
        "0.1",
    ]);
    assert!(stderr.contains("flags contradict each other:"), "{stderr}");
    let all = ["--load-best-model-at-end needs evaluation data", "--early-stopping-threshold has no effect"];
    assert!(all.iter().all(|word| stderr.contains(word)), "{stderr}");
}
