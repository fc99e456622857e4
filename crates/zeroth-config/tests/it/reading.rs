//! Parsing configs: values equal those of DeepSpeed's parser, errors have a location, and no text panics.

use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::Value as Json;
use zeroth_config::read::{
    ConfigSource, Document, Entry, JsonNode, JsonValue, MAX_BYTES, MAX_DEPTH, Number, ReadError,
    ReadErrorKind, parse,
};

mod properties;

fn read(text: &str) -> Result<Document, ReadError> {
    parse(ConfigSource::from_text("ds.json", text))
}

fn read_json(text: &str) -> Json {
    match read(text) {
        Ok(document) => document.root.value.to_json(),
        Err(error) => panic!("{text}\n{error} ({:?})", error.help),
    }
}

/// Whether two JSON values are equal, with `1`, `1.0` and `1e0` as the same number.
fn same(a: &Json, b: &Json) -> bool {
    match (a, b) {
        (Json::Number(a), Json::Number(b)) => {
            // `-0.0 + 0.0` is `0.0`, so the sign of a zero is ignored.
            let bits = |number: &serde_json::Number| number.as_f64().map(|value| (value + 0.0).to_bits());
            a.as_i64().zip(b.as_i64()).map_or_else(|| bits(a) == bits(b), |(a, b)| a == b)
        }
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Object(a), Json::Object(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|((k, a), (l, b))| k == l && same(a, b))
        }
        _ => a == b,
    }
}

/// The cases of a group in golden.json, which is generated with the Python package `hjson`: name, text, value.
fn golden(group: &str) -> Vec<(String, String, Json)> {
    let golden: Json =
        serde_json::from_str(include_str!("../read/golden.json")).expect("make_golden.py writes JSON");
    let cases = golden[group].as_array().expect("a group is a list");
    let text = |case: &Json, key: &str| case[key].as_str().expect("a case has a name and a text").to_owned();
    cases.iter().map(|case| (text(case, "about"), text(case, "text"), case["value"].clone())).collect()
}

#[test]
fn values_equal_those_of_python_hjson() {
    let cases = golden("same");
    assert!(cases.len() >= 40);
    for (about, text, value) in cases {
        let ours = read_json(&text);
        assert!(same(&ours, &value), "{about}:\n{text}\nours:   {ours}\nhjson's: {value}");
    }
}

#[test]
fn texts_that_python_hjson_refuses_are_refused() {
    for (about, text, _) in golden("both_refuse") {
        let error = read(&text).expect_err(&about);
        assert!(error.location.is_some() && error.help.is_some(), "{about}: {error}");
    }
}

#[test]
fn mistakes_that_python_hjson_accepts_are_refused() {
    for (about, text, _) in golden("stricter") {
        let error = read(&text).expect_err(&about);
        assert!(error.location.is_some() && error.help.is_some(), "{about}: {error}");
    }
}

