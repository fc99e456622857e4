//! `zeroth generate` as a chat, from a pipe and at a terminal; texts that end an answer; sampling flags.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::{Ended, root, zeroth_in};

/// Rendered as words: a user's turn begins with w1, the assistant's with w2, a system message with w5.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'user' %}w1 {% elif m.role == 'system' %}w5 {% else %}w2 {% endif %}\
                        {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}";

/// A golden model with `positions`, and a tokenizer whose words are its 67 tokens.
fn model(positions: u64, template: Option<&str>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let golden = root().join("tests/golden/qwen3-tied");
    fs::copy(golden.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let text = fs::read_to_string(golden.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["max_position_embeddings"] = positions.into();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let vocab: serde_json::Map<String, Value> = (0..67).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 66, "content": "w66", "special": true, "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false}],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    if let Some(template) = template {
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    }
    folder
}

const FIXED: [&str; 5] = ["generate", "--model", ".", "--device", "cpu"];

fn run(folder: &Path, more: &[&str]) -> Ended {
    zeroth_in(folder, &[&FIXED[..], more].concat())
}

/// Runs a chat with its turns in a pipe.
fn piped(folder: &Path, lines: &str, more: &[&str]) -> Ended {
    let mut child = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(FIXED)
        .args(more)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A refused command does not read it.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    let ended = child.wait_with_output().unwrap();
    Ended {
        code: ended.status.code().unwrap(),
        stdout: String::from_utf8(ended.stdout).unwrap(),
        stderr: String::from_utf8(ended.stderr).unwrap(),
    }
}

fn parsed(ended: &Ended) -> Value {
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

fn words(ids: &[i64]) -> String {
    let shown = ids.iter().filter(|id| **id != 66);
    shown.map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn lines_of_a_pipe_are_the_turns_of_a_chat() {
    let folder = model(64, Some(TEMPLATE));
    let chat = ["--max-new-tokens", "4", "--format", "json", "--system", "w9"];
    let lines = "w3 w1\n\nw4\n/clear\n/system w7 w8\nw6\n/exit\nw10\n";
    let found = parsed(&piped(folder.path(), lines, &chat));
    let turns = found["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 3);
    let answers: Vec<Vec<i64>> = turns.iter().map(|turn| ids(&turn["ids"])).collect();
    let first = words(&answers[0]);
    let number = |word: &str| word[1..].parse::<i64>().unwrap();
    let said =
        |text: &str| -> Vec<i64> { text.split(' ').filter(|word| !word.is_empty()).map(number).collect() };
    for (turn, prompt) in turns.iter().zip([
        "w5 w9 w1 w3 w1 w2".to_owned(),
        format!("w5 w9 w1 w3 w1 w2 {first} w1 w4 w2"),
        "w5 w7 w8 w1 w6 w2".to_owned(),
    ]) {
        assert_eq!(ids(&turn["prompt_ids"]), said(&prompt));
        assert_eq!((&turn["end"], ids(&turn["ids"]).len()), (&json!("length"), 4));
        // As if the whole conversation were a prompt.
        let whole = said(&prompt).iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        let alone = ["--prompt-ids", &whole, "--max-new-tokens", "4", "--format", "json"];
        let alone = parsed(&run(folder.path(), &alone));
        assert_eq!((&alone["ids"], &alone["text"]), (&turn["ids"], &turn["text"]));
    }
    let text = piped(folder.path(), "w3 w1\nw4", &["--max-new-tokens", "4", "--system", "w9"]);
    let expected: String =
        turns[..2].iter().map(|turn| turn["text"].as_str().unwrap().to_owned() + "\n").collect();
    assert_eq!((text.stdout, text.code), (expected, 0));

    // 24 tokens: the third turn has no room for the first.
    let small = piped(
        folder.path(),
        "w3\nw4\nw5\n",
        &["--max-new-tokens", "6", "--max-length", "24", "--format", "json"],
    );
    let turns = parsed(&small)["turns"].as_array().unwrap().clone();
    assert!(
        small.stderr.contains("the conversation is full: its oldest 1 turn dropped (--max-length)"),
        "{}",
        small.stderr
    );
    assert_eq!(ids(&turns[2]["prompt_ids"])[..2], [1, 4]);

    for (lines, more, expected) in [
        ("", &[][..], "no prompt: give one with --prompt, --prompt-file, --prompt-ids or --data"),
        ("w3\n", &["--rows", "3"], "need --data"),
        ("w3\n", &["--system", " "], "--system is empty"),
        ("w3\n", &["--chat", "false", "--system", "w9"], "--system needs a chat"),
        (
            "w3 w4 w5 w6 w7\n",
            &["--max-length", "6"],
            "the line has 7 tokens with its template, but a conversation has room for 6",
        ),
    ] {
        let refused = piped(folder.path(), lines, more);
        assert_eq!(refused.code, 2, "{more:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(expected) && refused.is_orderly(), "{more:?}: {}", refused.stderr);
    }

    // Without a template the text goes on.
    let plain =
        piped(folder.path(), "w3\nw4\n", &["--chat", "false", "--max-new-tokens", "2", "--format", "json"]);
    assert!(plain.stderr.contains("lines are continued as plain text"), "{}", plain.stderr);
    let turns = parsed(&plain)["turns"].as_array().unwrap().clone();
    assert_eq!(ids(&turns[0]["prompt_ids"]), [3]);
    assert_eq!(*ids(&turns[1]["prompt_ids"]).last().unwrap(), 4);
    assert!(ids(&turns[1]["prompt_ids"]).len() >= 3);
}

#[test]
fn a_text_ends_at_a_stop_text() {
    let folder = model(64, None);
    let prompt = ["--prompt", "w3 w1", "--max-new-tokens", "12"];
    let whole = parsed(&run(folder.path(), &[&prompt[..], &["--format", "json"]].concat()));
    let text = whole["text"].as_str().unwrap();
    // From the middle of a word to the middle of the next, and one that never comes.
    let begin = text.match_indices(' ').nth(4).unwrap().0 - 1;
    let stop = &text[begin..begin + 3];
    let expected = &text[..text.find(stop).unwrap()];
    let stopped = [&prompt[..], &["--stop", "w99 w1", stop]].concat();
    let streamed = run(folder.path(), &stopped);
    assert_eq!((streamed.stdout, streamed.code), (format!("{expected}\n"), 0));
    assert!(streamed.stderr.contains("ended by --stop"), "{}", streamed.stderr);
    let found = parsed(&run(folder.path(), &[&stopped[..], &["--format", "json"]].concat()));
    assert_eq!((&found["text"], &found["end"]), (&json!(expected), &json!("stop")));
    let chat = piped(folder.path(), "w3 w1\n", &["--max-new-tokens", "12", "--stop", stop]);
    assert_eq!((chat.stdout, chat.code), (format!("{expected}\n"), 0));
    // A text that may still become a stop text is printed at the end.
    let open = format!("{}!", &text[text.len() - 2..]);
    assert_eq!(run(folder.path(), &[&prompt[..], &["--stop", &open]].concat()).stdout, format!("{text}\n"));
    // A special token has no text, and ends it too.
    let sampled = |seed: i64, more: &[&str]| {
        let fixed = ["--prompt", "w3", "--max-new-tokens", "60", "--temperature", "9", "--format", "json"];
        parsed(&run(folder.path(), &[&fixed[..], &["--seed", &seed.to_string()], more].concat()))
    };
    let drawn = |seed: i64| ids(&sampled(seed, &[])["ids"]).iter().position(|id| *id == 66);
    let (seed, at) = (0..20).find_map(|seed| Some((seed, drawn(seed)?))).unwrap();
    let found = sampled(seed, &["--stop", "w66"]);
    assert_eq!((ids(&found["ids"]).len(), &found["end"]), (at + 1, &json!("stop")));
    let empty = run(folder.path(), &[&prompt[..], &["--stop", ""]].concat());
    assert_eq!(empty.code, 2, "{}", empty.stderr);
}

#[test]
fn sampling_flags_mean_what_they_mean_to_transformers() {
    let folder = model(64, None);
    let prompt = ["--prompt", "w3 w1", "--max-new-tokens", "20"];
    let text = |more: &[&str]| {
        let ended = run(folder.path(), &[&prompt[..], more].concat());
        assert_eq!(ended.code, 0, "{more:?}: {}", ended.stderr);
        (ended.stdout, ended.stderr)
    };
    let (greedy, quiet) = text(&[]);
    assert!(!quiet.contains("without effect"), "{quiet}");
    let (sampled, _) = text(&["--temperature", "1"]);
    assert_ne!(greedy, sampled);
    for same in [
        &["--do_sample", "true"][..],
        &["--temperature", "1", "--top_k", "0"],
        &["--do-sample", "--min-p", "0"],
    ] {
        assert_eq!(text(same).0, sampled, "{same:?}");
    }
    let (found, note) = text(&["--do-sample", "false", "--temperature", "0.7", "--top-p", "0.9"]);
    assert_eq!(found, greedy);
    assert!(note.contains("--temperature, --top-p are without effect: decoding is greedy"), "{note}");
    assert!(text(&["--top-k", "5"]).1.contains("--top-k is without effect"));
    assert_eq!(text(&["--do-sample", "--min-p", "1"]).0, greedy);
    // No word occurs twice.
    let (fresh, _) = text(&["--repetition_penalty", "1000000"]);
    let mut said: Vec<&str> = fresh.split_whitespace().chain(["w3", "w1"]).collect();
    said.sort_unstable();
    let count = said.len();
    said.dedup();
    assert_eq!(said.len(), count, "{fresh}");
    for (more, expected) in [
        (&["--do-sample", "true", "--temperature", "0"][..], "--do-sample true contradicts --temperature 0"),
        (&["--repetition-penalty", "0"], "repetition_penalty is 0"),
        (&["--min-p", "2"], "min_p is 2"),
    ] {
        let refused = run(folder.path(), &[&prompt[..], more].concat());
        assert!(refused.code == 2 && refused.stderr.contains(expected), "{more:?}: {}", refused.stderr);
    }
}

#[test]
fn several_sequences_differ_and_the_first_is_that_of_one() {
    let folder = model(64, None);
    let fixed = ["--prompt", "w3 w1", "--max-new-tokens", "12", "--do-sample", "--format", "json"];
    let found = |more: &[&str]| parsed(&run(folder.path(), &[&fixed[..], more].concat()));
    let texts = |value: &Value| -> Vec<Vec<i64>> {
        value["sequences"].as_array().unwrap().iter().map(|one| ids(&one["ids"])).collect()
    };
    let four = found(&["--num-return-sequences", "4", "--logits"]);
    let all = texts(&four);
    let mut distinct = all.clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!((all.len(), distinct.len()), (4, 4), "{four}");
    assert_eq!(four["logits"].as_array().unwrap().len(), 67);
    for (one, ids) in four["sequences"].as_array().unwrap().iter().zip(&all) {
        assert_eq!((&one["text"], &one["end"]), (&words(ids).into(), &"length".into()));
    }
    let single = found(&[]);
    assert_eq!((ids(&single["ids"]), &single["prompt_ids"]), (all[0].clone(), &four["prompt_ids"]));
    assert_eq!(texts(&found(&["--num_return_sequences", "70", "--threads", "1"]))[..4], all);
    assert_ne!(texts(&found(&["--num-return-sequences", "4", "--seed", "7"])), all);

    // Each ends at its own stop text.
    let stop = format!("w{}", all[2][3]);
    let stopped = found(&["--num-return-sequences", "4", "--stop", &stop]);
    for (one, whole) in stopped["sequences"].as_array().unwrap().iter().zip(&all) {
        let at = words(whole).find(&stop);
        let expected = at.map_or_else(|| words(whole), |at| words(whole)[..at].to_owned());
        let end = if at.is_some() { "stop" } else { "length" };
        assert_eq!((&one["text"], &one["end"]), (&expected.into(), &end.into()));
    }
    let people = run(folder.path(), &[&fixed[..5], &["--num-return-sequences", "2"]].concat());
    let expected = format!("--- 1 of 2\n{}\n--- 2 of 2\n{}\n", words(&all[0]), words(&all[1]));
    assert_eq!(people.stdout, expected, "{}", people.stderr);

    for (more, expected) in [
        (&["--prompt", "w3", "--num-return-sequences", "2"][..], "greedy decoding gives one"),
        (&["--prompt", "w3", "--do-sample", "--num-return-sequences", "0"], "--num-return-sequences"),
        (&["--data", "rows.jsonl", "--num-return-sequences", "2"], "--num-return-sequences"),
    ] {
        let refused = run(folder.path(), more);
        assert!(refused.code == 2 && refused.stderr.contains(expected), "{more:?}: {}", refused.stderr);
    }
    let chat = piped(folder.path(), "w3\n", &["--do-sample", "--num-return-sequences", "2"]);
    assert!(chat.code == 2 && chat.stderr.contains("a turn of a chat has one answer"), "{}", chat.stderr);
}

#[test]
fn a_question_that_is_asked_again_is_sampled_again() {
    let folder = model(64, None);
    let flags = ["--max-new-tokens", "12", "--do-sample", "--format", "json"];
    let asked = || parsed(&piped(folder.path(), "w3 w1\n/clear\nw3 w1\n", &flags));
    let chat = asked();
    assert_eq!(chat["turns"][0]["prompt_ids"], chat["turns"][1]["prompt_ids"]);
    assert_ne!(chat["turns"][0]["ids"], chat["turns"][1]["ids"]);
    assert_eq!(asked(), chat, "the seed decides");
}

/// A process at a pseudo-terminal of `script`.
struct Terminal {
    child: std::process::Child,
    shown: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn start(folder: &Path, more: &str) -> Self {
        let command = format!("{} {} {more}", env!("CARGO_BIN_EXE_zeroth"), FIXED.join(" "));
        let mut child = Command::new("script")
            .args(["--quiet", "--flush", "--return", "--command", &command, "/dev/null"])
            .current_dir(folder)
            .env("NO_COLOR", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script, of util-linux, gives a process a terminal");
        let mut stdout = child.stdout.take().unwrap();
        let (sender, shown) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, shown, seen: String::new() }
    }

    fn press(&mut self, keys: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(keys.as_bytes()).and_then(|()| stdin.flush()).unwrap();
    }

    /// Waits until the terminal shows a text after what was waited for before.
    fn wait_for(&mut self, text: &str) {
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return;
            }
            match self.shown.recv_timeout(Duration::from_secs(100)) {
                Ok(bytes) => self.seen += &String::from_utf8_lossy(&bytes),
                Err(error) => panic!("{error} while waiting for {text:?}: {:?}", self.seen),
            }
        }
    }

    fn code(mut self) -> i32 {
        self.child.wait().unwrap().code().unwrap()
    }
}

#[test]
fn a_chat_at_a_terminal_answers_stops_and_leaves() {
    let folder = model(8192, Some(TEMPLATE));
    let expected = parsed(&piped(folder.path(), "w3 w1\n", &["--max-new-tokens", "4", "--format", "json"]));
    let answer = expected["turns"][0]["text"].as_str().unwrap();
    let mut chat = Terminal::start(folder.path(), "--max-new-tokens 4");
    chat.wait_for("/exit or Ctrl-D leaves, /clear forgets the conversation");
    chat.wait_for("> ");
    chat.press("w3 w1\n");
    chat.wait_for(answer);
    chat.wait_for("(reached --max-new-tokens 4)");
    chat.wait_for("> ");
    chat.press("/exti\n");
    chat.wait_for("/exit or Ctrl-D leaves");
    chat.wait_for("> ");
    chat.press("\u{4}");
    assert_eq!(chat.code(), 0);

    // Ctrl-C ends an answer of thousands of tokens; the next one, at the prompt, leaves.
    let mut chat = Terminal::start(folder.path(), "--max-new-tokens 8000 --max-length 8192");
    chat.wait_for("> ");
    chat.press("w3 w1\n");
    chat.wait_for(answer);
    chat.press("\u{3}");
    chat.wait_for("(stopped)");
    chat.wait_for("> ");
    chat.press("\u{3}");
    assert_eq!(chat.code(), 130);
}
