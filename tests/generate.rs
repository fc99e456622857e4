//! `zeroth generate`: tokens and logits from model folders, answers to rows, and what it says where it cannot.

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
    let cases: [(&[&str], &str); 13] = [
        (&["--prompt", "hello"], "no tokenizer.json"),
        (&["--prompt-ids", "1,99999"], "vocabulary"),
        (&["--prompt-ids", "1,x"], "not a token"),
        (&["--prompt-ids", "1", "--prompt", "hello"], "cannot be used with"),
        (&[], "no tokenizer.json"),
        (&["--prompt-ids", "1", "--temperature", "-1"], "temperature is -1"),
        (&["--prompt-ids", "1", "--top-p", "0"], "top_p is 0"),
        (&["--prompt-ids", "1", "--logits"], "--format json"),
        (&["--prompt-ids", "1", "--bf16", "--fp32"], "one precision"),
        (&["--prompt-ids", "1", "--data", "rows.jsonl"], "cannot be used with"),
        (&["--data", "rows.jsonl", "--temperature", "1"], "cannot be used with"),
        (&["--prompt-ids", "1", "--rows", "2"], "cannot be used with"),
        (&["--data", "no/such/rows.jsonl"], "data file no/such/rows.jsonl does not exist"),
    ];
    for (more, expected) in cases {
        let ended = zeroth(&[&["generate", "--model", MODEL, "--device", "cpu"], more].concat());
        assert_eq!(ended.code, 2, "{more:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(expected) && ended.is_orderly(), "{more:?}: {}", ended.stderr);
    }
    let bare = zeroth(&["generate", "--model", "examples/gsm8k/tiny-qwen3", "--prompt-ids", "1"]);
    assert!(bare.code == 2 && bare.stderr.contains("no *.safetensors"), "{}", bare.stderr);
}

/// Rows of ready tokens: prompts, and what transformers generates after them.
fn golden_rows() -> Vec<(Vec<i64>, Vec<i64>)> {
    let text = fs::read_to_string(root().join("tests/golden/next_tokens.json")).unwrap();
    let cases = serde_json::from_str::<Value>(&text).unwrap()["qwen3-tied"].clone();
    let ids = |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
    cases.as_array().unwrap().iter().map(|case| (ids(&case["prompt"]), ids(&case["greedy"]))).collect()
}

fn ready_row(prompt: &[i64], answer: &[i64]) -> String {
    let labels = [vec![-100; prompt.len()], answer.to_vec()].concat();
    let ids = [prompt, answer].concat();
    serde_json::json!({"input_ids": ids, "labels": labels}).to_string()
}

