//! Text from files and models on its way to a terminal: what would command the terminal is spelled out.
//!
//! Our own colours are marks until the last moment. A mark carries a number that is drawn when the process starts, so that
//! no text from outside can hold one.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

/// Unicode keeps these two for a program's own use: no text has them.
const MARK: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

fn number() -> &'static str {
    static NUMBER: OnceLock<String> = OnceLock::new();
    NUMBER.get_or_init(|| format!("{:016x}", RandomState::new().build_hasher().finish()))
}

/// What becomes the sequence of a colour, by its number, when it is printed.
pub(crate) fn mark(code: &str) -> String {
    format!("{MARK}{}{code}{END}", number())
}

/// The text as it may be printed: line ends and tabs stay, marks become colours.
pub(crate) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        if let Some((code, after)) = marked(rest) {
            out.push_str(&format!("\u{1b}[{code}m"));
            rest = after;
            continue;
        }
        match character {
            '\n' | '\t' => out.push(character),
            other => push(&mut out, other),
        }
        rest = &rest[character.len_utf8()..];
    }
    out
}

/// The text on one line: line ends and tabs are spelled out, too.
pub(crate) fn one_line(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    text.chars().for_each(|character| push(&mut out, character));
    out
}

/// JSON of the same value without characters that command a terminal: they stand in strings only, where an escape is the
/// same.
pub(crate) fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        // The others below U+0020 are escaped already; outside of strings they are blanks.
        if character >= '\u{7f}' && is_command(character) {
            out.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            out.push(character);
        }
    }
    out
}

fn marked(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix(MARK)?.strip_prefix(number())?.split_once(END)
}

fn push(out: &mut String, character: char) {
    if is_command(character) {
        out.extend(character.escape_unicode());
    } else {
        out.push(character);
    }
}

/// Control characters (C0, DEL, C1), and those that change the direction of text or end a line elsewhere.
fn is_command(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_commands_a_terminal_is_spelled_out() {
        assert_eq!(plain("a\u{1b}[31mb\r\u{7}\u{9b}2J\u{202e}\u{7f}c"), {
            "a\\u{1b}[31mb\\u{d}\\u{7}\\u{9b}2J\\u{202e}\\u{7f}c"
        });
        assert_eq!(plain("two lines\n\tand a tab: äöü 漢字 🙂"), "two lines\n\tand a tab: äöü 漢字 🙂");
        assert_eq!(one_line("a\nb\tc\u{1b}"), "a\\u{a}b\\u{9}c\\u{1b}");
    }

    #[test]
    fn only_our_own_marks_become_colours() {
        let text = format!("{}\u{1b}[0m{}", mark("31"), mark("0"));
        assert_eq!(plain(&text), "\u{1b}[31m\\u{1b}[0m\u{1b}[0m");
        // Somebody else's number.
        let forged = format!("{MARK}0123456789abcdef31{END}red");
        assert_eq!(plain(&forged), forged);
        assert_eq!(plain(&plain("\u{1b}[31m")), plain("\u{1b}[31m"));
    }

    #[test]
    fn json_keeps_its_value() {
        let value = serde_json::json!({ "a\u{9b}\u{1b}\u{202e}": ["\u{7f}", "ä\n"] });
        let text = json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.contains(|character| is_command(character) && character != '\n'), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
