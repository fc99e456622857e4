//! Rows with many columns or messages take time in proportion. Tests have a guard against hangs and count renders; they
//! measure no time.

use std::fs;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use zeroth_data::{
    Encode, Encoded, Encoder, EncoderOptions, IGNORED, PrepareOptions, RowProblem, Truncation, survey,
};

/// Far more than any of these takes on a busy machine, and far less than the square of a number of messages takes.
const GUARD: Duration = Duration::from_mins(3);

/// Ends a call that would take hours.
fn guarded<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    let thread = thread::spawn(move || {
        // The other end is gone once it has waited too long.
        let _ = sender.send(call());
    });
    match receiver.recv_timeout(GUARD) {
        Ok(done) => {
            thread.join().unwrap();
            done
        }
        Err(RecvTimeoutError::Timeout) => panic!("still not done after {} s", GUARD.as_secs()),
        Err(RecvTimeoutError::Disconnected) => panic!("{:?}", thread.join().err().map(|_| "it panicked")),
    }
}

fn folder(template: &str) -> TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden.join("tokenizer/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), json!({"eos_token": "<|im_end|>"}).to_string())
        .unwrap();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

fn conversation(messages: usize) -> Value {
    let message = |number: usize| {
        let role = if number.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("Message {number}.")})
    };
    json!({"messages": (0..messages).map(message).collect::<Vec<_>>()})
}

/// Encodes a conversation with a template.
fn encoded(template: &str, messages: usize) -> Result<Encoded, RowProblem> {
    let template = template.to_owned();
    guarded(move || {
        let folder = folder(&template);
        let encoder = Encoder::open(folder.path(), EncoderOptions::new(10_000)).unwrap();
        let mut into = Encoded::default();
        encoder.encode(conversation(messages).as_object().unwrap(), &mut into)?;
        Ok(into)
    })
}

const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                      {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[test]
fn a_million_columns_are_read() {
    const COLUMNS: usize = 1_000_000;
    let found = guarded(|| {
        let folder = folder(CHATML);
        let names: Vec<String> = (0..COLUMNS).map(|number| format!("column{number}")).collect();
        let table = format!("text,{}\nHi{}\n", names.join(","), ",1".repeat(COLUMNS));
        let path = folder.path().join("rows.csv");
        fs::write(&path, table).unwrap();
        let options = PrepareOptions {
            max_length: 64,
            truncation: Truncation::Drop,
            max_samples: None,
            packing: false,
        };
        let encoder = Encoder::open(folder.path(), EncoderOptions::new(10_000)).unwrap();
        let found = survey(std::slice::from_ref(&path), &encoder, &options, 1).unwrap();
        let twice = format!("text,{},column7\nHi{}\n", names.join(","), ",1".repeat(COLUMNS + 1));
        fs::write(&path, twice).unwrap();
        (found, survey(&[path], &encoder, &options, 1).unwrap_err().to_string())
    });
    assert_eq!((found.0.rows, found.0.problems.count), (1, 0));
    assert!(found.1.ends_with("the header names the column `column7` twice"), "{}", found.1);
}

#[test]
fn conversations_of_more_messages_than_markers_are_labelled() {
    const MESSAGES: usize = 33_000;
    let labels = |found: &Encoded, from: usize| {
        let trained = found.labels.iter().filter(|label| **label != IGNORED).count();
        (trained, found.labels[found.labels.len() - from..].to_vec())
    };
    // Messages of the same length, before and after the first 32,767.
    let [some, all] = [MESSAGES - 1000, MESSAGES].map(|messages| encoded(CHATML, messages).unwrap());
    assert_eq!(some.labels[..], all.labels[..some.labels.len()], "the beginning is the same");
    let more = labels(&all, 1).0 - labels(&some, 1).0;
    let in_some = some.labels.iter().rev().skip(1).filter(|label| **label != IGNORED).count();
    assert!(more > 0 && in_some > 0);
    // The last 500 answers train as many tokens as the 500 before them.
    let tail = some.labels.len() - (all.labels.len() - some.labels.len());
    let before = some.labels[tail..].iter().filter(|label| **label != IGNORED).count();
    assert_eq!(more, before);
}

#[test]
fn templates_that_need_a_render_for_each_message_are_bounded() {
    // Writes how long the conversation is, so that no message can be marked.
    let counting = "{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + message.content|length %}\
                    {% endfor %}{{ ns.n }}\n{% for message in messages %}{{ message.content }}\n{% endfor %}";
    assert!(encoded(counting, 20).is_ok());
    assert_eq!(encoded(counting, 20_000), Err(RowProblem::TooManyRenders { messages: 20_000 }));
}

#[test]
fn the_message_that_a_template_refuses_is_found_in_a_few_renders() {
    let refusing = "{% for message in messages %}{% if message.content == 'Message 8765.' %}{{ raise_exception('no') }}\
                    {% endif %}{{ message.content }}\n{% endfor %}";
    let error = encoded(refusing, 20_000).unwrap_err();
    let RowProblem::Template { number, message } = error else { panic!("{error}") };
    assert_eq!(number, 8766);
    assert!(message.starts_with("no"), "{message}");
}
