//! Messages for errors in text rows, and what works without a tokenizer or template.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;
use zeroth_data::{Encode, Encoded, Encoder, EncoderError, EncoderOptions, RowProblem};

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('No critics, please') }}\
                        {% elif m.role != 'silent' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}\
                        {% endfor %}";

/// A model folder with the given files; `true` copies the golden tokenizer.
fn folder(tokenizer: bool, files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    if tokenizer {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizer/tokenizer.json");
        fs::copy(golden, folder.path().join("tokenizer.json")).unwrap();
    }
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn whole() -> TempDir {
    folder(
        true,
        &[("chat_template.jinja", TEMPLATE), ("tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}")],
    )
}

fn encode(folder: &TempDir, options: EncoderOptions, row: &Value) -> Result<Encoded, RowProblem> {
    let mut into = Encoded::default();
    Encoder::open(folder.path(), options).unwrap().encode(row.as_object().unwrap(), &mut into)?;
    Ok(into)
}

fn refusal(folder: &TempDir, row: &Value) -> String {
    encode(folder, EncoderOptions::new(10_000), row).unwrap_err().to_string()
}

#[test]
fn missing_mapped_columns_are_reported() {
    let folder = whole();
    let row = json!({"messages": [{"role": "user", "content": "q"}], "id": 3});
    for (columns, message) in [
        ("messages=conv", "--columns messages=conv: the row has no column `conv`; it has `messages`, `id`"),
        ("messages=mesages", "has no column `mesages` (did you mean `messages`?); it has "),
        ("question=id,answer=a", "--columns answer=a: the row has no column `a`; it has "),
    ] {
        let options = EncoderOptions { columns: columns.parse().unwrap(), ..EncoderOptions::new(10_000) };
        // A mapped column takes precedence over the row's own `messages`.
        let row = if columns.starts_with('q') { json!({"id": "q"}) } else { row.clone() };
        let found = encode(&folder, options, &row).unwrap_err().to_string();
        assert!(found.contains(message), "{columns}: {found}");
    }
}

#[test]
fn text_row_errors_are_explained() {
    let folder = whole();
    let user = json!({"role": "user", "content": "q"});
    for (row, message) in [
        (
            json!({"qestion": "a", "anwser": "b"}),
            "no row format has these columns: `qestion`, `anwser` (`qestion` is similar to `question`); known formats are {\"input_ids\": [...], \"labels\": [...]}, {\"messages\": [...]}",
        ),
        (json!({}), "no row format has these columns: no keys; known formats are "),
        (json!({"a": 1}), "--columns maps other names, as in --columns question=problem,answer=solution"),
        (
            json!({"question": "a", "answer": null}),
            "`answer` is null: the format {\"question\", \"answer\"} requires it; fill it in, or remove the row",
        ),
        (
            json!({"question": "a", "answer": "b", "prompt": "a", "completion": "b"}),
            "the row matches {\"prompt\", \"completion\"} or {\"question\", \"answer\"}: select one with its columns, as in --columns prompt=prompt",
        ),
        (json!({"text": 5}), "`text` must be a string: found a number"),
        (json!({"question": "a", "answer": ["b"]}), "`answer` must be a string: found a list"),
        (json!({"prompt": "a", "completion": [user]}), "`completion` must be a string: found a list"),
        (
            json!({"prompt": [user], "completion": "b"}),
            "`completion` must be a list of messages, as in [{\"role\": \"user\", \"content\": \"Hi\"}]: found a string",
        ),
        (
            json!({"messages": []}),
            "`messages` must be a list of messages, as in [{\"role\": \"user\", \"content\": \"Hi\"}]: found an empty list",
        ),
        (
            json!({"messages": [user, 7]}),
            "message 2 of `messages`: a message must be an object with `role` and `content`: found a number",
        ),
        (
            json!({"messages": [{"content": "q"}]}),
            "message 1 of `messages`: `role` must be a string: found no such key",
        ),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            "message 1 of `messages`: `content` must be a string or a list of {\"type\": \"text\", \"text\": ...}: found a number",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "found {\"type\":\"image\"}",
        ),
        (
            json!({"messages": [{"role": "user", "content": "q", "loss": 1}]}),
            "message 1 of `messages`: `loss` must be true or false: found a number",
        ),
        (
            json!({"messages": [user], "tools": "{"}),
            "`tools` must be a list of tools, or a JSON string of such a list: found \"{\"",
        ),
        (json!({"messages": [user], "tools": {"name": "f"}}), "`tools` must be a list of tools"),
        (
            json!({"messages": [user, {"role": "critic", "content": "c"}, user]}),
            "the chat template rejects the conversation at message 2: No critics, please (line 1 of the template)",
        ),
        (
            json!({"messages": [user, {"role": "silent", "content": "c", "loss": true}]}),
            "message 2 (silent) should be trained, but the chat template does not render it",
        ),
        (
            json!({"messages": [user, {"role": "assistant", "content": null}]}),
            "message 2 (assistant) should be trained",
        ),
        (
            json!({"conversations": [{"from": "humn", "value": "q"}]}),
            "message 1 of `conversations`: `from` is `humn` (did you mean `human`?); known speakers are human, user, gpt, ",
        ),
        (json!({"conversations": [{"from": 5, "value": "q"}]}), "`from` must be a string: found a number"),
        (
            json!({"conversations": [{"from": "human", "value": {}}]}),
            "`value` must be a string or a list of ",
        ),
        (
            json!({"conversations": [{"from": "function_call", "value": "f()"}]}),
            "`value` must be a tool call as JSON, as in {\"name\": \"f\", \"arguments\": {}}: found \"f()\"",
        ),
        (
            json!({"instruction": "a", "output": "b", "history": [["x"]]}),
            "`history` must be a list of [question, answer] pairs: found [\"x\"]",
        ),
        (
            json!({"translation": {"en": "a"}}),
            "`translation` must be an object with a source and a target text, as in {\"en\": \"Hello\", \"de\": \"Hallo\"}: found {\"en\":\"a\"}",
        ),
        (json!({"input_ids": null}), "`input_ids` must be a list of integers: found null"),
        (json!({"input_ids": [1], "labels": [1, 2]}), "`labels` has 2 entries but `input_ids` has 1"),
    ] {
        let found = refusal(&folder, &row);
        assert!(found.contains(message), "{row}\n  found    {found}\n  expected {message}");
    }
}