#[test]
fn syntax_errors_have_a_location_a_message_and_help() {
    for (text, line, column, message, help) in [
        // Never closed: the location of the opening.
        ("{\"a\": 1", 1, 1, "this `{` is never closed", "add `}`"),
        ("{\n \"a\": {\n  \"b\": 1\n }", 1, 1, "this `{` is never closed", "add `}`"),
        ("{\n \"a\": [1, 2", 2, 7, "this `[` is never closed", "add `]`"),
        ("{\n \"a\": \"x,\n \"b\": 1}", 2, 7, "this text is not closed on its line", "add the closing `\"`"),
        ("{'a': 'x\n}", 1, 7, "not closed on its line", "add the closing `'`"),
        ("{\"a\": \"x\\\n\"}", 1, 7, "not closed on its line", "\\n"),
        ("{\n a: '''x\n}", 2, 5, "this `'''` is never closed", "add `'''`"),
        ("{\"a\": 1} /* x", 1, 10, "this comment is never closed", "add `*/`"),
        ("{\n zero: {device: cpu}\n}", 1, 1, "never closed", "the text of line 2, column 17 runs to the end"),
        ("a: [x, y]\n", 1, 4, "this `[` is never closed", "the text of line 1, column 5 runs to the end"),
        // Separators.
        ("{\"a\": 1 \"b\": 2}", 1, 9, "a comma is missing before `\"b\":`", "write `,`"),
        ("{\"a\": [1 2]}", 1, 10, "a comma is missing before `2`", "write `,`"),
        ("{\"a\": {} \"b\": 2}", 1, 10, "a comma is missing", "write `,`"),
        ("{\"name\": 3 blind mice}", 1, 12, "a comma is missing before `blind`", "quotes around text"),
        ("{\"a\": [1,,2]}", 1, 10, "nothing before this comma", "remove it"),
        ("{, \"a\": 1}", 1, 2, "nothing before this comma", "remove it"),
        // Members.
        ("{\"a\" 1}", 1, 2, "the key `\"a\"` has no colon", "a member is"),
        ("{\"a\" = 1}", 1, 2, "has no colon", "write `:` instead of `=`"),
        ("stage=3\n", 1, 1, "the key `stage=3` has no colon", "write `stage: 3`"),
        ("{\"a\", \"b\": 1}", 1, 2, "has no colon", "a member is"),
        ("{\"a\": ,\"b\": 1}", 1, 2, "the key `a` has no value", "after the colon"),
        ("{\n \"a\":\n}", 2, 2, "the key `a` has no value", "after the colon"),
        ("\"a\":", 1, 1, "the key `a` has no value", "after the colon"),
        ("{\n \"a\":\n \"b\": 1}", 2, 2, "the key `a` has no value", "after the colon"),
        ("{\"a\": \"b\": 1}", 1, 10, "this colon follows no key", "is a value, a comma or a `{` missing"),
        ("stage:\noverlap: true", 1, 1, "the key `stage` has no value", "needs quotes"),
        ("{: 1}", 1, 2, "no key before this colon", "a member is"),
        ("{[1]: 1}", 1, 2, "`[` stands where a key was expected", "a member is"),
        ("{\"a\": [\"b\": 1]}", 1, 11, "this colon follows no key", "`{` missing"),
        // Brackets.
        ("{\"a\": [1}\n", 1, 9, "`}` does not close the `[` of line 1, column 7", "write `]`"),
        ("{\n \"a\": 1\n]", 3, 1, "`]` does not close the `{` of line 1, column 1", "write `}`"),
        ("{\"a\": 1}}", 1, 9, "this `}` closes nothing", "remove it"),
        ("\"a\": 1\n}", 2, 1, "this `}` closes nothing", "remove it"),
        ("{\"a\": 1} x", 1, 10, "more after the end", "before the last `}`"),
        ("{\"a\": 1},\n", 1, 9, "more after the end", "remove it"),
        // Words.
        ("{\n  \"stage\": treu,\n}", 2, 12, "`treu` is no JSON value", "did you mean `true`?"),
        ("{\"a\": yes}", 1, 7, "`yes` is no JSON value", "did you mean `true`?"),
        ("{\"a\": NULL}", 1, 7, "`NULL` is no JSON value", "did you mean `null`?"),
        ("{\"device\": cpu}", 1, 12, "`cpu` is no JSON value", "put text in quotes: `\"cpu\"`"),
        ("{\"x\": two words // c\n}", 1, 7, "`two` is no JSON value", "put text in quotes: `\"two words\"`"),
        ("{\"a\": True}", 1, 7, "`True` is Python's spelling", "write `true`"),
        ("a: False\n", 1, 4, "`False` is Python's spelling", "write `false`"),
        ("a: [\n None\n]", 2, 2, "`None` is Python's spelling", "write `null`"),
        ("{\"a\": NaN}", 1, 7, "`NaN` is no JSON number", "finite"),
        ("a: -Infinity # x", 1, 4, "`-Infinity` is no JSON number", "finite"),
        // Numbers.
        ("{\"a\": 1e999}", 1, 7, "`1e999` is larger than the largest number", "smaller"),
        ("lr: -1e999", 1, 5, "`-1e999` is larger than the largest number", "smaller"),
        ("{\"a\": 012}", 1, 7, "`012` is no JSON number: it begins with a zero", "write `12`"),
        ("{\"a\": -00.5}", 1, 7, "it begins with a zero", "write `-0.5`"),
        ("{\"a\": .5}", 1, 7, "a digit must precede the point", "write `0.5`"),
        ("{\"a\": +1}", 1, 7, "it begins with `+`", "write `1`"),
        ("{\"a\": 5.}", 1, 7, "a digit must follow the point", "write `5.0`"),
        ("{\"a\": 1.e5}", 1, 7, "a digit must follow the point", "write `1.0e5`"),
        ("{\"a\": 0x1F}", 1, 7, "no hexadecimal", "write `31`"),
        ("{\"a\": 500_000}", 1, 7, "digits are not grouped", "write `500000`"),
        ("{\"a\": 2GB}", 1, 7, "`2GB` is no JSON number", "put text in quotes: `\"2GB\"`"),
        ("{\"a\": 1e}", 1, 7, "`1e` is no JSON number", "put text in quotes"),
        ("{\"a\": -}", 1, 7, "`-` is no JSON number", "put text in quotes"),
        // Characters.
        ("{\"a\": \"x\ty\"}", 1, 9, "a tab cannot stand inside of quotes", "write `\\t`"),
        ("{\"a\": \"C:\\data\"}", 1, 10, "`\\d` is no escape", "write `\\\\` for a backslash"),
        ("{\"a\": \"\\u12g4\"}", 1, 8, "`\\u` needs four hexadecimal digits", "\\u00e9"),
        ("{\"a\": \"é\\ud83d\"}", 1, 9, "`\\ud83d` is half of a surrogate pair", "both halves"),
        ("{\"a\": \"\\uDE00\\ud83d\"}", 1, 8, "`\\uDE00` is half of a surrogate pair", "both halves"),
        ("{\"a\": \"\\ud83d\\u0041\"}", 1, 8, "`\\ud83d` is half of a surrogate pair", "both halves"),
        ("{\n “stage”: 3}", 2, 2, "`“` is a typographic quote", "plain quote"),
        ("{\"a\": “x”}", 1, 7, "`“` is a typographic quote", "plain quote"),
        ("{\"a\":\u{a0}1}", 1, 6, "invisible character U+00A0", "plain space"),
        ("{\"a\": \"x\"\u{a0}, \"b\": 1}", 1, 10, "invisible character U+00A0", "plain space"),
        ("{\0\"\0a\0", 1, 2, "invisible character U+0000", "UTF-16"),
        ("a: x\u{1}y", 1, 5, "invisible character U+0001", "remove it"),
    ] {
        let error = read(text).expect_err(text);
        let location = error.location.expect(text);
        assert_eq!((location.line, location.column), (line, column), "{text}\n{error}");
        assert_eq!(error.kind, ReadErrorKind::Syntax, "{text}");
        assert!(error.message.contains(message), "{text}\n{error}");
        let advice = error.help.as_deref().expect(text);
        assert!(advice.contains(help), "{text}\n{error}\nhelp: {advice}");
        assert_eq!(error.line_text.as_deref(), text.lines().nth(line - 1), "{text}");
    }
}

