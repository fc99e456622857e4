//! What `config check` adds to keys that are honoured.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use zeroth_config::check::{Severity, Status, check};
use zeroth_config::read::{Source, parse};
use zeroth_config::schema;

/// The verdict on a key: its status and message.
fn verdict(text: &str, path: &str) -> (Status, String) {
    let report = check(&parse(Source::from_text("ds.json", text)).unwrap());
    let verdict = report.verdicts.iter().find(|verdict| verdict.path == path).unwrap();
    assert_eq!(verdict.severity() == Severity::Fine, verdict.status == Status::Honoured, "{path}");
    (verdict.status, verdict.message.clone())
}

#[test]
fn a_decay_without_its_last_step_says_where_the_last_step_comes_from() {
    for name in ["WarmupDecayLR", "WarmupCosineLR", "warmupdecaylr"] {
        let text = |params: &str| {
            format!(r#"{{"scheduler": {{"type": "{name}", "params": {{"warmup_num_steps": 10{params}}}}}}}"#)
        };
        let (status, message) = verdict(&text(""), "scheduler.type");
        assert_eq!(status, Status::Honoured);
        for part in
            ["total_num_steps is absent", "the number of steps of the run", "DeepSpeed fails without it"]
        {
            assert!(message.contains(part), "{name}: {message}");
        }
        for given in [r#", "total_num_steps": 100"#, r#", "total_num_steps": "auto""#] {
            assert_eq!(
                verdict(&text(given), "scheduler.type"),
                (Status::Honoured, String::new()),
                "{name} {given}"
            );
        }
        let bare = format!(r#"{{"scheduler": {{"type": "{name}"}}}}"#);
        assert!(verdict(&bare, "scheduler.type").1.contains("total_num_steps is absent"));
    }
    let warmup = r#"{"scheduler": {"type": "WarmupLR"}}"#;
    assert_eq!(verdict(warmup, "scheduler.type"), (Status::Honoured, String::new()));
}

#[test]
fn only_keys_that_can_be_honoured_have_a_note() {
    for key in schema::keys().filter(|key| key.note.is_some()) {
        assert!(matches!(key.effect, schema::Effect::Works | schema::Effect::WhileEnabled), "{}", key.path);
    }
}
