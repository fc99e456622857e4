//! Conversations far longer than any training row stay within the template limits.

use std::fs;
use std::path::Path;

use serde_json::json;
use zeroth_data::{Encoder, EncoderOptions};

#[test]
fn ten_thousand_messages_are_rendered_by_every_real_template() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let message = |number: usize| {
        let role = if number.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("Message {number}.")})
    };
    let row = json!({"messages": (0..10_000).map(message).collect::<Vec<_>>()});
    let mut templates = 0;
    for entry in fs::read_dir(golden.join("templates")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        templates += 1;
        let folder = tempfile::tempdir().unwrap();
        fs::copy(golden.join("tokenizer/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        let special = json!({"bos_token": "<s>", "eos_token": "</s>"});
        fs::write(folder.path().join("tokenizer_config.json"), special.to_string()).unwrap();
        fs::copy(&path, folder.path().join("chat_template.jinja")).unwrap();
        let encoder = Encoder::open(folder.path(), EncoderOptions::new(10_000)).unwrap();
        let text = encoder.render(row.as_object().unwrap(), false);
        let text = text.unwrap_or_else(|problem| panic!("{}: {problem}", path.display()));
        assert!(text.contains("Message 9999."), "{}", path.display());
    }
    assert_eq!(templates, 8);
}

#[test]
fn steps_and_depth_are_limited_in_process() {
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}";
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let row = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (template, what) in [
        (deep, "it gave `tojson` a value nested more than 256 deep"),
        (loops, "it took more than 10,000,000 steps"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let encoder = Encoder::open(folder.path(), EncoderOptions::new(10_000)).unwrap();
        let problem = encoder.render(row.as_object().unwrap(), false).unwrap_err().to_string();
        let words = format!(
            "the chat template in chat_template.jinja was stopped: {what}, which no conversation needs"
        );
        assert!(problem.starts_with(&words), "{problem}");
    }
}
