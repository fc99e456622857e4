//! The page generated from the table is up to date, and the JSON Schema agrees with `check`.

use std::path::Path;

use serde_json::json;
use zeroth_config::check::check;
use zeroth_config::preset::PRESETS;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::{docs, json_schema};

#[test]
fn docs_config_md_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.md");
    let page = docs::config_page();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/config.md is stale: ZEROTH_BLESS=1 cargo test -p zeroth-config --test it pages:: writes it anew"
    );
}

#[test]
fn json_schema_accepts_every_preset() {
    let validator = jsonschema::validator_for(&json_schema::json_schema()).unwrap();
    for preset in PRESETS {
        let config = serde_json::from_str(preset.text).unwrap();
        let errors: Vec<String> = validator.iter_errors(&config).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{}: {errors:?}", preset.name);
    }
}

#[test]
fn json_schema_and_check_agree() {
    let validator = jsonschema::validator_for(&json_schema::json_schema()).unwrap();
    for (config, fine) in [
        (json!({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5e7}}), true),
        (json!({"zero_optimization": true}), true),
        (json!({"zero_optimization": {"stage": 4}}), false),
        (json!({"zero_optimization": {"stage3_prefetch_bucketsize": 5e7}}), false),
        (json!({"gradient_cliping": 1.0}), false),
        (json!({"train_batch_size": 0}), false),
        (json!({"train_batch_size": 1.5}), false),
        (json!({"fp16": {"hysteresis": 0}}), false),
        (json!({"bfloat16": {"enabled": "auto"}}), true),
        (json!({"_note": "mine", "use_dynamic_tiling": true}), true),
        (json!({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}}), false),
        (json!({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}), true),
        (json!({"zero_optimization": {"offload_param": {"device": "CPU"}}}), true),
        (json!({"zero_optimization": {"offload_param": {"device": "gpu"}}}), false),
        (json!({"zeroth": {"recompute": "block"}}), true),
        (json!({"zeroth": {"recompute": "everything"}}), false),
    ] {
        let document = parse(ConfigSource::from_text("test", config.to_string())).unwrap();
        assert_eq!(validator.is_valid(&config), fine, "schema: {config}");
        assert_eq!(check(&document).is_ok(false), fine, "check: {config}");
    }
}
