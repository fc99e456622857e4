//! Values without quotes: numbers, `true`, `false`, `null` and Hjson's quoteless text; suggestions for wrong words.

use super::cursor::{Cursor, ends_word};
use super::error::{Fault, Parsed, shown};
use super::location::TextSpan;
use super::number::{JsonNumber, Number};
use super::value::{JsonNode, JsonValue};

/// What a word says.
enum Word {
    Value(JsonValue),
    /// An error wherever it stands: what is wrong, and what to write.
    Refused(String, String),
    /// Neither: text, where text may go without quotes.
    Other,
}

impl Word {
    fn read(word: &str) -> Self {
        let python = |json: &str| {
            Self::Refused(
                format!("`{word}` is Python's spelling"),
                format!("write `{json}`, or \"{word}\" for text"),
            )
        };
        match word {
            "null" => Self::Value(JsonValue::Null),
            "true" => Self::Value(JsonValue::Bool(true)),
            "false" => Self::Value(JsonValue::Bool(false)),
            "True" => python("true"),
            "False" => python("false"),
            "None" => python("null"),
            "NaN" | "Infinity" | "-Infinity" => Self::Refused(
                format!("`{word}` is no JSON number"),
                "numbers in a config are finite: write one, or remove the key for its default".to_owned(),
            ),
            _ => match Number::from_json(word) {
                JsonNumber::Finite(number) => Self::Value(JsonValue::Number(number)),
                JsonNumber::TooLarge => Self::Refused(
                    format!("{} is larger than the largest number, about 1.8e308", shown(word)),
                    "write a smaller number".to_owned(),
                ),
                JsonNumber::No => Self::Other,
            },
        }
    }
}

impl Cursor<'_> {
    /// The JSON value that begins here and has neither quotes nor brackets.
    pub(super) fn json_word(&mut self) -> Parsed<JsonNode> {
        let start = self.at;
        let end = self
            .find(|bytes| ends_word(bytes) || matches!(bytes[0], b' ' | b'\t' | b'"' | b':' | b'{' | b'['));
        let span = TextSpan { start, end };
        let word = self.slice(span);
        match Word::read(word) {
            Word::Value(value) => {
                self.at = end;
                Ok(JsonNode { span, value })
            }
            Word::Refused(message, help) => Err(Fault::syntax(span, message, help)),
            Word::Other => {
                self.check_visible(span)?;
                // Text without its quotes has blanks in it: show it whole.
                let whole = self.slice(TextSpan { start, end: self.find(ends_word) }).trim_end();
                let (message, help) = not_a_value(word, whole);
                Err(Fault::syntax(span, message, help))
            }
        }
    }

    /// The Hjson value that begins here and has neither quotes nor brackets: a number, `true`, `false`, `null`, or
    /// text to the end of the line.
    pub(super) fn hjson_word(&mut self) -> Parsed<JsonNode> {
        let start = self.at;
        let word = self.slice(TextSpan { start, end: self.find(ends_word) }).trim_end();
        let span = TextSpan { start, end: start + word.len() };
        match Word::read(word) {
            Word::Value(value) => {
                self.at = span.end;
                Ok(JsonNode { span, value })
            }
            Word::Refused(message, help) => Err(Fault::syntax(span, message, help)),
            Word::Other => {
                let text = self.slice(TextSpan { start, end: self.line_end() }).trim_end();
                let control = text.char_indices().find(|&(_, c)| c.is_control() && c != '\t');
                if let Some((at, character)) = control {
                    return Err(invisible(start + at, character));
                }
                self.at = start + text.len();
                Ok(JsonNode { span: self.since(start), value: JsonValue::Text(text.to_owned()) })
            }
        }
    }

    /// Refuses characters that are not seen, or that only look like a quote, in a word or key without quotes.
    pub(super) fn check_visible(&self, span: TextSpan) -> Parsed<()> {
        for (at, character) in self.slice(span).char_indices() {
            let start = span.start + at;
            if is_invisible(character) {
                return Err(invisible(start, character));
            }
            if matches!(character, '“' | '”' | '„' | '‘' | '’' | '«' | '»') {
                return Err(Fault::syntax(
                    TextSpan { start, end: start + character.len_utf8() },
                    format!("`{character}` is a typographic quote"),
                    "write the plain quote `\"`",
                ));
            }
        }
        Ok(())
    }
}

