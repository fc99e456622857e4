//! Unknown flags and invalid values: reported all at once, with suggestions.

use crate::common::{Ended, model, zeroth};

fn wrong(arguments: &[&str]) -> Ended {
    let ended = zeroth(arguments);
    assert_eq!(ended.code, 2, "{arguments:?}\n{}{}", ended.stdout, ended.stderr);
    assert!(ended.is_orderly() && ended.stdout.is_empty(), "{arguments:?}\n{}", ended.stderr);
    ended
}

/// The error lines of stderr.
fn errors(ended: &Ended) -> Vec<&str> {
    ended.stderr.lines().filter_map(|line| line.strip_prefix("error: ")).collect()
}

const TRAIN: [&str; 7] = ["train", "--model", "x", "--data", "y", "--output", "z"];

#[test]
fn all_unknown_flags_are_reported_with_suggestions() {
    let ended = wrong(
        &[
            &TRAIN[..],
            &[
                "--lerning-rate",
                "1e-4",
                "--frobnicate",
                "--max_step=5",
                "--adam_eps",
                "1e-8",
                "--bf61",
                "true",
            ],
        ]
        .concat(),
    );
    let errors = errors(&ended);
    assert_eq!(errors.len(), 5, "{}", ended.stderr);
    assert!(errors[0].contains("--lerning-rate") && errors[0].contains("`--learning-rate`"), "{errors:?}");
    assert!(errors[1].contains("--frobnicate") && !errors[1].contains("did you mean"), "{errors:?}");
    assert!(errors[2].contains("--max_step") && errors[2].contains("`--max_steps`"), "{errors:?}");
    assert!(errors[3].contains("--adam_eps") && errors[3].contains("`--adam_epsilon`"), "{errors:?}");
    assert!(errors[4].contains("--bf61") && errors[4].contains("`--bf16`"), "{errors:?}");
    assert!(ended.stderr.contains("zeroth train --help"), "{}", ended.stderr);
}

#[test]
fn dissimilar_flags_are_not_suggested() {
    for flag in ["--tensorboard-dir", "--gradient-clipping", "--deepspeed-port", "--x", "--num-workers"] {
        let ended = wrong(&[&TRAIN[..], &[flag, "a"]].concat());
        assert!(!ended.stderr.contains("did you mean"), "{flag}: {}", ended.stderr);
        assert!(!ended.stderr.contains("similar"), "{flag}: {}", ended.stderr);
    }
}

