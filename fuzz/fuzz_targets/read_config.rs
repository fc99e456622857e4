//! Any bytes are read as a config or refused at a place inside of them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zeroth_config::read::{Document, JsonNode, Number, ReadErrorKind, ConfigSource, JsonValue, parse};

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    match ConfigSource::from_bytes("fuzz", bytes.to_vec()).and_then(parse) {
        Ok(document) => {
            assert!(matches!(document.root.value, JsonValue::Object(_)));
            assert_eq!(document.source.text(), text);
            check(&document, &document.root);
            // Printed as JSON it reads again. Once: digits that no f64 holds are rounded. Twice: nothing changes.
            let printed = read_again(&document.root.value.to_json());
            assert_eq!(read_again(&printed), printed);
        }
        Err(error) => {
            let Some(location) = error.location else {
                assert_eq!(error.kind, ReadErrorKind::Encoding, "only UTF-16 as a whole has no place");
                return;
            };
            let span = error.span.expect("a place comes with a span");
            assert!(text.get(span.start..span.end).is_some(), "{span:?} is no piece of the text");
            let before = &text[..span.start];
            let line_start = before.rfind('\n').map_or(0, |at| at + 1);
            assert_eq!(location.line, before.matches('\n').count() + 1);
            assert_eq!(location.column, before[line_start..].chars().count() + 1);
            assert!(error.line_text.is_some() && error.help.is_some());
        }
    }
});

fn read_again(json: &serde_json::Value) -> serde_json::Value {
    parse(ConfigSource::from_text("again", json.to_string())).expect("JSON is a config").root.value.to_json()
}

/// Every span is a piece of the text inside of its parent's, and a number's piece is that number.
fn check(document: &Document, node: &JsonNode) {
    let inside = |child: &JsonNode| node.span.start <= child.span.start && child.span.end <= node.span.end;
    match &node.value {
        JsonValue::Number(number) => {
            let written = &document.source.text()[node.span.start..node.span.end];
            assert_eq!(Number::from_text(written).as_ref(), Some(number));
            assert!(number.as_f64().is_finite());
        }
        JsonValue::List(nodes) => nodes.iter().for_each(|child| {
            assert!(inside(child));
            check(document, child);
        }),
        JsonValue::Object(entries) => entries.iter().for_each(|entry| {
            assert!(inside(&entry.node) && entry.key_span.end <= entry.node.span.start);
            check(document, &entry.node);
        }),
        JsonValue::Null | JsonValue::Bool(_) | JsonValue::Text(_) => {
            assert!(document.source.text().get(node.span.start..node.span.end).is_some());
        }
    }
}