fn is_invisible(character: char) -> bool {
    character.is_control()
        || character.is_whitespace()
        // Characters of no width, marks of direction, and the byte order mark.
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

fn invisible(start: usize, character: char) -> Fault {
    let help = match character {
        '\0' => "the file may be UTF-16: save it as UTF-8",
        '\u{a0}' => "it is a no-break space: write a plain space",
        _ => "remove it",
    };
    Fault::syntax(
        TextSpan { start, end: start + character.len_utf8() },
        format!("the invisible character U+{:04X} cannot stand outside of quotes", u32::from(character)),
        help,
    )
}

/// What is wrong with a word where JSON demands a value, and what was meant. `whole` is the word and what follows it
/// up to the next separator.
fn not_a_value(word: &str, whole: &str) -> (String, String) {
    const OTHER_WORDS: [(&str, &str); 7] = [
        ("yes", "true"),
        ("on", "true"),
        ("no", "false"),
        ("off", "false"),
        ("none", "null"),
        ("nil", "null"),
        ("undefined", "null"),
    ];
    if word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return match repaired(word) {
            Some((reason, number)) => {
                (format!("{} is no JSON number: {reason}", shown(word)), format!("write `{number}`"))
            }
            None => (format!("{} is no JSON number", shown(word)), in_quotes(whole)),
        };
    }
    let message = format!("{} is no JSON value", shown(word));
    let meant = OTHER_WORDS
        .iter()
        .find_map(|(other, literal)| word.eq_ignore_ascii_case(other).then_some(*literal))
        .or_else(|| zeroth_base::nearest(word, ["true", "false", "null"]));
    match meant {
        Some(literal) => (message, format!("did you mean `{literal}`?")),
        None => (message, in_quotes(whole)),
    }
}

fn in_quotes(text: &str) -> String {
    if text.contains('"') {
        "put text in quotes".to_owned()
    } else {
        format!("put text in quotes: {}", shown(&format!("\"{text}\"")))
    }
}

/// The JSON number that a number of another language was meant to be, and why it is none.
fn repaired(word: &str) -> Option<(&'static str, String)> {
    let (sign, digits) = match word.as_bytes()[0] {
        b'-' => ("-", &word[1..]),
        b'+' => ("", &word[1..]),
        _ => ("", word),
    };
    let lower = digits.to_ascii_lowercase();
    let (reason, number) = if let Some(hexadecimal) = lower.strip_prefix("0x") {
        let value = u64::from_str_radix(&hexadecimal.replace('_', ""), 16).ok()?;
        ("JSON has no hexadecimal numbers", format!("{sign}{value}"))
    } else if digits.contains('_') {
        ("digits are not grouped", format!("{sign}{}", digits.replace('_', "")))
    } else if digits.starts_with('.') {
        ("a digit must precede the point", format!("{sign}0{digits}"))
    } else if digits.starts_with('0') && digits[1..].starts_with(|c: char| c.is_ascii_digit()) {
        let stripped = digits.trim_start_matches('0');
        let zero = if stripped.starts_with(|c: char| c.is_ascii_digit()) { "" } else { "0" };
        ("it begins with a zero", format!("{sign}{zero}{stripped}"))
    } else if digits.ends_with('.') || lower.contains(".e") {
        let (whole, exponent) = digits.split_once('.')?;
        ("a digit must follow the point", format!("{sign}{whole}.0{exponent}"))
    } else {
        ("it begins with `+`", format!("{sign}{digits}"))
    };
    // `+x` and `0_x` were no numbers either.
    matches!(Number::from_json(&number), JsonNumber::Finite(_)).then_some((reason, number))
}
