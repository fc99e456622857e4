//! Sanitises text from files and models for a terminal: control characters are escaped.
//!
//! zeroth's own colours are markers until they are printed. A marker contains a random number drawn at start, so that
//! no outside text can forge one.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

use zeroth::base::{escape_control_characters, is_control_character};

/// Noncharacters, which Unicode reserves for internal use.
const MARKER_START: char = '\u{fdd0}';
const MARKER_END: char = '\u{fdd1}';

fn number() -> &'static str {
    static NUMBER: OnceLock<String> = OnceLock::new();
    NUMBER.get_or_init(|| format!("{:016x}", RandomState::new().build_hasher().finish()))
}

/// A marker that becomes an SGR escape sequence when printed.
pub(crate) fn colour_marker(code: &str) -> String {
    format!("{MARKER_START}{}{code}{MARKER_END}", number())
}

/// Sanitises text: newlines and tabs stay, markers become colours.
pub(crate) fn sanitize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        if let Some((code, after)) = strip_marker(rest) {
            out.push_str(&format!("\u{1b}[{code}m"));
            rest = after;
            continue;
        }
        match character {
            '\n' | '\t' => out.push(character),
            other if is_control_character(other) => out.extend(other.escape_unicode()),
            other => out.push(other),
        }
        rest = &rest[character.len_utf8()..];
    }
    out
}

/// Sanitises text for a single line: newlines and tabs are escaped too.
pub(crate) fn one_line(text: &str) -> String {
    escape_control_characters(text).into_owned()
}

/// Escapes control characters in JSON without changing its value: they only occur in strings, where an escape is
/// equivalent.
pub(crate) fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        // serde_json already escapes those below U+0020 in strings.
        if character >= '\u{7f}' && is_control_character(character) {
            out.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            out.push(character);
        }
    }
    out
}

fn strip_marker(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix(MARKER_START)?.strip_prefix(number())?.split_once(MARKER_END)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(sanitize("a\u{1b}[31mb\r\u{7}\u{9b}2J\u{202e}\u{7f}c"), {
            "a\\u{1b}[31mb\\u{d}\\u{7}\\u{9b}2J\\u{202e}\\u{7f}c"
        });
        assert_eq!(sanitize("two lines\n\tand a tab: äöü 漢字 🙂"), "two lines\n\tand a tab: äöü 漢字 🙂");
        assert_eq!(one_line("a\nb\tc\u{1b}"), "a\\u{a}b\\u{9}c\\u{1b}");
    }

    #[test]
    fn forged_markers_are_not_colours() {
        let text = format!("{}\u{1b}[0m{}", colour_marker("31"), colour_marker("0"));
        assert_eq!(sanitize(&text), "\u{1b}[31m\\u{1b}[0m\u{1b}[0m");
        // With a different number.
        let forged = format!("{MARKER_START}0123456789abcdef31{MARKER_END}red");
        assert_eq!(sanitize(&forged), forged);
        assert_eq!(sanitize(&sanitize("\u{1b}[31m")), sanitize("\u{1b}[31m"));
    }

    #[test]
    fn json_keeps_its_value() {
        let value = serde_json::json!({ "a\u{9b}\u{1b}\u{202e}": ["\u{7f}", "ä\n"] });
        let text = json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.contains(|character| is_control_character(character) && character != '\n'), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
