//! End-of-text and begin-of-text tokens of a model folder.

use std::path::Path;

use serde_json::Value;

/// Every end-of-text id in generation_config.json, config.json or the tokenizer, sorted. Chat models end a turn with
/// one token and a text with another, and the files often disagree, so any of them ends the text. Missing or invalid
/// files are skipped.
pub fn stop_ids(folder: &Path) -> Vec<i32> {
    let read = |name: &str| read(folder, name);
    let mut ids: Vec<i32> = ["generation_config.json", "config.json"]
        .iter()
        .flat_map(|name| match &read(name)["eos_token_id"] {
            Value::Array(several) => several.iter().filter_map(id).collect::<Vec<_>>(),
            one => id(one).into_iter().collect(),
        })
        .collect();
    // The tokenizer gives the token's text, or an object with it.
    let eos = &read("tokenizer_config.json")["eos_token"];
    if let Some(eos) = eos.as_str().or_else(|| eos["content"].as_str()) {
        let tokenizer = read("tokenizer.json");
        let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        ids.extend(added.filter(|token| token["content"] == eos).filter_map(|token| id(&token["id"])));
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The begin-of-text token, from the files that transformers reads; an empty prompt starts with it.
pub fn begin_id(folder: &Path) -> Option<i32> {
    let files = ["generation_config.json", "config.json"];
    files.iter().find_map(|name| id(&read(folder, name)["bos_token_id"]))
}

/// Parses a JSON file of the folder; `Null` if it is missing or invalid.
fn read(folder: &Path, name: &str) -> Value {
    let text = std::fs::read(folder.join(name)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or(Value::Null)
}

fn id(value: &Value) -> Option<i32> {
    value.as_i64().and_then(|id| i32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_config_overrides_config_for_the_begin_token() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(begin_id(folder.path()), None);
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("config.json", r#"{"bos_token_id": 5}"#);
        write("generation_config.json", r#"{"bos_token_id": null}"#);
        assert_eq!(begin_id(folder.path()), Some(5));
        write("generation_config.json", r#"{"bos_token_id": 7}"#);
        assert_eq!(begin_id(folder.path()), Some(7));
    }

    #[test]
    fn stop_ids_are_collected_from_all_files() {
        let folder = tempfile::tempdir().unwrap();
        assert!(stop_ids(folder.path()).is_empty());
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("config.json", r#"{"eos_token_id": 5}"#);
        write("generation_config.json", r#"{"eos_token_id": [9, 5]}"#);
        assert_eq!(stop_ids(folder.path()), [5, 9]);
        write(
            "tokenizer.json",
            r#"{"added_tokens": [{"id": 2, "content": "<end>"}, {"id": 3, "content": "<pad>"}]}"#,
        );
        write("tokenizer_config.json", r#"{"eos_token": "<end>"}"#);
        assert_eq!(stop_ids(folder.path()), [2, 5, 9]);
        write("tokenizer_config.json", r#"{"eos_token": {"content": "<pad>"}}"#);
        assert_eq!(stop_ids(folder.path()), [3, 5, 9]);
        write("generation_config.json", "{");
        write("config.json", r#"{"eos_token_id": null}"#);
        assert_eq!(stop_ids(folder.path()), [3]);
    }
}