#[test]
fn errors_start_with_the_file_and_the_location() {
    let error = read("{\n  \"stage\": treu\n}").unwrap_err();
    assert_eq!(error.to_string(), "ds.json: line 2, column 12: `treu` is no JSON value");
    let span = error.span.unwrap();
    assert_eq!((span.start, span.end), (13, 17), "the word, and nothing else, is underlined");
}

#[test]
fn messages_contain_no_control_characters() {
    for text in
        ["{\"a\": 1 x\u{1b}[31m}", "{\"a\": \"\\\u{1b}[31m\"}", "{\"\\u001b[31m\": }", "a: \u{1b}[31m"]
    {
        let error = read(text).expect_err(text);
        let printed = format!("{error}{}", error.help.as_deref().unwrap_or_default());
        assert!(!printed.contains(char::is_control), "{printed:?}");
    }
}

#[test]
fn root_that_is_not_an_object_is_refused_with_its_type() {
    for (text, line, column, found) in [
        ("[1, 2]", 1, 1, "a list"),
        ("// x\n 3 # y", 2, 2, "a number"),
        ("\"x\"", 1, 1, "text"),
        ("'''x'''", 1, 1, "text"),
        ("null\n", 1, 1, "null"),
        ("true", 1, 1, "a boolean"),
    ] {
        let error = read(text).expect_err(text);
        let location = error.location.unwrap();
        assert_eq!(
            (error.kind, location.line, location.column),
            (ReadErrorKind::NotAnObject, line, column),
            "{text}"
        );
        assert!(error.message.contains(found), "{text}: {error}");
    }
    for text in ["", " \n\t", "# only a comment", "/* x */"] {
        assert_eq!(read(text).expect_err(text).kind, ReadErrorKind::Empty, "{text}");
    }
}