#[test]
fn answers_to_rows_are_compared_with_the_expected_ones() {
    let golden = golden_rows();
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    let mut lines: Vec<String> = golden.iter().map(|(prompt, greedy)| ready_row(prompt, greedy)).collect();
    // A shorter answer without an end is compared as far as it goes; one wrong token makes an answer wrong.
    let (prompt, greedy) = &golden[0];
    lines.push(ready_row(prompt, &greedy[..3]));
    lines.push(ready_row(prompt, &[&greedy[..3], &[(greedy[3] + 1) % 20]].concat()));
    fs::write(&data, lines.join("\n")).unwrap();
    let (rows, exact) = (lines.len(), lines.len() - 1);

    let arguments = ["generate", "--model", MODEL, "--device", "cpu", "--data", data.to_str().unwrap()];
    let (code, found) = zeroth_json(&arguments);
    assert_eq!(code, 0);
    assert_eq!((&found["rows"], &found["exact_matches"]), (&rows.into(), &exact.into()), "{found}");
    assert!((found["exact_match"].as_f64().unwrap() - exact as f64 / rows as f64).abs() < 1e-12);
    let answers = found["answers"].as_array().unwrap();
    for ((prompt, greedy), answer) in golden.iter().zip(answers) {
        assert_eq!((&answer["prompt_ids"], &answer["ids"]), (&prompt[..].into(), &greedy[..].into()));
        assert_eq!((&answer["exact_match"], &answer["text"]), (&true.into(), &Value::Null));
    }
    assert_eq!(answers[exact]["exact_match"], false);
    assert_eq!(answers[exact]["place"]["line"], rows);

    // For people: the first rows, and the share of all.
    let ended = zeroth(&[&arguments[..], &["--rows", "2"]].concat());
    assert_eq!(ended.stdout.matches("✓ ").count(), 2, "{}", ended.stdout);
    let (prompt, greedy) = (list(&golden[0].0[..].into()), list(&golden[0].1[..].into()));
    let [prompt, greedy] = [prompt, greedy].map(|ids| ids.replace(',', " "));
    let first = format!("✓ {prompt}\n  answer    {greedy}\n  expected  {greedy}\n");
    assert!(ended.stdout.starts_with(&first), "{}", ended.stdout);
    let share = format!("exact match {exact}/{rows} ({:.1} %)\n", 100.0 * exact as f64 / rows as f64);
    assert!(ended.stdout.ends_with(&share), "{}", ended.stdout);

    let one = zeroth(&[&arguments[..], &["--max-eval-samples", "1", "--max-new-tokens", "2"]].concat());
    assert!(one.stdout.ends_with("exact match 0/1 (0.0 %)\n"), "{}", one.stdout);
    assert!(one.stderr.contains("--max-new-tokens 2 is too small"), "{}", one.stderr);
}

#[test]
fn texts_are_answered_up_to_the_token_that_ends_them() {
    let (prompt, greedy) = golden_rows().swap_remove(2);
    let folder = tempfile::tempdir().unwrap();
    with_tokenizer(folder.path());
    let write = |name: &str, value: Value| fs::write(folder.path().join(name), value.to_string()).unwrap();
    let most = prompt.iter().chain(&greedy).max().unwrap() + 1;
    let vocab: serde_json::Map<String, Value> = (0..most).map(|id| (format!("w{id}"), id.into())).collect();
    let text = fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    tokenizer["model"]["vocab"] = vocab.into();
    // The third token that the model generates ends its text.
    let end = format!("w{}", greedy[2]);
    tokenizer["added_tokens"] = serde_json::json!([{
        "id": greedy[2], "content": end, "single_word": true, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    }]);
    write("tokenizer.json", tokenizer);
    write("tokenizer_config.json", serde_json::json!({"eos_token": end}));
    let words = |ids: &[i64]| ids.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ");
    let stops = greedy.iter().position(|id| *id == greedy[2]).unwrap();
    let (question, answer) = (words(&prompt), words(&greedy[..stops]));
    let row = |answer: &str| serde_json::json!({"problem": question, "answer": answer}).to_string();
    fs::write(folder.path().join("rows.jsonl"), [row(&answer), row("w1")].join("\n")).unwrap();
    let ended = zeroth_in(
        folder.path(),
        &[
            "generate",
            "--model",
            ".",
            "--device",
            "cpu",
            "--data",
            "rows.jsonl",
            "--columns",
            "question=problem",
        ],
    );
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let expected = format!(
        "✓ {question}\n  answer    {answer}\n  expected  {answer}\n✗ {question}\n  answer    {answer}\n  expected  w1\n\
         exact match 1/2 (50.0 %)\n"
    );
    assert_eq!(ended.stdout, expected);

    // Rows that have nothing to answer, or are wrong, are named.
    for (row, expected) in [
        (serde_json::json!({"text": question}), "line 1: the row has no prompt"),
        (serde_json::json!({"input_ids": [1, 2], "labels": [-100, -100]}), "line 1: the row has no answer"),
        (serde_json::json!({"question": question}), "line 1: no row format has these columns"),
    ] {
        write("rows.jsonl", row);
        let ended = zeroth_in(
            folder.path(),
            &["generate", "--model", ".", "--device", "cpu", "--data", "rows.jsonl"],
        );
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        assert!(ended.stderr.contains(expected) && ended.is_orderly(), "{}", ended.stderr);
    }
}
