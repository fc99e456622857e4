//! Rows of text become the tokens and labels that transformers gives: golden/chat_templates.json, written by
//! golden/make_chat_templates.py, for eight models' templates and every format of rows.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zeroth_data::{Encode, Encoded, Encoder, EncoderOptions, IGNORED, RowProblem};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn golden_json() -> Value {
    serde_json::from_str(&fs::read_to_string(golden("chat_templates.json")).unwrap()).unwrap()
}

/// A model's folder: the small tokenizer, special tokens, and a chat template or none.
fn folder(special: &Value, template: Option<&str>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden("tokenizer/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), special.to_string()).unwrap();
    if let Some(name) = template {
        let source = fs::read_to_string(golden("templates").join(format!("{name}.jinja"))).unwrap();
        fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    }
    folder
}

fn options() -> EncoderOptions {
    let variables = json!({"date_string": "26 Jul 2024"}).as_object().unwrap().clone();
    EncoderOptions { variables, ..EncoderOptions::new(10_000) }
}

fn encode(encoder: &Encoder, row: &Value) -> Result<Encoded, RowProblem> {
    let mut into = Encoded { ids: vec![1, 2], labels: vec![3] };
    encoder.encode(row.as_object().unwrap(), &mut into)?;
    Ok(into)
}

/// Where trained tokens begin and end.
fn edges(labels: &[i32]) -> Vec<usize> {
    let trained = |place: usize| labels.get(place).is_some_and(|label| *label != IGNORED);
    (0..=labels.len()).filter(|&place| trained(place) != (place > 0 && trained(place - 1))).collect()
}

fn hashed(ids: &[i32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let first = Sha256::digest(&bytes)[..8].try_into().map(u64::from_be_bytes).unwrap();
    format!("{first:016x}")
}

/// The tokens shown with what is trained in brackets, for a message.
fn shown(encoder: &Encoder, tokens: &Encoded) -> String {
    let token = |(id, label): (&i32, &i32)| {
        let text = encoder.token_text(*id).unwrap_or_default();
        if *label == IGNORED { text } else { format!("⟦{text}⟧") }
    };
    tokens.ids.iter().zip(&tokens.labels).map(token).collect()
}

/// What the encoder makes of each case of a template, beside what transformers made; the differences.
fn differences(golden: &Value, name: &str, encoder: &Encoder) -> Vec<String> {
    let mut found = Vec::new();
    let cases = golden["templates"][name]["cases"].as_array().unwrap();
    for (conversation, case) in golden["conversations"].as_array().unwrap().iter().zip(cases) {
        let case_name = &conversation["name"];
        let mut say = |what: String| found.push(format!("{name}: {case_name}: {what}"));
        let rendered = encoder.render(conversation.as_object().unwrap(), false);
        if case.get("raises").is_some() {
            if !matches!(rendered, Err(RowProblem::Template { .. })) {
                say(format!("transformers raises {}, ours {rendered:?}", case["raises"]));
            }
            continue;
        }
        let text = case["text"].as_str().unwrap();
        if rendered.as_deref() != Ok(text) {
            say(format!("text\n  ours   {rendered:?}\n  theirs {text:?}"));
        }
        let prompted = encoder.render(conversation.as_object().unwrap(), true);
        let theirs = match case["prompted"][0].as_str().unwrap() {
            "+" => Some(format!("{text}{}", case["prompted"][1].as_str().unwrap())),
            "=" => Some(case["prompted"][1].as_str().unwrap().to_owned()),
            _ => None,
        };
        if prompted.as_ref().ok() != theirs.as_ref() {
            say(format!("with a generation prompt\n  ours   {prompted:?}\n  theirs {theirs:?}"));
        }
        match (encode(encoder, conversation), case.get("dropped")) {
            (Err(RowProblem::NoTrace { .. }), Some(_)) => {}
            (tokens, Some(_)) => say(format!("a call that the template drops is not refused: {tokens:?}")),
            (Err(problem), None) => say(problem.to_string()),
            (Ok(tokens), None) => {
                if hashed(&tokens.ids) != case["ids"] {
                    say("other tokens".to_owned());
                }
                if json!(edges(&tokens.labels)) != case["trained"] {
                    let (ours, theirs) = (edges(&tokens.labels), &case["trained"]);
                    say(format!("trained {ours:?}, not {theirs}: {}", shown(encoder, &tokens)));
                }
            }
        }
    }
    found
}

#[test]
fn templates_render_tokenise_and_mask_as_transformers_does() {
    let golden = golden_json();
    assert!(golden["conversations"].as_array().unwrap().len() >= 30);
    let mut found = Vec::new();
    for (name, template) in golden["templates"].as_object().unwrap() {
        let folder = folder(&template["special"], Some(name));
        found.extend(differences(&golden, name, &Encoder::open(folder.path(), options()).unwrap()));
    }
    assert!(found.is_empty(), "{} differences\n{}", found.len(), found.join("\n"));
}

#[test]
fn messages_are_found_the_same_by_marks_and_by_replacement() {
    let golden = golden_json();
    let trained = |encoder: &Encoder, row: &Value| {
        let tokens = encode(encoder, row).ok()?;
        let texts = tokens
            .labels
            .iter()
            .filter(|label| **label != IGNORED)
            .map(|id| encoder.token_text(*id).unwrap());
        Some(texts.collect::<String>())
    };
    let mut compared = 0;
    for (name, template) in golden["templates"].as_object().unwrap() {
        let folder = folder(&template["special"], Some(name));
        let encoder = Encoder::open(folder.path(), options()).unwrap();
        for conversation in golden["conversations"].as_array().unwrap() {
            let messages = conversation["messages"].as_array().unwrap();
            let asks = |message: &Value| message["role"] == "user" && message["loss"].is_null();
            let Some(place) = messages.iter().position(asks) else { continue };
            let Some(question) = messages[place]["content"].as_str() else { continue };
            // A character that marks are made of, in a question: no marks can be set.
            let mut unmarkable = conversation.clone();
            unmarkable["messages"][place]["content"] = json!(format!("{question}\u{F0000}."));
            let plain = trained(&encoder, conversation);
            assert_eq!(trained(&encoder, &unmarkable), plain, "{name}: {}", conversation["name"]);
            compared += usize::from(plain.is_some());
        }
    }
    assert!(compared > 200, "{compared}");
}

/// What is trained of a conversation by a template, as text with special tokens.
fn trained_by(template: &str, messages: &Value) -> String {
    let folder = folder(&json!({"eos_token": "<|im_end|>"}), None);
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let encoder = Encoder::open(folder.path(), options()).unwrap();
    let tokens = encode(&encoder, &json!({"messages": messages})).unwrap();
    let trained = tokens.labels.iter().filter(|label| **label != IGNORED);
    trained.map(|id| encoder.token_text(*id).unwrap()).collect()
}

#[test]
fn turns_begin_after_the_prompt_and_end_with_their_own_token_in_other_kinds_of_templates() {
    let said = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"},
                      {"role": "user", "content": "r"}, {"role": "assistant", "content": "two"}]);
    // No special token between turns, and one at the end of all.
    let lines = "{% for m in messages %}{{ m.role }}>{{ m.content }}\n{% endfor %}{{ eos_token }}";
    assert_eq!(trained_by(lines, &said), "onetwo\n<|im_end|>");
    // A prompt that is written after a question only.
    let guarded = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %} hm {% endif %}{{ m.content }}\
                   <|im_end|>{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}[assistant]{% endif %}";
    assert_eq!(trained_by(guarded, &said), " hm one<|im_end|> hm two<|im_end|>");
    // One that refuses a prompt after an answer.
    let strict = "{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}\
                  {% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}\
                  {% if add_generation_prompt %}[assistant]{% endif %}";
    assert_eq!(trained_by(strict, &said), "one<|im_end|>two<|im_end|>");
    // A call where no prompt is known: from where a text would begin.
    let call = json!([{"role": "user", "content": "q"},
                      {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]);
    let silent = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}\
                  <tool_call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}";
    assert_eq!(trained_by(silent, &call), "<tool_call>{\"name\": \"f\", \"arguments\": {}}<|im_end|>");
}

