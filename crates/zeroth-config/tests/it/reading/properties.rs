//! Properties of the parser: no text panics, locations are inside the text, and values round-trip.

use proptest::prelude::*;
use serde_json::Value as Json;

use super::{ConfigSource, JsonNode, JsonValue, Number, parse, read, same};

/// A fragment of a config, so that random texts get past their first character.
fn piece() -> impl Strategy<Value = String> {
    let pieces = [
        "{", "}", "[", "]", ",", ":", "\"", "'", "'''", "\n", "\r\n", " ", "\t", "// c\n", "# c\n",
        "/* c */", "/*", "\\", "\\u00e9", "\\ud83d", "a", "\"a\": ", "key: ", "b", "true", "null", "NaN",
        "True", "1", "-0.5e8", "1e999", "012", ".", "é", "\u{a0}", "“", "\0", "\u{1}", "\u{feff}",
    ];
    prop_oneof![8 => prop::sample::select(pieces.to_vec()).prop_map(str::to_owned), 1 => ".{0,3}"]
}

/// A JSON object of objects, lists and scalars.
fn object() -> impl Strategy<Value = Json> {
    let number = prop_oneof![
        any::<i64>().prop_map(Json::from),
        any::<f64>().prop_filter_map("finite", |value| value.is_finite().then(|| Json::from(value))),
        (-1000i32..1000).prop_map(|tenths| Json::from(f64::from(tenths) / 10.0)),
    ];
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        number,
        any::<String>().prop_map(Json::from)
    ];
    let value = leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Json::from),
            prop::collection::vec((any::<String>(), inner), 0..6)
                .prop_map(|members| Json::Object(members.into_iter().collect())),
        ]
    });
    prop::collection::vec((any::<String>(), value), 0..6)
        .prop_map(|members| Json::Object(members.into_iter().collect()))
}

/// Whitespace and comments.
fn blank() -> impl Strategy<Value = String> {
    let pieces = ["", " ", "\t", "\n", "\r\n", "// 1, {\n", "# \"é\n", "/* 2 */", "/*\n}*/"];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..4).prop_map(|pieces| pieces.concat())
}

/// Prints a value with whitespace and comments between its tokens, and a trailing comma if the count is odd.
fn print(value: &Json, blank: &mut dyn FnMut() -> String) -> String {
    let (open, parts, close) = match value {
        Json::Array(elements) => {
            let parts: Vec<String> =
                elements.iter().map(|element| [blank(), print(element, blank), blank()].concat()).collect();
            ("[", parts, "]")
        }
        Json::Object(members) => {
            let mut part = |(key, value): (&String, &Json)| {
                let key = Json::from(key.as_str()).to_string();
                [blank(), key, blank(), ":".to_owned(), blank(), print(value, blank), blank()].concat()
            };
            ("{", members.iter().map(&mut part).collect(), "}")
        }
        _ => return value.to_string(),
    };
    let comma = if parts.len() % 2 == 1 { "," } else { "" };
    [open, &parts.join(","), comma, &blank(), close].concat()
}

/// Calls `visit` with every node of a tree.
fn walk(node: &JsonNode, visit: &mut impl FnMut(&JsonNode)) {
    visit(node);
    match &node.value {
        JsonValue::List(nodes) => nodes.iter().for_each(|node| walk(node, visit)),
        JsonValue::Object(entries) => entries.iter().for_each(|entry| walk(&entry.node, visit)),
        _ => {}
    }
}

/// Parses bytes and checks the spans of the result or the location of the error.
fn check_reading(bytes: &[u8]) -> Result<(), TestCaseError> {
    let outcome = ConfigSource::from_bytes("x", bytes.to_owned()).and_then(|source| {
        let text = source.text().to_owned();
        parse(source).map(|document| (text, document))
    });
    match outcome {
        Ok((text, document)) => {
            prop_assert!(matches!(document.root.value, JsonValue::Object(_)));
            let mut inside = true;
            walk(&document.root, &mut |node| inside &= text.get(node.span.start..node.span.end).is_some());
            prop_assert!(inside, "a span is not a piece of the text");
        }
        Err(error) => {
            let Some(location) = error.location else {
                prop_assert!(error.message.contains("UTF-16"), "no place: {error}");
                return Ok(());
            };
            let text = String::from_utf8_lossy(bytes);
            let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
            let line = text.split('\n').nth(location.line - 1);
            prop_assert!(
                line.is_some_and(|line| location.column <= line.chars().count() + 1),
                "outside: {error}"
            );
            let span = error.span.expect("a place comes with a span");
            prop_assert!(
                text.get(span.start..span.end).is_some(),
                "{span:?} is no piece of the text: {error}"
            );
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn bytes_are_parsed_or_refused_with_a_location(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        check_reading(&bytes)?;
    }

    #[test]
    fn config_fragments_are_parsed_or_refused_with_a_location(pieces in prop::collection::vec(piece(), 0..40)) {
        check_reading(pieces.concat().as_bytes())?;
    }

    #[test]
    fn json_objects_round_trip(object in object()) {
        for text in [object.to_string(), format!("{object:#}")] {
            let ours = read(&text).map_err(|error| TestCaseError::fail(format!("{text}\n{error}")))?;
            prop_assert!(same(&ours.root.value.to_json(), &object), "{text}");
        }
    }

    #[test]
    fn spans_and_locations_are_right_among_comments(object in object(), blanks in prop::collection::vec(blank(), 1..60)) {
        let mut cycle = blanks.iter().cycle().cloned();
        let mut blank = || cycle.next().expect("a cycle does not end");
        let text = [blank(), print(&object, &mut blank), blank()].concat();
        let document = read(&text).map_err(|error| TestCaseError::fail(format!("{text}\n{error}")))?;
        prop_assert!(same(&document.root.value.to_json(), &object), "{text}");
        let mut wrong = Vec::new();
        walk(&document.root, &mut |node| {
            let written = &text[node.span.start..node.span.end];
            let before = &text[..node.span.start];
            let location = document.source.location(node.span.start);
            let line_start = before.rfind('\n').map_or(0, |at| at + 1);
            let right = match &node.value {
                JsonValue::Number(number) => Number::from_text(written).as_ref() == Some(number),
                JsonValue::Text(inner) => serde_json::from_str(written).ok() == Some(Json::from(inner.as_str())),
                _ => true,
            };
            if !right
                || location.line != before.matches('\n').count() + 1
                || location.column != before[line_start..].chars().count() + 1
            {
                wrong.push((location, written.to_owned()));
            }
        });
        prop_assert!(wrong.is_empty(), "{wrong:?} in\n{text}");
    }
}
