//! Characters that steer a terminal, or reorder the text around them. Text from files is shown with them escaped.

use std::borrow::Cow;

/// Control characters (C0, DEL, C1), and those that change text direction or break lines.
pub fn is_control_character(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text with its control characters as `\u{1b}`.
pub fn escape_control_characters(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control_character) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_control_character(character) {
            escaped.extend(character.escape_unicode());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_is_escaped_and_the_rest_stays() {
        assert_eq!(
            escape_control_characters("a\nb\u{1b}[31m\u{9b}\u{202e}\u{2066}"),
            "a\\u{a}b\\u{1b}[31m\\u{9b}\\u{202e}\\u{2066}"
        );
        for text in ["", "eval_loss", "äöü 漢字 🙂 👩\u{200d}🔬"] {
            assert!(matches!(escape_control_characters(text), Cow::Borrowed(same) if same == text));
        }
    }
}
