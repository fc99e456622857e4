//! Notes that `config check` adds to honoured keys.

use zeroth_config::check::{KeyStatus, Severity, check};
use zeroth_config::preset::Preset;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::schema;

/// The status and message of the verdict on a key.
fn verdict(text: &str, path: &str) -> (KeyStatus, String) {
    let report = check(&parse(ConfigSource::from_text("ds.json", text)).unwrap());
    let verdict = report.verdicts.iter().find(|verdict| verdict.path == path).unwrap();
    assert_eq!(verdict.severity() == Severity::Fine, verdict.status == KeyStatus::Honoured, "{path}");
    (verdict.status, verdict.message.clone())
}

const BOUNDS: [(&str, &str); 4] = [
    ("stage3_max_live_parameters", "1e9"),
    ("stage3_max_reuse_distance", "1e9"),
    ("stage3_prefetch_bucket_size", "5e7"),
    ("memory_efficient_linear", "true"),
];

#[test]
fn limits_of_gathers_have_a_note_on_where_they_apply() {
    for (name, value) in BOUNDS {
        let path = format!("zero_optimization.{name}");
        let text =
            |gather: &str| format!(r#"{{"zero_optimization": {{"stage": 3, "{name}": {value}}}{gather}}}"#);
        for gather in ["", r#", "zeroth": {"gather": "view"}"#, r#", "zeroth": {"gather": "auto"}"#] {
            let (status, message) = verdict(&text(gather), &path);
            assert_eq!(status, KeyStatus::Honoured, "{name}");
            for part in
                ["on GPUs", "offload_param", "zeroth.gather \"copy\"", "on CPU", "satisfies any bound"]
            {
                assert!(message.contains(part), "{name}: {message}");
            }
        }
        let copied = verdict(&text(r#", "zeroth": {"gather": "copy"}"#), &path);
        assert_eq!(copied, (KeyStatus::Honoured, String::new()), "{name}");
    }
}

#[test]
fn limits_of_gathers_in_the_zero3_preset_have_the_note() {
    let zero3 = Preset::find("zero3").unwrap().text;
    for name in ["stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"] {
        let (status, message) = verdict(zero3, &format!("zero_optimization.{name}"));
        assert!(status == KeyStatus::Honoured && message.contains("on CPU"), "{name}: {message}");
    }
}

#[test]
fn gather_has_an_effect_at_stage_3_only() {
    let text = |stage: u8, gather: &str| {
        format!(r#"{{"zero_optimization": {{"stage": {stage}}}, "zeroth": {{"gather": "{gather}"}}}}"#)
    };
    let (status, message) = verdict(&text(3, "view"), "zeroth.gather");
    assert!(status == KeyStatus::Honoured && message.contains("a run on GPUs refuses it"), "{message}");
    assert_eq!(verdict(&text(3, "copy"), "zeroth.gather"), (KeyStatus::Honoured, String::new()));
    let (status, message) = verdict(&text(2, "copy"), "zeroth.gather");
    assert!(status == KeyStatus::NoEffect && message.contains("only stage 3"), "{message}");
    let (status, message) = verdict(&text(3, "window"), "zeroth.gather");
    assert!(status == KeyStatus::Invalid && message.contains("view"), "{message}");
}

#[test]
fn decay_without_total_num_steps_has_a_note_on_its_default() {
    for name in ["WarmupDecayLR", "WarmupCosineLR", "warmupdecaylr"] {
        let text = |params: &str| {
            format!(r#"{{"scheduler": {{"type": "{name}", "params": {{"warmup_num_steps": 10{params}}}}}}}"#)
        };
        let (status, message) = verdict(&text(""), "scheduler.type");
        assert_eq!(status, KeyStatus::Honoured);
        for part in
            ["total_num_steps is absent", "the number of steps of the run", "DeepSpeed fails without it"]
        {
            assert!(message.contains(part), "{name}: {message}");
        }
        for given in [r#", "total_num_steps": 100"#, r#", "total_num_steps": "auto""#] {
            assert_eq!(
                verdict(&text(given), "scheduler.type"),
                (KeyStatus::Honoured, String::new()),
                "{name} {given}"
            );
        }
        let bare = format!(r#"{{"scheduler": {{"type": "{name}"}}}}"#);
        assert!(verdict(&bare, "scheduler.type").1.contains("total_num_steps is absent"));
    }
    let warmup = r#"{"scheduler": {"type": "WarmupLR"}}"#;
    assert_eq!(verdict(warmup, "scheduler.type"), (KeyStatus::Honoured, String::new()));
}

#[test]
fn only_keys_that_can_be_honoured_have_a_note() {
    for key in schema::keys().filter(|key| key.note.is_some()) {
        assert!(matches!(key.effect, schema::Effect::Works | schema::Effect::WhileEnabled), "{}", key.path);
    }
}