#[test]
fn masks_do_not_change_where_a_tokenizer_trims_its_offsets() {
    let golden = golden_json();
    let name = "meta-llama-Llama-3.2-3B-Instruct";
    let folder = folder(&golden["templates"][name]["special"], Some(name));
    let path = folder.path().join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap();
    let trimming = text.replace("\"trim_offsets\":false", "\"trim_offsets\":true");
    assert_ne!(text, trimming);
    fs::write(&path, trimming).unwrap();
    let found = differences(&golden, name, &Encoder::open(folder.path(), options()).unwrap());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn rows_of_every_format_become_the_tokens_and_labels_of_transformers() {
    let golden = golden_json();
    let qwen3 = "Qwen-Qwen3-0.6B";
    for case in golden["rows"].as_array().unwrap() {
        let template = case["template"].as_bool().unwrap().then_some(qwen3);
        let folder = folder(&golden["templates"][qwen3]["special"], template);
        let columns = case["columns"].as_str().unwrap().parse().unwrap();
        let encoder = Encoder::open(folder.path(), EncoderOptions { columns, ..options() }).unwrap();
        let tokens = encode(&encoder, &case["row"]).unwrap();
        assert_eq!(json!(tokens.ids), case["ids"], "{}", case["row"]);
        assert_eq!(json!(tokens.labels), case["labels"], "{}: {}", case["row"], shown(&encoder, &tokens));
    }
}

#[test]
fn a_template_that_marks_what_is_generated_is_taken_at_its_word() {
    let special = json!({"eos_token": "<|im_end|>"});
    let folder = folder(&special, None);
    // The marks of transformers' own tag: white space control, a scope of its own, nothing but the answer.
    let source = "{% for m in messages %}\n  {% if m.role == 'assistant' %}\nA:{%- generation -%}\n  {% set x = m.content %}{{ x }}!\n\
                  {%- endgeneration %}\n{{ x }}|\n  {% else %}\nU:{{ m.content }}|\n  {% endif %}\n{% endfor %}\n";
    fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    let encoder = Encoder::open(folder.path(), options()).unwrap();
    let said = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é"},
                                   {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]});
    // Rendered by transformers 5.22 to this text, with these spans.
    assert_eq!(encoder.render(said.as_object().unwrap(), false).unwrap(), "U:q|\nA:é!|\nU:r|\nA:b!|\n");
    let trained = |row: &Value| {
        let tokens = encode(&encoder, row).unwrap();
        let trained: Vec<i32> = tokens.labels.into_iter().filter(|label| *label != IGNORED).collect();
        encoder.decode(&trained)
    };
    assert_eq!(trained(&said), "é!b!");
    let mut chosen = said.clone();
    chosen["messages"][1]["loss"] = json!(false);
    chosen["messages"][2]["loss"] = json!(true);
    assert_eq!(trained(&chosen), "rb!");
    chosen["messages"][0]["content"] = json!("\u{FDD0}");
    assert_eq!(
        encode(&encoder, &chosen).unwrap_err().to_string(),
        "the row holds U+FDD0, a noncharacter of Unicode that is no text; remove it"
    );
}

