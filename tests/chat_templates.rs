//! Chat templates from strangers: what they may take of memory and time is bounded, and real ones are not disturbed.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zeroth::data::{Encode, Encoded, Encoder, EncoderOptions};

use crate::common::{Ended, root, zeroth, zeroth_json};

/// The small model with another chat template.
fn model(folder: &Path, template: &str) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(root().join("examples/gsm8k/tiny-qwen3").join(name), model.join(name)).unwrap();
    }
    fs::write(model.join("chat_template.jinja"), template).unwrap();
    model
}

fn rows(folder: &Path, contents: &[&str]) -> PathBuf {
    let row = |content: &&str| {
        let said = [("user", *content), ("assistant", "Yes.")];
        let messages = said.map(|(role, content)| json!({"role": role, "content": content}));
        json!({"messages": messages}).to_string() + "\n"
    };
    let path = folder.join("rows.jsonl");
    fs::write(&path, contents.iter().map(row).collect::<String>()).unwrap();
    path
}

fn preview(model: &Path, data: &Path, more: &[&str]) -> Ended {
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let ended = zeroth(&[&["data", "preview", "--model", model, "--data", data], more].concat());
    assert!(ended.is_orderly(), "{}", ended.stderr);
    ended
}

/// The template is stopped, and this is what it did.
fn assert_stopped(template: &str, what: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (model(folder.path(), template), rows(folder.path(), &["Hi"]));
    let run = folder.path().join("run");
    let [model, data, run] = [&model, &data, &run].map(|path| path.to_str().unwrap());
    let ended = zeroth(&["train", "--device", "cpu", "--model", model, "--data", data, "--output", run]);
    assert!(ended.is_orderly(), "{template}: {}", ended.stderr);
    assert_eq!(ended.code, 2, "{template}: {}", ended.stderr);
    let words =
        format!("rows.jsonl: line 1: the chat template in chat_template.jinja was stopped: it {what}");
    assert!(ended.stderr.contains(&words), "{template}: {}", ended.stderr);
}

/// A body that is repeated with `ns.x`, and then something of it.
fn repeated(start: &str, times: u32, body: &str, end: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{{% set ns.x = {body} %}}{{% endfor %}}{end}"
    )
}

#[test]
fn values_that_grow_without_end_are_stopped() {
    for template in [
        repeated("'a'", 60, "ns.x ~ ns.x", ""),
        repeated("'aa'", 60, "ns.x|replace('a', ns.x)", ""),
        repeated("'a'", 60, "[ns.x, ns.x]|join(ns.x)", ""),
        repeated("[]", 100, "ns.x + ['a' * (10000000 + i)]", ""),
        "{% set x = ('a\\n' * 100000)|indent(100000, true) %}".to_owned(),
        "{% set x %}{% for i in range(100) %}{{ 'a' * 10000000 }}{% endfor %}{% endset %}".to_owned(),
        // Put together by the compiler.
        format!("{{{{ [{}] }}}}", vec!["'a' * 100000000"; 20].join(", ")),
    ] {
        assert_stopped(&template, "took more than 512 MiB of memory");
    }
    // Made item by item, so that time may end before memory does.
    for template in [
        repeated("['a']", 60, "ns.x + ns.x", "{{ ns.x|list|length }}"),
        repeated("['a']", 60, "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    ] {
        assert_stopped(&template, "took more than ");
    }
}

#[test]
fn loops_and_macros_without_end_are_stopped() {
    let loops = "{% for a in range(100000) %}".repeat(4) + &"{% endfor %}".repeat(4);
    let macros = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}";
    for template in [loops.as_str(), macros] {
        assert_stopped(template, "took more than 10,000,000 steps");
    }
    // One step: the comparison of two lists with 2^60 leaves.
    let same = repeated("[]", 60, "[ns.x, ns.x]", "{% set a = ns.x %}")
        + &repeated("[]", 60, "[ns.x, ns.x]", "{{ a == ns.x }}");
    assert_stopped(&same, "took more than 5 s of processor time");
}

#[test]
fn values_that_are_nested_without_end_are_stopped() {
    assert_stopped(
        &repeated("[]", 1000, "[ns.x]", "{{ ns.x|tojson }}"),
        "gave `tojson` a value nested more than 256",
    );
    assert_stopped(&repeated("[]", 99_999, "[ns.x]", "{{ ns.x }}"), "nested values too deeply for its stack");
}

#[test]
fn output_without_end_is_stopped() {
    let template = "{% for i in range(100) %}{{ 'a' * 10000000 }}{% endfor %}";
    assert_stopped(template, "wrote more than 64 MiB");
}

#[test]
fn rows_after_one_that_stopped_the_template_are_rendered() {
    let folder = tempfile::tempdir().unwrap();
    let double = repeated("'a'", 60, "ns.x ~ ns.x", "");
    let template = format!(
        "{{% for m in messages %}}{{% if m.content == 'grow' %}}{double}{{% endif %}}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    );
    let (model, data) = (model(folder.path(), &template), rows(folder.path(), &["Hi", "grow", "Ho", "grow"]));
    let ended = preview(&model, &data, &["--rows", "4"]);
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    assert!(ended.stdout.contains("4 rows read, 2 kept"), "{}", ended.stdout);
    for line in [2, 4] {
        let words = format!(
            "line {line}: the chat template in chat_template.jinja was stopped: it took more than 512"
        );
        assert!(ended.stdout.contains(&words), "{}", ended.stdout);
    }
}

#[test]
fn real_templates_give_the_same_tokens_as_in_a_process_without_bounds() {
    let golden = root().join("crates/zeroth-data/tests/golden");
    let text = fs::read_to_string(golden.join("chat_templates.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    let conversations = cases["conversations"].as_array().unwrap();
    let mut templates = 0;
    for entry in fs::read_dir(golden.join("templates")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        templates += 1;
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path(), &fs::read_to_string(&path).unwrap());
        fs::copy(golden.join("tokenizer/tokenizer.json"), model.join("tokenizer.json")).unwrap();
        let config = fs::read_to_string(model.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["vocab_size"] = 10_000.into();
        fs::write(model.join("config.json"), config.to_string()).unwrap();

        let data = folder.path().join("rows.jsonl");
        fs::write(&data, conversations.iter().map(|row| row.to_string() + "\n").collect::<String>()).unwrap();
        let encoder = Encoder::open(&model, EncoderOptions::new(10_000)).unwrap();
        let mut expected = Vec::new();
        for row in conversations {
            let mut into = Encoded::default();
            if encoder.encode(row.as_object().unwrap(), &mut into).is_ok() {
                expected.push((json!(into.ids), json!(into.labels)));
            }
        }
        let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
        let (_, found) = zeroth_json(&["data", "preview", "--model", model, "--data", data, "--rows", "99"]);
        let first = found["first"].as_array().unwrap();
        let found: Vec<_> =
            first.iter().map(|row| (row["input_ids"].clone(), row["labels"].clone())).collect();
        assert!(expected.len() > conversations.len() / 3, "{}: {}", path.display(), expected.len());
        assert_eq!(found, expected, "{}", path.display());
    }
    assert_eq!(templates, 8);
}