#[test]
fn missing_tokenizer_files_are_reported() {
    let chat = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    let text = json!({"text": "words"});
    let bare = folder(false, &[]);
    let place = bare.path().display();
    assert_eq!(
        refusal(&bare, &text),
        format!(
            "the format {{\"text\"}} needs a tokenizer, but {place} has no tokenizer.json: copy the model's there, or use ready tokens, {{\"input_ids\": [...], \"labels\": [...]}}"
        )
    );
    assert!(refusal(&bare, &chat).contains("needs a tokenizer"));
    // Ready tokens need neither.
    let ready = json!({"input_ids": [5, 6], "labels": [-100, 6]});
    let row = encode(&bare, EncoderOptions::new(7), &ready).unwrap();
    assert_eq!((row.ids, row.labels), (vec![5, 6], vec![-100, 6]));
    let encoder = Encoder::open(bare.path(), EncoderOptions::new(7)).unwrap();
    assert_eq!(
        (encoder.decode(&[5, 6]), encoder.token_text(5), encoder.eos()),
        ("5 6".to_owned(), None, None)
    );
    assert_eq!(encoder.tokenizer_vocabulary(), None);

    let plain = folder(true, &[]);
    let place = plain.path().display().to_string();
    let found = refusal(&plain, &chat);
    assert!(found.starts_with(&format!("the format {{\"messages\": [...]}} needs a chat template: {place} has none in chat_template.jinja, chat_template.json, or as `chat_template` in tokenizer_config.json")), "{found}");
    assert!(refusal(&plain, &text).starts_with("no end-of-text token is defined: set `eos_token`"));
    let broken = folder(true, &[("chat_template.jinja", "{% if %}")]);
    assert!(refusal(&broken, &chat).starts_with("the chat template in chat_template.jinja cannot be used: "));
    assert_eq!(encode(&broken, EncoderOptions::new(7), &ready).unwrap().ids, [5, 6]);
    let unnamed = folder(
        true,
        &[("chat_template.json", "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"\"}]}")],
    );
    assert!(refusal(&unnamed, &chat).ends_with("it has the templates rag, but none named \"default\""));
}

#[test]
fn tokens_outside_the_vocabulary_are_reported() {
    let row = json!({"prompt": "", "completion": "a"});
    let error = encode(&whole(), EncoderOptions::new(100), &row).unwrap_err().to_string();
    assert!(error.starts_with("token 0 of the row is 6"), "{error}");
    assert!(error.ends_with("(`<|begin_of_text|>`): the model's vocabulary has 100 tokens, 0 to 99; does tokenizer.json belong to another model?"), "{error}");
}

#[test]
fn invalid_tokenizer_files_are_refused() {
    let open = |folder: &TempDir| Encoder::open(folder.path(), EncoderOptions::new(10)).err().unwrap();
    assert!(matches!(open(&folder(false, &[("tokenizer.json", "{}")])), EncoderError::Tokenizer { .. }));
    assert!(matches!(open(&folder(true, &[("tokenizer_config.json", "[]")])), EncoderError::Json { .. }));
    let no_file = folder(false, &[]);
    fs::create_dir(no_file.path().join("tokenizer.json")).unwrap();
    assert!(matches!(open(&no_file), EncoderError::Read { .. }));
}

