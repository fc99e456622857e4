//! Damaged tokenizer.json files are refused, although the tokenizers crate panics on some.

use std::fs;

use serde_json::{Value, json};

use super::{new_model, train_on, written};

/// Trains on text with a modified tokenizer.
fn refused(change: impl Fn(&mut Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let model = new_model(folder.path(), 64, 2, 128, 256);
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {
            "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": [["a", "b"]],
            "unk_token": null, "dropout": null, "fuse_unk": false, "byte_fallback": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
        },
    });
    change(&mut tokenizer);
    fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(model.join("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    let data = written(folder.path(), "rows.jsonl", &[r#"{"text": "ab ab"}"#]);
    let ended = train_on(&model, &data, &folder.path().join("run"), &["--max-steps", "1"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    ended.stderr
}

#[test]
fn an_unloadable_tokenizer_is_refused() {
    // No merge is long enough for this prefix.
    let said = refused(|tokenizer| tokenizer["model"]["continuing_subword_prefix"] = "a long prefix".into());
    assert!(said.contains("tokenizer.json is not a valid tokenizer"), "{said}");
}

#[test]
fn a_tokenizer_failure_is_reported_with_its_row() {
    // A post-processor with a special token missing from its own list.
    let said = refused(|tokenizer| {
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        });
    });
    assert!(said.contains("rows.jsonl: line 1: "), "{said}");
    assert!(said.contains("tokenizer.json is damaged"), "{said}");
}
