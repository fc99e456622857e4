//! Data without trained tokens is refused: it would give a loss of 0 and a perplexity of 1.

use std::path::Path;

use super::{golden, text, train_on, written};

const ROW: &str = r#"{"input_ids": [1, 2, 3, 4]}"#;

fn assert_refused(rows: &[&str], flags: &[&str], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let data = written(folder.path(), "rows.jsonl", rows);
    let run = folder.path().join("run");
    let ended = train_on(&golden("llama-one-kv-head"), &data, &run, &[&["--max-steps", "1"], flags].concat());
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is not in: {}", ended.stderr);
    }
    assert!(!run.exists(), "a refused run wrote something");
}

#[test]
fn fully_ignored_labels_are_refused() {
    let rows = [
        r#"{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}"#,
        // The first label has no token before it.
        r#"{"input_ids": [5, 6], "labels": [5, -100]}"#,
    ];
    let words = [
        "rows.jsonl has no trained tokens: 2 rows with 5 tokens were read, and every label after the first is -100: labels other than",
        "`zeroth data preview` shows the trained tokens of each row",
    ];
    assert_refused(&rows, &[], &words);
    assert_refused(&rows, &["--packing"], &words);
}

#[test]
fn rows_of_one_token_are_refused() {
    let words = ["1 row with 1 token was read, and rows of one token have no context to predict it from"];
    assert_refused(&[r#"{"input_ids": [5]}"#], &[], &words);
}

#[test]
fn rows_truncated_before_trained_tokens_are_refused() {
    let row = r#"{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, -100, 8]}"#;
    let words = ["beyond the 3 tokens they were truncated to: raise --max-length, or truncate the other end"];
    assert_refused(&[row], &["--max-length", "3", "--truncation-strategy", "right"], &words);
    let words = ["no samples left: its 1 row has more than 3 tokens; raise --max-length"];
    assert_refused(&[row], &["--max-length", "3"], &words);
}

#[test]
fn conversations_without_an_assistant_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let row = r#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
    let data = written(folder.path(), "rows.jsonl", &[row]);
    let run = folder.path().join("run");
    let model = crate::common::root().join("examples/gsm8k/tiny-qwen3");
    let ended = train_on(&model, &data, &run, &["--max-steps", "1"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("-100: assistant messages are trained, unless"), "{}", ended.stderr);
}

#[test]
fn evaluation_data_without_labels_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let evaluation: &Path =
        &written(folder.path(), "held-out.jsonl", &[r#"{"input_ids": [5, 6], "labels": [-100, -100]}"#]);
    let words = ["held-out.jsonl has no trained tokens: 1 row with 2 tokens was read"];
    assert_refused(&[ROW], &["--eval-data", text(evaluation)], &words);
}
