//! Unusual but valid configs: values that pass with a note, keys that are comments, deprecated forms.

use serde_json::{Value as Json, json};
use zeroth_config::check::{KeyStatus, Severity};

use super::{checked, verdict};

const BUCKET: &str = "zero_optimization.reduce_bucket_size";

/// Each row has the value after parsing, and what the message says about how it was written (`""` for nothing).
#[test]
fn values_that_pydantic_converts_are_converted_with_a_note() {
    let rows: [(&str, &str, Json, &str); 13] = [
        (
            r#"{"train_batch_size": "8"}"#,
            "train_batch_size",
            json!(8),
            "the text \"8\" is read as the number 8",
        ),
        (r#"{"gradient_clipping": " 1e0 "}"#, "gradient_clipping", json!(1.0), "is read as the number 1e0"),
        (
            r#"{"fp16": {"loss_scale": "1024"}}"#,
            "fp16.loss_scale",
            json!(1024.0),
            "is read as the number 1024",
        ),
        // Every preset writes numbers this way, so there is no note.
        (r#"{"zero_optimization": {"reduce_bucket_size": 5e8}}"#, BUCKET, json!(500_000_000), ""),
        (r#"{"train_batch_size": 1.0}"#, "train_batch_size", json!(1), ""),
        (r#"{"zero_optimization": {"reduce_bucket_size": 0.5e1}}"#, BUCKET, json!(5), ""),
        (
            r#"{"wall_clock_breakdown": "true"}"#,
            "wall_clock_breakdown",
            json!(true),
            "read as true; write true",
        ),
        (r#"{"wall_clock_breakdown": "False"}"#, "wall_clock_breakdown", json!(false), "read as false"),
        (r#"{"wall_clock_breakdown": 1}"#, "wall_clock_breakdown", json!(true), "read as true"),
        (r#"{"wall_clock_breakdown": 0.0}"#, "wall_clock_breakdown", json!(false), "read as false"),
        (r#"{"gradient_allreduce_op": "MEAN"}"#, "gradient_allreduce_op", json!("mean"), ""),
        (
            r#"{"optimizer": {"params": {"betas": ["0.9", 0.95]}}}"#,
            "optimizer.params.betas",
            json!([0.9, 0.95]),
            "0.9",
        ),
        (r#"{"gradient_accumulation_steps": "auto"}"#, "gradient_accumulation_steps", json!("auto"), ""),
    ];
    for (text, path, value, note) in rows {
        let report = checked(text);
        let verdict = verdict(&report, path);
        assert!(verdict.severity() < Severity::Error, "{text}: {}", verdict.message);
        assert_eq!(report.values.get(path).map(|found| &found.value), Some(&value), "{text}");
        assert!(verdict.message.contains(note), "{text}: {}", verdict.message);
        assert!(!note.is_empty() || !verdict.message.contains("read as"), "{text}: {}", verdict.message);
    }
}

#[test]
fn note_on_a_number_for_a_boolean_does_not_mention_quotes() {
    let report = checked(r#"{"wall_clock_breakdown": 1}"#);
    let message = &verdict(&report, "wall_clock_breakdown").message;
    assert!(!message.contains("quotes"), "there are none: {message}");
}

#[test]
fn null_counts_as_absent_with_a_note() {
    for (text, path) in [
        (r#"{"train_batch_size": null}"#, "train_batch_size"),
        (r#"{"fp16": {"enabled": null}}"#, "fp16.enabled"),
        (r#"{"zero_optimization": {"offload_param": null}}"#, "zero_optimization.offload_param"),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": null}}}"#,
            "zero_optimization.offload_optimizer.device",
        ),
        (r#"{"optimizer": null}"#, "optimizer"),
        (r#"{"scheduler": null}"#, "scheduler"),
        (r#"{"zeroth": {"recompute": null}}"#, "zeroth.recompute"),
    ] {
        let report = checked(text);
        let verdict = verdict(&report, path);
        assert!(report.is_ok(false), "{text}: {}", verdict.message);
        assert!(verdict.message.contains("null counts as absent"), "{text}: {}", verdict.message);
        assert!(report.values.get(path).is_none() && !report.values.has_section(path), "{text}");
    }
}

#[test]
fn unknown_keys_without_a_similar_name_are_warnings() {
    for (text, path) in [
        (r#"{"my_notes": "for the team"}"#, "my_notes"),
        (r#"{"zero_optimization": {"stage": 2, "colour": 7}}"#, "zero_optimization.colour"),
    ] {
        let report = checked(text);
        let verdict = verdict(&report, path);
        assert_eq!((verdict.status, verdict.severity()), (KeyStatus::Unknown, Severity::Warning), "{text}");
        assert!(verdict.message.contains("a name that begins with `_` is a comment"), "{}", verdict.message);
        assert!(report.is_ok(false) && !report.is_ok(true), "{text}: with --strict a warning counts");
    }
}

#[test]
fn keys_that_begin_with_an_underscore_are_comments_at_every_level() {
    let report = checked(
        r#"{"_comment": "mine", "_": {"stage": 9}, "fp16": {"_why": [1], "enabled": false},
            "optimizer": {"type": "AdamW", "params": {"_lr": -1}}, "autotuning": {"_tuned": {"by": "me"}}}"#,
    );
    let paths: Vec<&str> = report.verdicts.iter().map(|verdict| verdict.path.as_str()).collect();
    let expected = ["fp16", "fp16.enabled", "optimizer", "optimizer.type", "optimizer.params", "autotuning"];
    assert_eq!(paths, expected);
}

#[test]
fn boolean_zero_optimization_is_deprecated_but_works() {
    for (text, stage) in [(r#"{"zero_optimization": true}"#, 1), (r#"{"zero_optimization": false}"#, 0)] {
        let report = checked(text);
        let verdict = verdict(&report, "zero_optimization");
        assert_eq!(verdict.status, KeyStatus::Deprecated, "{text}");
        assert!(verdict.message.contains(&format!("write {{\"stage\": {stage}}}")), "{}", verdict.message);
        assert_eq!(report.values.get("zero_optimization.stage").unwrap().value, json!(stage), "{text}");
        assert!(report.is_ok(false), "{text}");
    }
}

#[test]
fn deprecated_keys_set_their_replacements() {
    for (text, old, new, value) in [
        (
            r#"{"zero_optimization": {"stage": 2, "cpu_offload": true}}"#,
            "zero_optimization.cpu_offload",
            "zero_optimization.offload_optimizer.device",
            json!("cpu"),
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "cpu_offload_param": true}}"#,
            "zero_optimization.cpu_offload_param",
            "zero_optimization.offload_param.device",
            json!("cpu"),
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": false}}"#,
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            json!(false),
        ),
        (
            r#"{"zero_optimization": true, "allgather_size": 5e8}"#,
            "allgather_size",
            "zero_optimization.allgather_bucket_size",
            json!(500_000_000),
        ),
        (r#"{"aio": {"thread_count": 4}}"#, "aio.thread_count", "aio.intra_op_parallelism", json!(4)),
    ] {
        let report = checked(text);
        let verdict = verdict(&report, old);
        assert_eq!(
            (verdict.status, verdict.severity()),
            (KeyStatus::Deprecated, Severity::Warning),
            "{text}"
        );
        let moved = report.values.get(new).unwrap_or_else(|| panic!("{text} does not ask for {new}"));
        assert_eq!(
            (&moved.value, moved.spelled.as_str(), moved.location),
            (&value, old, verdict.location),
            "{text}"
        );
    }
}

#[test]
fn parameters_of_unsupported_optimizers_and_schedulers_are_not_yet() {
    let report = checked(
        r#"{"optimizer": {"type": "onebitadam", "params": {"lr": 1e-3, "freeze_step": 400, "pipe": {"a": 1}}}}"#,
    );
    assert!(report.is_ok(false));
    for path in
        ["optimizer.type", "optimizer.params.lr", "optimizer.params.freeze_step", "optimizer.params.pipe"]
    {
        let verdict = verdict(&report, path);
        assert_eq!(verdict.status, KeyStatus::Unsupported, "{path}: {}", verdict.message);
    }
    let torch = checked(r#"{"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}}"#);
    assert_eq!(verdict(&torch, "scheduler.type").status, KeyStatus::Unsupported);
    assert_eq!(verdict(&torch, "scheduler.params.T_max").status, KeyStatus::Unsupported);
}
