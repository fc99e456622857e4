//! Text from files cannot control a terminal: escape sequences in configs, models, data and names are sanitised.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::common::{Ended, root, zeroth};

/// A window title, a colour, a bell, a carriage return, a C1 sequence, and right-to-left text.
const EVIL: &str = "\u{1b}]0;owned\u{7}\u{1b}[31mred\r\u{9b}2J\u{202e}txt\u{2066}";

fn is_command(character: char) -> bool {
    let is_direction = matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (character.is_control() && character != '\n' && character != '\t') || is_direction
}

/// Asserts that `what` is printed with its sequences escaped.
fn assert_sanitised(ended: &Ended, what: &str) {
    for text in [&ended.stdout, &ended.stderr] {
        assert!(!text.contains(is_command), "{what}: {text:?}");
    }
    let both = format!("{}{}", ended.stdout, ended.stderr);
    assert!(both.contains("u{1b}") || both.contains("u001b"), "{what}: {both}");
    // Tokens of the first batch are separated.
    assert!(both.contains("owned") || both.contains("own] [ed"), "{what}: {both}");
}

fn written(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A DeepSpeed file with such a key, and one with such a value.
fn configs(folder: &Path) -> [String; 2] {
    [
        written(
            folder,
            "key.json",
            &json!({ EVIL: 1, "zero_optimization": { "stage": 2, EVIL: true } }).to_string(),
        ),
        written(folder, "value.json", &json!({ "optimizer": { "type": EVIL } }).to_string()),
    ]
}

fn golden() -> (String, String) {
    let model: PathBuf = root().join("tests/golden/qwen3-tied");
    let data = model.join("data.jsonl");
    (model.to_str().unwrap().to_owned(), data.to_str().unwrap().to_owned())
}

#[test]
fn escapes_in_configs_are_sanitised() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = golden();
    let output = folder.path().join("run");
    for config in configs(folder.path()) {
        assert_sanitised(&zeroth(&["config", "check", &config]), "check");
        assert_sanitised(&zeroth(&["config", "check", &config, "--format", "json"]), "check as JSON");
        let train = ["train", "--device", "cpu", "--model", &model, "--data", &data, "--deepspeed", &config];
        let ended =
            zeroth(&[&train[..], &["--max-steps", "1", "--output", output.to_str().unwrap()]].concat());
        assert!(!format!("{}{}", ended.stdout, ended.stderr).contains(is_command), "{:?}", ended.stderr);
        let ended = zeroth(&["plan", "--model", &model, "--ranks", "2", "--deepspeed", &config]);
        assert!(!format!("{}{}", ended.stdout, ended.stderr).contains(is_command), "{:?}", ended.stderr);
    }
}

#[test]
fn sanitised_json_keeps_its_value() {
    let folder = tempfile::tempdir().unwrap();
    let [key, _] = configs(folder.path());
    let ended = zeroth(&["config", "check", &key, "--format", "json"]);
    let found: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let paths: Vec<&str> =
        found["keys"].as_array().unwrap().iter().filter_map(|key| key["path"].as_str()).collect();
    assert!(paths.contains(&EVIL), "{paths:?}");
}

#[test]
fn escapes_in_model_names_are_sanitised() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({ "model_type": EVIL, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64 });
    let written = written(folder.path(), "model/config.json", &config.to_string());
    let model = Path::new(&written).parent().unwrap().to_str().unwrap();
    let (_, data) = golden();
    let output = folder.path().join("run");
    let output = output.to_str().unwrap();
    let train = ["train", "--device", "cpu", "--model", model, "--data", &data, "--output", output];
    assert_sanitised(&zeroth(&train), "train");
    assert_sanitised(&zeroth(&["plan", "--model", model, "--ranks", "2"]), "plan");
    assert_sanitised(&zeroth(&["data", "preview", "--model", model, "--data", &data]), "data preview");
    assert_sanitised(&zeroth(&["generate", "--model", model, "--prompt", "Hi"]), "generate");
}

#[test]
fn escapes_in_rows_and_file_names_are_sanitised() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("examples/gsm8k/tiny-qwen3");
    let model = model.to_str().unwrap();
    let row = json!({ "text": format!("a row {EVIL}") }).to_string();
    let shown = written(folder.path(), "rows.jsonl", &row);
    assert_sanitised(&zeroth(&["data", "preview", "--model", model, "--data", &shown]), "a row");
    let wrong = written(folder.path(), "wrong.jsonl", &json!({ EVIL: EVIL }).to_string());
    assert_sanitised(&zeroth(&["data", "preview", "--model", model, "--data", &wrong]), "a column");
    let output = folder.path().join("run");
    let output = output.to_str().unwrap();
    let train = ["train", "--device", "cpu", "--model", model, "--output", output, "--data"];
    assert_sanitised(&zeroth(&[&train[..], &[&wrong]].concat()), "train");
    let dry = ["--dry-run", "--max-steps", "1"];
    assert_sanitised(&zeroth(&[&train[..], &[&shown], &dry].concat()), "the first batch");
    let named = written(folder.path(), &format!("{EVIL}.jsonl"), "{}");
    assert_sanitised(&zeroth(&[&train[..], &[&named]].concat()), "a name");
    assert_sanitised(&zeroth(&["data", "preview", "--model", model, "--data", &named]), "a name");
}

#[test]
fn escapes_in_template_errors_are_sanitised() {
    let folder = tempfile::tempdir().unwrap();
    let from = root().join("examples/gsm8k/tiny-qwen3");
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
        }
    }
    let template = format!("{{{{ raise_exception({}) }}}}", json!(EVIL));
    written(&model, "tokenizer_config.json", &json!({ "chat_template": template }).to_string());
    written(&model, "chat_template.jinja", &template);
    let row = json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Ho" }] });
    let data = written(folder.path(), "rows.jsonl", &row.to_string());
    let ended = zeroth(&["data", "preview", "--model", model.to_str().unwrap(), "--data", &data]);
    assert_sanitised(&ended, "data preview");
}
