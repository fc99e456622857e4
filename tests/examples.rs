//! The examples: what their rows promise, and the README's first command as it is written.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{root, zeroth_in, zeroth_json};

const NUMBERS: &str = "examples/numbers";

fn rows(name: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join(NUMBERS).join(name)).unwrap();
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| row[key].as_str().unwrap().to_owned();
        (text("question"), text("answer"))
    };
    text.lines().map(row).collect()
}

#[test]
fn no_held_out_number_is_trained_on() {
    let (trained, held_out) = (rows("train.jsonl"), rows("held-out.jsonl"));
    assert_eq!((trained.len(), held_out.len()), (3400, 200));
    for column in [|row: &(String, String)| row.0.clone(), |row: &(String, String)| row.1.clone()] {
        let seen: HashSet<String> = trained.iter().map(column).collect();
        assert_eq!(seen.len(), trained.len(), "every row is another number");
        assert!(held_out.iter().all(|row| !seen.contains(&column(row))));
        assert_eq!(held_out.iter().map(column).collect::<HashSet<_>>().len(), held_out.len());
    }
}

#[test]
fn no_held_out_translation_is_trained_on() {
    let [trained, held_out] = ["train.jsonl", "held-out.jsonl"].map(|name| {
        let text = fs::read_to_string(root().join("examples/translation").join(name)).unwrap();
        let row = |line: &str| serde_json::from_str::<Value>(line).unwrap()["translation"].clone();
        text.lines().map(row).collect::<Vec<Value>>()
    });
    assert_eq!((trained.len(), held_out.len()), (1800, 200));
    for language in ["de", "en"] {
        let text = |row: &Value| row[language].as_str().unwrap().to_owned();
        let seen: HashSet<String> = trained.iter().map(text).collect();
        assert_eq!(seen.len(), trained.len(), "every row is another number");
        assert!(held_out.iter().all(|row| !seen.contains(&text(row))));
    }
}

#[test]
fn the_tokenizers_of_the_examples_cover_their_rows() {
    for example in [NUMBERS, "examples/gsm8k"] {
        let [model, trained, held_out] =
            ["tiny-qwen3", "train.jsonl", "held-out.jsonl"].map(|name| format!("{example}/{name}"));
        let (code, found) = zeroth_json(&[
            "data", "preview", "--model", &model, "--data", &trained, &held_out, "--rows", "1",
        ]);
        assert_eq!(code, 0, "{found}");
        for list in ["problems", "too_long", "untrained"] {
            assert_eq!(found[list]["count"], 0, "{example}: {found}");
        }
    }
    // A byte is a token, and the answer with its end is trained.
    let [model, trained] = ["tiny-qwen3", "train.jsonl"].map(|name| format!("{NUMBERS}/{name}"));
    let (_, found) = zeroth_json(&["data", "preview", "--model", &model, "--data", &trained]);
    let rows = rows("train.jsonl");
    let answers: usize = rows.iter().map(|(_, answer)| answer.len() + 1).sum();
    let questions: usize = rows.iter().map(|(question, _)| question.len() + 1).sum();
    assert_eq!(
        (&found["trained_tokens"], &found["tokens"]),
        (&answers.into(), &(answers + questions).into())
    );
}

/// The README's first block, split into commands without `cargo run --release --`.
fn first_commands() -> Vec<Vec<String>> {
    let page = fs::read_to_string(root().join("README.md")).unwrap().replace("\\\n", " ");
    let block = page.lines().find(|line| line.starts_with("    cargo run --release -- train")).unwrap();
    let parts = block.split("&&").map(|part| part.trim().strip_prefix("cargo run --release -- ").unwrap());
    parts.map(|part| part.split_whitespace().map(str::to_owned).collect()).collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn the_first_command_of_the_readme_runs_as_written() {
    let folder = tempfile::tempdir().unwrap();
    copy(&root().join(NUMBERS), &folder.path().join(NUMBERS));
    let commands = first_commands();
    assert_eq!(commands.len(), 2, "{commands:?}");
    for (command, more) in commands.iter().zip([["--max-steps", "3"], ["--max-eval-samples", "4"]]) {
        // What is typed twice counts as typed last.
        let arguments: Vec<&str> = command.iter().map(String::as_str).chain(more).collect();
        let ended = zeroth_in(folder.path(), &arguments);
        assert_eq!(ended.code, 0, "{arguments:?}\n{}{}", ended.stdout, ended.stderr);
        if command[0] == "generate" {
            assert!(
                ended.stdout.contains("\n  expected  two thousand two hundred sixty-four\n"),
                "{}",
                ended.stdout
            );
            assert!(ended.stdout.contains("\nexact match 0/4 (0.0 %)\n"), "{}", ended.stdout);
        }
    }
}