#[test]
fn suggestions_are_flags_of_the_same_command() {
    let ended =
        wrong(&["generate", "--model", "x", "--prompt", "y", "--max-new-token", "3", "--max-step", "5"]);
    assert!(ended.stderr.contains("`--max-new-tokens`"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("`--max-steps`"), "{}", ended.stderr);
    let ended = wrong(&["config", "new", "--micro-batch", "1", "--stages", "3"]);
    assert!(ended.stderr.contains("`--micro-batch-size`"), "{}", ended.stderr);
    assert!(ended.stderr.contains("`--stage`"), "{}", ended.stderr);
}

#[test]
fn invalid_values_and_missing_flags_are_reported_together() {
    let ended = wrong(&[
        "train",
        "--model",
        "x",
        "--ranks",
        "none",
        "--frobnicate",
        "--lr-scheduler-type",
        "cosin",
        "--learning-rate=fast",
        "--output",
        "z",
    ]);
    let errors = errors(&ended);
    assert_eq!(errors.len(), 5, "{}", ended.stderr);
    for word in ["--ranks", "--frobnicate", "--lr-scheduler-type", "--learning-rate", "--data"] {
        assert!(ended.stderr.contains(word), "{word}: {}", ended.stderr);
    }
    assert!(ended.stderr.contains("cosine"), "the values there are: {}", ended.stderr);
    // --model is only required without --params, and --params was given.
    let ended = wrong(&["plan", "--params", "many", "--ranks", "2", "--frobnicate"]);
    assert!(!ended.stderr.contains("--model"), "{}", ended.stderr);
    // A flag with an invalid value is not missing.
    let ended = wrong(&["init", "--family", "gwen3", "--hidden", "many", "--layers", "1", "--heads", "1"]);
    assert_eq!(ended.stderr.matches("--hidden").count(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("--vocab-size"), "{}", ended.stderr);
}

#[test]
fn unsupported_flags_and_flags_of_train_are_explained() {
    let more = ["--rlhf-type", "a", "--fp8_recipe", "2"];
    let ended = wrong(&[&TRAIN[..], &more].concat());
    let errors = errors(&ended);
    assert_eq!(errors.len(), 2, "{}", ended.stderr);
    assert!(errors.iter().all(|error| error.contains("not yet")), "{errors:?}");
    let ended = wrong(&["plan", "--params", "8B", "--data", "rows.jsonl", "--output", "run"]);
    assert_eq!(ended.stderr.matches("`zeroth train`").count(), 2, "{}", ended.stderr);
}

#[test]
fn train_types_are_accepted() {
    let dry = |flag: &str, value: &str| {
        zeroth(&[
            "train",
            "--model",
            "tests/golden/qwen3-tied",
            "--data",
            "tests/golden/qwen3-tied/data.jsonl",
            "--output",
            "target/never-made",
            "--device",
            "cpu",
            "--dry-run",
            flag,
            value,
        ])
    };
    for flag in ["--train_type", "--train-type"] {
        for kind in ["full", "lora"] {
            let ended = dry(flag, kind);
            assert_eq!(ended.code, 0, "{flag} {kind}: {}", ended.stderr);
            assert_eq!(ended.stderr.contains("LoRA r 8"), kind == "lora", "{flag}: {}", ended.stderr);
        }
    }
}

#[test]
fn plan_needs_only_config_json() {
    for command in [&["plan"][..], &["config", "resolve", "zero3"]] {
        let ended = wrong(&[command, &["--model", "nobody/never-made"]].concat());
        assert!(ended.stderr.contains("`hf download nobody/never-made config.json`"), "{}", ended.stderr);
    }
    let ended = wrong(&["generate", "--model", "nobody/never-made", "--prompt", "x"]);
    assert!(ended.stderr.contains("`hf download nobody/never-made`"), "{}", ended.stderr);
}

#[test]
fn errors_never_go_to_stdout() {
    for arguments in [
        vec!["plan", "--params", "8X"],
        vec!["plan", "--model", "no/such/folder"],
        vec!["train", "--frobnicate"],
        vec!["train", "--model", "x", "--data", "y", "--output", "z"],
        vec!["generate", "--model", "docs", "--prompt", "x"],
        vec!["config", "resolve", "no-such-file.json"],
        vec!["config", "explain", "stage3_max_resue_distance"],
        vec!["config", "presets", "zero5"],
        vec!["config", "new", "--stage", "4"],
        vec!["config", "verify", "no-such-file.json", "--", "deepspeed", "train.py"],
        vec!["checkpoint", "inspect", "docs"],
        vec!["checkpoint", "verify", "no-such-folder"],
        vec!["checkpoint", "export", "docs", "--output", "x"],
        vec!["data", "preview", "--model", "docs", "--data", "no-such-file.jsonl"],
        vec!["init", "--family", "qwen3"],
        vec!["bench", "nothing"],
        vec!["completions", "tcsh"],
    ] {
        for form in ["text", "json"] {
            let ended = zeroth(&[&arguments[..], &["--format", form]].concat());
            // `verify` stops at a bare --, after which --format belongs to another command.
            let codes: &[i32] = if arguments[0] == "checkpoint" { &[2, 4] } else { &[2] };
            assert!(codes.contains(&ended.code), "{arguments:?}: {} {}", ended.code, ended.stderr);
            assert!(ended.stdout.is_empty(), "{arguments:?} {form}: {}", ended.stdout);
            assert!(ended.stderr.contains("error: "), "{arguments:?} {form}: {}", ended.stderr);
            assert!(ended.is_orderly(), "{}", ended.stderr);
        }
    }
}

#[test]
fn unknown_flags_do_not_hide_other_arguments() {
    let model = model("Qwen3-0.6B");
    let ended = wrong(&["plan", "--ranks_per_hosts", "4", "--model", &model]);
    assert_eq!(errors(&ended).len(), 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("`--ranks_per_host`"), "{}", ended.stderr);
}

#[test]
fn numbers_out_of_range_are_told_the_range() {
    for (flag, value, range) in [
        ("--ranks", "-5", "must be a whole number from 1 to 4,096"),
        ("--max-steps", "-5", "must be a whole number of at least 1"),
        ("--max-length", "0", "must be a whole number of at least 1"),
        ("--seed", "-1", "must be a whole number of at least 0"),
        ("--lora-rank", "-1", "must be a whole number of at least 0"),
        ("--threads-per-rank", "1e3", "must be a whole number from 1 to 1,024"),
        ("--learning-rate", "-5", "must be at least 0 and at most 1e38"),
        ("--num-train-epochs", "many", "is not a number"),
    ] {
        let ended = wrong(&[&TRAIN[..], &[flag, value]].concat());
        let errors = errors(&ended);
        assert_eq!(errors.len(), 1, "{flag}: {}", ended.stderr);
        assert!(errors[0].contains(&format!("'{value}' for '{flag} <")), "{}", ended.stderr);
        assert!(errors[0].ends_with(range), "{flag}: {}", ended.stderr);
    }
}

#[test]
fn names_of_other_trainers_are_pointed_to_ours() {
    for (flags, pointer) in [
        (&["--train-type", "qlora"][..], "--train-type lora --quantize nf4"),
        (&["--val_size", "0.1"], "write `--split_dataset_ratio`"),
        (&["--sequence_len", "4096"], "write `--max_length`"),
        (&["--gradient-clipping", "1"], "write `--max-grad-norm`"),
    ] {
        let ended = wrong(&[&TRAIN[..], flags].concat());
        assert!(ended.stderr.contains(pointer), "{flags:?}: {}", ended.stderr);
    }
    for (command, pointer) in [
        (
            &["deepspeed", "--num_gpus=8", "train.py", "--deepspeed", "ds.json"][..],
            "`zeroth train --ranks N`",
        ),
        (&["swift", "sft", "--model", "x"], "`zeroth train`"),
        (&["finetune", "--model", "x"], "`zeroth train`"),
        (&["--format", "json", "torchrun", "train.py"], "`zeroth train --ranks N`"),
        (&["chat"], "`zeroth generate`"),
    ] {
        let ended = wrong(command);
        assert_eq!(errors(&ended).len(), 1, "{command:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(pointer), "{command:?}: {}", ended.stderr);
    }
}