#[test]
fn nesting_beyond_the_limit_is_refused_with_a_location() {
    let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
    assert!(read(&nested(MAX_DEPTH)).is_ok());
    let error = read(&nested(MAX_DEPTH + 1)).unwrap_err();
    assert_eq!((error.kind, error.location.unwrap().column), (ReadErrorKind::TooDeep, 5 + MAX_DEPTH));
    let objects = "{\"a\":".repeat(100_000);
    assert_eq!(read(&objects).unwrap_err().kind, ReadErrorKind::TooDeep, "and the stack holds");
    assert_eq!(read(&objects[1..]).unwrap_err().location.unwrap().column, 4 + 5 * (MAX_DEPTH - 1) + 1);
}

#[test]
fn duplicate_keys_are_kept_in_file_order() {
    let document = read("{\"a\": 1, \"b\": 2, \"a\": 3}").unwrap();
    let JsonValue::Object(entries) = &document.root.value else { panic!("an object") };
    let keys: Vec<_> = entries.iter().map(|entry| (entry.key.as_str(), entry.key_span.start)).collect();
    assert_eq!(keys, [("a", 1), ("b", 9), ("a", 17)]);
    assert_eq!(document.root.value.to_json(), serde_json::json!({"a": 3, "b": 2}));
}

#[test]
fn spans_include_brackets_and_quotes() {
    let text = "{ \"é\" : [ 1 , 'x' ] , key: some text # x\n m: '''q''' }\n";
    let document = read(text).unwrap();
    let JsonValue::Object(entries) = &document.root.value else { panic!("an object") };
    let parts: Vec<_> = entries
        .iter()
        .flat_map(|Entry { key_span, node, .. }| [*key_span, node.span])
        .map(|span| &text[span.start..span.end])
        .collect();
    assert_eq!(parts, ["\"é\"", "[ 1 , 'x' ]", "key", "some text # x", "m", "'''q'''"]);
    assert_eq!(&text[document.root.span.start..document.root.span.end], text.trim_end());
    assert_eq!(entries[1].node.value.kind(), "text");
}

#[test]
fn one_byte_order_mark_is_skipped() {
    let source = ConfigSource::from_bytes("x", b"\xef\xbb\xbf{\"a\": tru}".to_vec()).unwrap();
    assert_eq!(source.text(), "{\"a\": tru}");
    assert_eq!(
        ConfigSource::from_bytes("x", b"\xef\xbb\xbf\xef\xbb\xbf{}".to_vec()).unwrap().text(),
        "\u{feff}{}",
        "one mark"
    );
    assert_eq!(parse(source).unwrap_err().location.unwrap().column, 7);
}

#[test]
fn text_that_is_not_utf8_is_refused_with_the_reason() {
    let error = ConfigSource::from_bytes("x", b"{\n \"caf\xe9\": 1}".to_vec()).unwrap_err();
    assert_eq!(error.to_string(), "x: line 2, column 6: the byte 0xE9 is not UTF-8");
    assert_eq!(error.line_text.as_deref(), Some(" \"caf\u{fffd}\": 1}"));
    for mark in [b"\xff\xfe", b"\xfe\xff"] {
        let error = ConfigSource::from_bytes("x", mark.to_vec()).unwrap_err();
        assert_eq!((error.kind, error.location), (ReadErrorKind::Encoding, None));
        assert!(error.message.contains("UTF-16"), "{error}");
    }
}