#[test]
fn templates_are_found_where_transformers_looks_and_tools_have_their_own() {
    let row = json!({"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f"}]});
    let row = row.as_object().unwrap();
    let without_tools: Map<String, Value> = row.iter().take(1).map(|(k, v)| (k.clone(), v.clone())).collect();
    let folder = folder(&json!({}), None);
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let rendered = |row| Encoder::open(folder.path(), options()).unwrap().render(row, false).unwrap();
    let listed = json!({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]});
    write("tokenizer_config.json", &listed.to_string());
    assert_eq!((rendered(&without_tools), rendered(row)), ("d".to_owned(), "t".to_owned()));
    write("chat_template.json", "{\"chat_template\": \"{{ tools[0] | tojson(indent=1) }}\"}");
    assert_eq!(rendered(row), "{\n \"name\": \"f\"\n}");
    write(
        "chat_template.jinja",
        "{{ eos_token is defined }} {{ tools is none }} {{ documents }} {{ strftime_now('%%') }}",
    );
    assert_eq!(rendered(&without_tools), "False True None %");

    write("tokenizer_config.json", "{\"chat_template\": \"{{ bos_token }}|{{ eos_token }}\"}");
    fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    fs::remove_file(folder.path().join("chat_template.json")).unwrap();
    write("special_tokens_map.json", "{\"bos_token\": {\"content\": \"<s>\"}}");
    assert_eq!(rendered(row), "<s>|");
    let encoder = Encoder::open(folder.path(), options()).unwrap();
    write(
        "config.json",
        &json!({"eos_token_id": [encoder.prompt("</s>", None, false).unwrap()[1], 0]}).to_string(),
    );
    assert_eq!(rendered(row), "<s>|</s>");
}

#[test]
fn the_fingerprint_knows_all_that_changes_tokens() {
    let special = json!({"eos_token": "<|im_end|>"});
    let folder = folder(&special, Some("Qwen-Qwen3-0.6B"));
    let print = |options: EncoderOptions| Encoder::open(folder.path(), options).unwrap().fingerprint();
    let mut seen = vec![print(options())];
    assert_eq!(print(options()), seen[0]);
    seen.push(print(EncoderOptions { vocabulary: 9_999, ..options() }));
    seen.push(print(EncoderOptions { columns: "text=body".parse().unwrap(), ..options() }));
    seen.push(print(EncoderOptions { variables: Map::new(), ..options() }));
    // The day counts where a template asks for it.
    let day = |text: &str| print(EncoderOptions { day: text.parse().unwrap(), ..options() });
    assert_eq!(day("2024-07-26"), day("2024-07-27"));
    fs::write(folder.path().join("chat_template.jinja"), "{{ strftime_now('%d') }}").unwrap();
    seen.extend([day("2024-07-26"), day("2024-07-27")]);
    fs::write(folder.path().join("tokenizer_config.json"), "{\"eos_token\": \"</s>\"}").unwrap();
    seen.push(day("2024-07-26"));
    fs::write(
        folder.path().join("tokenizer_config.json"),
        "{\"eos_token\": \"</s>\", \"add_bos_token\": false}",
    )
    .unwrap();
    seen.push(day("2024-07-26"));
    for (index, one) in seen.iter().enumerate() {
        assert!(!seen[..index].contains(one), "{index}");
    }
}
