//! Optimizer hyperparameters out of range: refused before the first step, by flag and by key.

use serde_json::{Value, json};

use super::{text, train, written};

/// Dry-runs these flags.
fn tried(flags: &[&str]) -> crate::common::Ended {
    let folder = tempfile::tempdir().unwrap();
    train("qwen3-tied", &folder.path().join("run"), &[flags, &["--dry-run"]].concat())
}

#[test]
fn flags_out_of_bounds_are_refused_by_name() {
    for (flag, value) in [
        ("--adam-beta1", "1"),
        ("--adam-beta1", "-0.1"),
        ("--adam-beta2", "1.5"),
        ("--adam-beta2", "NaN"),
        ("--adam-epsilon", "0"),
        ("--adam-epsilon", "-1e-8"),
        ("--adam-epsilon", "1e-60"),
        ("--adam-epsilon", "1e39"),
        ("--learning-rate", "1e300"),
        ("--learning-rate", "-1"),
        ("--weight-decay", "1e300"),
        ("--weight-decay", "inf"),
        ("--max-grad-norm", "-1"),
    ] {
        let ended = tried(&[flag, value]);
        assert_eq!(ended.code, 2, "{flag} {value}: {}", ended.stderr);
        assert!(ended.stderr.contains(flag) && ended.stderr.contains("must be"), "{}", ended.stderr);
    }
}

/// Dry-runs a config with these parameters.
fn tried_file(config: &Value) -> crate::common::Ended {
    let folder = tempfile::tempdir().unwrap();
    let lines = serde_json::to_string_pretty(config).unwrap();
    let file = written(folder.path(), "ds.json", &[lines]);
    tried(&["--deepspeed", text(&file)])
}

#[test]
fn keys_out_of_bounds_are_refused_with_their_place() {
    for (kind, key, value) in [
        ("AdamW", "betas", json!([1.0, 0.999])),
        ("AdamW", "betas", json!([0.9, 1.0])),
        ("AdamW", "eps", json!(0)),
        ("AdamW", "eps", json!(1e-60)),
        ("AdamW", "eps", json!(-1e-8)),
        ("AdamW", "lr", json!(1e300)),
        ("AdamW", "weight_decay", json!(1e300)),
        ("AdamW", "weight_decay", json!(-0.1)),
        ("Adagrad", "eps", json!(0)),
        ("Adagrad", "lr", json!(1e39)),
        ("Adagrad", "initial_accumulator_value", json!(1e300)),
        ("AdEMAMix", "betas", json!([0.9, 0.999, 1.0])),
        ("AdEMAMix", "t_beta3", json!(0)),
        ("SGD", "momentum", json!(1.5)),
        ("SGD", "dampening", json!(1e300)),
    ] {
        let ended = tried_file(&json!({"optimizer": {"type": kind, "params": {key: value}}}));
        assert_eq!(ended.code, 2, "{kind} {key} {value}: {}", ended.stderr);
        for words in ["out of bounds", key, "ds.json:"] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
    }
    for (kind, key) in [
        ("WarmupLR", "warmup_max_lr"),
        ("WarmupLR", "warmup_min_lr"),
        ("WarmupCosineLR", "cos_min_ratio"),
        ("OneCycle", "cycle_max_lr"),
        ("LRRangeTest", "lr_range_test_min_lr"),
        ("LRRangeTest", "lr_range_test_step_rate"),
    ] {
        let ended = tried_file(&json!({"scheduler": {"type": kind, "params": {key: 1e300}}}));
        assert_eq!(ended.code, 2, "{kind} {key}: {}", ended.stderr);
        assert!(ended.stderr.contains("out of bounds") && ended.stderr.contains(key), "{}", ended.stderr);
    }
    let ended = tried_file(&json!({"gradient_clipping": -1.0}));
    assert_eq!(ended.code, 2, "{}", ended.stderr);
}

#[test]
fn common_hyperparameters_are_accepted() {
    for flags in [
        ["--learning-rate", "0"],
        ["--adam-epsilon", "1e-10"],
        ["--adam-epsilon", "1e-30"],
        ["--adam-beta1", "0"],
        ["--adam-beta2", "0.9999"],
        ["--weight-decay", "0"],
        ["--max-grad-norm", "0"],
    ] {
        tried(&flags).assert_done();
    }
    for params in [
        json!({"betas": [0.0, 0.99], "eps": 1e-10, "lr": 0, "weight_decay": 1}),
        json!({"betas": [0.9, 0.9999], "eps": 1e-16}),
    ] {
        tried_file(&json!({"optimizer": {"type": "AdamW", "params": params}})).assert_done();
    }
    let ademamix = json!({"betas": [0.0, 0.99, 0.9999], "alpha": 0, "t_alpha": null, "t_beta3": 3});
    tried_file(&json!({"optimizer": {"type": "AdEMAMix", "params": ademamix}})).assert_done();
    let sgd = json!({"momentum": 0.99, "dampening": 0.1, "lr": 10});
    tried_file(&json!({"optimizer": {"type": "SGD", "params": sgd}})).assert_done();
}
