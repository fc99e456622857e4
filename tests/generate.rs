//! `zeroth generate`: tokens and logits from model folders, and what it says where it cannot.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{root, zeroth, zeroth_in, zeroth_json};

const MODEL: &str = "tests/golden/qwen3-tied";

/// Prompt, logits and greedy continuation by transformers.
fn golden() -> Value {
    let text = fs::read_to_string(root().join("tests/golden/next_tokens.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["qwen3-tied"][2].clone()
}

fn list(ids: &Value) -> String {
    ids.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn tokens_and_logits_are_those_of_transformers() {
    let case = golden();
    let prompt = list(&case["prompt"]);
    let arguments =
        ["generate", "--model", MODEL, "--prompt-ids", &prompt, "--max-new-tokens", "8", "--device", "cpu"];
    let (code, found) = zeroth_json(&[&arguments[..], &["--logits"]].concat());
    assert_eq!(code, 0);
    assert_eq!((&found["prompt_ids"], &found["ids"]), (&case["prompt"], &case["greedy"]));
    assert_eq!((&found["text"], &found["end"]), (&Value::Null, &"length".into()), "it has no tokenizer");
    let pairs = found["logits"].as_array().unwrap().iter().zip(case["logits"].as_array().unwrap());
    for (found, expected) in pairs {
        assert!((found.as_f64().unwrap() - expected.as_f64().unwrap()).abs() < 1e-5, "{found} {expected}");
    }
    assert_eq!(found["logits"].as_array().unwrap().len(), case["logits"].as_array().unwrap().len());

    // For people, tokens come one after the other.
    let ended = zeroth(&arguments);
    assert_eq!(ended.stdout, format!("{}\n", list(&case["greedy"]).replace(',', " ")), "{}", ended.stderr);
    assert!(ended.stderr.contains("8 tokens after 7"), "{}", ended.stderr);
}

#[test]
fn chance_follows_the_seed_and_threads_change_nothing() {
    let text = |more: &[&str]| {
        let arguments =
            ["generate", "--model", MODEL, "--prompt-ids", "1,2", "--temperature", "2", "--device", "cpu"];
        let (code, found) = zeroth_json(&[&arguments[..], more].concat());
        assert_eq!(code, 0);
        found["ids"].clone()
    };
    let first = text(&["--seed", "1", "--threads", "1", "--max-new-tokens", "20"]);
    assert_eq!(first, text(&["--seed", "1", "--threads", "3", "--max-new-tokens", "20"]));
    assert_ne!(first, text(&["--seed", "2", "--max-new-tokens", "20"]));
    assert_eq!(
        text(&["--top-k", "1", "--max-new-tokens", "9"]),
        text(&["--temperature", "0", "--max-new-tokens", "9"])
    );
}

/// The golden model with a tokenizer of words that are numbers.
fn with_tokenizer(folder: &Path) {
    for name in ["config.json", "model.safetensors"] {
        fs::copy(root().join(MODEL).join(name), folder.join(name)).unwrap();
    }
    let vocab: serde_json::Map<String, Value> = (0..30).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

#[test]
fn a_text_goes_through_the_folders_tokenizer_and_back() {
    let folder = tempfile::tempdir().unwrap();
    with_tokenizer(folder.path());
    fs::write(folder.path().join("prompt.txt"), "w3 w1\n").unwrap();
    let run = |more: &[&str]| {
        let fixed =
            ["generate", "--model", ".", "--device", "cpu", "--max-new-tokens", "4", "--format", "json"];
        let ended = zeroth_in(folder.path(), &[&fixed[..], more].concat());
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        serde_json::from_str::<Value>(&ended.stdout).unwrap()
    };
    let found = run(&["--prompt", "w3 w1"]);
    assert_eq!(found["prompt_ids"], serde_json::json!([3, 1]));
    let ids = found["ids"].as_array().unwrap();
    let known: Vec<String> =
        ids.iter().map(|id| id.as_i64().unwrap()).filter(|id| *id < 30).map(|id| format!("w{id}")).collect();
    assert_eq!(found["text"], known.join(" "));
    assert_eq!(found, run(&["--prompt-file", "prompt.txt"]));
    assert_eq!(found, run(&["--prompt-ids", "3, 1"]));
}

#[test]
fn an_empty_prompt_begins_a_text_or_is_called_empty() {
    let folder = tempfile::tempdir().unwrap();
    with_tokenizer(folder.path());
    let run = || {
        let fixed = ["generate", "--model", ".", "--device", "cpu", "--max-new-tokens", "4"];
        zeroth_in(folder.path(), &[&fixed[..], &["--format", "json", "--prompt", ""]].concat())
    };
    let refused = run();
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("the prompt is empty"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("row"), "{}", refused.stderr);
    // transformers begins with bos_token_id where nothing is given.
    fs::write(folder.path().join("generation_config.json"), r#"{"bos_token_id": 3}"#).unwrap();
    let begun = run();
    assert_eq!(begun.code, 0, "{}", begun.stderr);
    assert!(begun.stderr.contains("the prompt is empty"), "{}", begun.stderr);
    let found: Value = serde_json::from_str(&begun.stdout).unwrap();
    assert_eq!(found["prompt_ids"], serde_json::json!([3]));
    assert_eq!(found["ids"].as_array().unwrap().len(), 4);
}

#[test]
fn what_cannot_be_done_is_said_with_what_to_change() {
    let cases: [(&[&str], &str); 9] = [
        (&["--prompt", "hello"], "no tokenizer.json"),
        (&["--prompt-ids", "1,99999"], "vocabulary"),
        (&["--prompt-ids", "1,x"], "not a token"),
        (&["--prompt-ids", "1", "--prompt", "hello"], "cannot be used with"),
        (&[], "required"),
        (&["--prompt-ids", "1", "--temperature", "-1"], "temperature is -1"),
        (&["--prompt-ids", "1", "--top-p", "0"], "top_p is 0"),
        (&["--prompt-ids", "1", "--logits"], "--format json"),
        (&["--prompt-ids", "1", "--bf16", "--fp32"], "one precision"),
    ];
    for (more, expected) in cases {
        let ended = zeroth(&[&["generate", "--model", MODEL, "--device", "cpu"], more].concat());
        assert_eq!(ended.code, 2, "{more:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(expected) && ended.is_orderly(), "{more:?}: {}", ended.stderr);
    }
    let bare = zeroth(&["generate", "--model", "examples/gsm8k/tiny-qwen3", "--prompt-ids", "1"]);
    assert!(bare.code == 2 && bare.stderr.contains("no *.safetensors"), "{}", bare.stderr);
}