#[test]
fn the_default_system_message_is_for_conversations_without_one() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let with = folder(true, &[("chat_template.jinja", template)]);
    let without = folder(true, &[("tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}")]);
    let default =
        |system: &str| EncoderOptions { system: Some(system.to_owned()), ..EncoderOptions::new(10_000) };
    let text = |folder: &TempDir, options: EncoderOptions, row: &Value| {
        let encoder = Encoder::open(folder.path(), options.clone()).unwrap();
        encoder.decode(&encode(folder, options, row).unwrap().ids)
    };
    let turns = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]);
    let own = json!([{"role": "system", "content": "own"}, {"role": "user", "content": "q"},
                     {"role": "assistant", "content": "a"}]);
    let speakers = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]);
    let expected = "system: Be brief.\nuser: q\nassistant: a\n";
    for row in [
        json!({"messages": turns}),
        json!({"conversations": speakers}),
        json!({"instruction": "q", "input": "", "output": "a"}),
        json!({"question": "q", "answer": "a", "system": ""}),
        json!({"query": "q", "response": "a"}),
        json!({"prompt": [turns[0]], "completion": [turns[1]]}),
        json!({"translation": {"en": "q", "de": "a"}}),
    ] {
        assert_eq!(text(&with, default("Be brief."), &row), expected, "{row}");
    }
    let kept = expected.replace("Be brief.", "own");
    for row in [
        json!({"messages": own}),
        json!({"conversations": speakers, "system": "own"}),
        json!({"question": "q", "answer": "a", "system": "own"}),
    ] {
        assert_eq!(text(&with, default("Be brief."), &row), kept, "{row}");
    }
    let developer = json!({"messages": [{"role": "developer", "content": "own"}, turns[0], turns[1]]});
    assert_eq!(text(&with, default("Be brief."), &developer), kept.replace("system", "developer"));
    // Without a template it is the first line; plain texts and ready tokens have no system message.
    let pair = json!({"question": "q", "answer": "a"});
    assert_eq!(text(&without, default("Be brief."), &pair), "Be brief.\nq\na");
    for row in [json!({"prompt": "q", "completion": "a"}), json!({"text": "qa"}), json!({"input_ids": [5]})] {
        let plain = text(&without, EncoderOptions::new(10_000), &row);
        assert_eq!(text(&without, default("Be brief."), &row), plain);
    }
    // Part of the cache key; a key without it is as before.
    let key = |options: EncoderOptions| Encoder::open(with.path(), options).unwrap().fingerprint();
    let plain = key(EncoderOptions::new(10_000));
    let keys = [plain, key(default("Be brief.")), key(default("Be kind."))];
    assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
}

#[test]
fn prompts_end_with_the_generation_prompt() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let config =
        "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\", \"add_bos_token\": true, \"add_eos_token\": true}";
    let folder = folder(true, &[("chat_template.jinja", template), ("tokenizer_config.json", config)]);
    let encoder = Encoder::open(folder.path(), EncoderOptions::new(10_000)).unwrap();
    assert!(encoder.has_chat_template());
    let chat = encoder.prompt("Hé 👋🏽?", Some("Be brief."), true).unwrap();
    assert_eq!(encoder.decode(&chat), "system: Be brief.\nuser: Hé 👋🏽?\nassistant:");
    let plain = encoder.prompt("Hé", None, false).unwrap();
    assert_eq!(encoder.decode(&plain), "Hé");
    assert_eq!(encoder.token_text(plain[0]).as_deref(), Some("<s>"));
    assert!(encoder.is_special(plain[0]) && !encoder.is_special(plain[1]));
    assert_ne!(plain.last().copied(), encoder.eos());
    // A text has both special tokens, once each.
    let text = json!({"text": "Hé"});
    let mut both = Encoded::default();
    encoder.encode(text.as_object().unwrap(), &mut both).unwrap();
    assert_eq!(both.ids, [&plain[..], &[encoder.eos().unwrap()]].concat());
    assert_eq!(both.ids, both.labels);
}

/// Arbitrary JSON with the keys and texts of rows.
fn any_json() -> impl Strategy<Value = Value> {
    let word = proptest::sample::select(vec![
        "role",
        "content",
        "user",
        "assistant",
        "from",
        "value",
        "gpt",
        "text",
        "type",
        "loss",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "<|im_end|>",
        "é👋🏽",
        " \n",
        "",
        "\u{F0000}",
        "{\"name\": \"f\"}",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        word.clone().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        let entries = proptest::collection::vec((word.clone(), inner.clone()), 0..4);
        prop_oneof![
            proptest::collection::vec(inner, 0..4).prop_map(Value::from),
            entries.prop_map(|entries| entries
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn any_row_is_tokens_or_a_problem(rows in proptest::collection::vec(
        proptest::collection::vec((proptest::sample::select(vec![
            "messages", "conversations", "instruction", "output", "input", "prompt", "completion", "question", "answer", "text",
            "translation", "system", "history", "tools", "input_ids",
        ]), any_json()), 0..4), 8))
    {
        let folder = whole();
        let encoder = Encoder::open(folder.path(), EncoderOptions::new(10_000)).unwrap();
        for row in rows {
            let row = row.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            let mut into = Encoded::default();
            if encoder.encode(&row, &mut into).is_ok() {
                prop_assert!(!into.ids.is_empty());
                prop_assert_eq!(into.ids.len(), into.labels.len());
            }
        }
    }
}