#[test]
fn files_are_read_or_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds_config.json");
    fs::write(&path, "{\"a\": 1}").unwrap();
    let source = ConfigSource::from_path(&path).unwrap();
    assert_eq!((source.name(), source.text()), (path.to_str().unwrap(), "{\"a\": 1}"));

    let absent = ConfigSource::from_path(&folder.path().join("ds_confg.json")).unwrap_err();
    assert_eq!(absent.kind, ReadErrorKind::NotFound);
    assert!(absent.to_string().ends_with("ds_confg.json: there is no such file"), "{absent}");
    assert_eq!(absent.help, Some(format!("did you mean `{}`?", path.display())));

    let a_folder = ConfigSource::from_path(folder.path()).unwrap_err();
    assert_eq!(a_folder.kind, ReadErrorKind::Io);
    assert!(a_folder.message.contains("this is a folder"), "{a_folder}");

    let file = fs::File::create(folder.path().join("large.json")).unwrap();
    file.set_len(MAX_BYTES + 1).unwrap();
    let large = ConfigSource::from_path(&folder.path().join("large.json")).unwrap_err();
    assert_eq!(large.kind, ReadErrorKind::TooLarge);
    assert!(large.message.contains("16777217 bytes"), "{large}");
    file.set_len(MAX_BYTES).unwrap();
    assert!(ConfigSource::from_path(&folder.path().join("large.json")).is_ok());
}

#[cfg(unix)]
#[test]
fn endless_stream_is_refused() {
    let error = ConfigSource::from_path(Path::new("/dev/zero")).unwrap_err();
    assert_eq!(error.kind, ReadErrorKind::TooLarge);
}

#[test]
fn argument_is_a_path_a_text_or_base64() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    fs::write(&path, "{\"a\": 1}").unwrap();
    assert_eq!(ConfigSource::from_argument(path.to_str().unwrap()).unwrap().text(), "{\"a\": 1}");

    let source = ConfigSource::from_argument(" {\"a\": 1}").unwrap();
    assert_eq!((source.name(), source.text()), ("<argument>", " {\"a\": 1}"));

    // `>>>???` needs the two characters in which the base64 alphabets differ.
    let text = "{\"a\": \">>>???\", \"b\": \"~~~\"} ";
    let broken: Vec<String> =
        STANDARD.encode(text).as_bytes().chunks(8).map(|c| format!("{}\n", c.escape_ascii())).collect();
    for packed in [STANDARD.encode(text), URL_SAFE_NO_PAD.encode(text), broken.concat()] {
        let source = ConfigSource::from_argument(&packed).unwrap();
        assert_eq!((source.name(), source.text()), ("<base64>", text), "{packed}");
    }
    let bare = ConfigSource::from_argument(&STANDARD.encode("stage: 3")).unwrap();
    assert_eq!(bare.text(), "stage: 3");
    let wrong = parse(ConfigSource::from_argument(&STANDARD.encode("{\"a\": tru}")).unwrap()).unwrap_err();
    assert_eq!(wrong.to_string(), "<base64>: line 1, column 7: `tru` is no JSON value");

    // The characters are valid base64, but the content is not a config.
    for argument in ["config", "aGVsbG8gd29ybGQ=", ""] {
        let error = ConfigSource::from_argument(argument).unwrap_err();
        assert_eq!(error.kind, ReadErrorKind::NotFound, "{argument}");
    }
    let long = folder.path().join("a/rather/long/path/of/folders/with/no/such/file/ds_config.json");
    let error = ConfigSource::from_argument(long.to_str().unwrap()).unwrap_err();
    assert_eq!(error.source_name, long.to_str().unwrap(), "a path is shown whole");
    let error = ConfigSource::from_argument(&"x".repeat(100_000)).unwrap_err();
    assert_eq!(error.kind, ReadErrorKind::NotFound);
    assert!(error.to_string().len() < 200, "a damaged argument is not printed whole");
}
