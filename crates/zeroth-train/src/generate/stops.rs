//! The tokens that end a text, as a model folder names them.

use std::path::Path;

use serde_json::Value;

/// Every end-of-text token that generation_config.json, config.json or the tokenizer of a folder names, in rising order.
/// Models are trained to end a turn with one and a text with another, and their files do not always agree: any ends it.
/// A file that is missing or no JSON names none.
pub fn stop_ids(folder: &Path) -> Vec<i32> {
    let read = |name: &str| read(folder, name);
    let mut ids: Vec<i32> = ["generation_config.json", "config.json"]
        .iter()
        .flat_map(|name| match &read(name)["eos_token_id"] {
            Value::Array(several) => several.iter().filter_map(id).collect::<Vec<_>>(),
            one => id(one).into_iter().collect(),
        })
        .collect();
    // The tokenizer names a token by its text, alone or as an object with its text.
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

/// The token that begins a text, by the files that transformers asks: what an empty prompt goes on from.
pub fn begin_id(folder: &Path) -> Option<i32> {
    let files = ["generation_config.json", "config.json"];
    files.iter().find_map(|name| id(&read(folder, name)["bos_token_id"]))
}

/// A file of the folder; null where it is not there or no JSON.
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
    fn a_text_begins_as_the_generation_config_says_else_the_config() {
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
    fn every_file_that_names_an_end_of_text_counts() {
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
