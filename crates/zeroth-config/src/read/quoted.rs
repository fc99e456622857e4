//! Text in quotes: `"one line"`, `'one line'` and `'''many lines'''`.

use super::cursor::Cursor;
use super::error::{Fault, Parsed, shown};
use super::location::TextSpan;

impl Cursor<'_> {
    /// The text in the quotes that begin here, `"` or `'`.
    pub(super) fn quoted(&mut self) -> Parsed<String> {
        let open = self.at;
        let quote = self.source.text().as_bytes()[open];
        self.at += 1;
        let mut text = String::new();
        // Characters that stand for themselves are copied in runs.
        let mut run = self.at;
        loop {
            match self.peek() {
                None | Some(b'\n' | b'\r') => {
                    let quote = char::from(quote);
                    return Err(Fault::syntax(
                        self.since(open),
                        "this text is not closed on its line",
                        format!("add the closing `{quote}`; a line break inside of text is written `\\n`"),
                    ));
                }
                Some(b'\\') => {
                    text.push_str(self.slice(self.since(run)));
                    text.push(self.escape()?);
                    run = self.at;
                }
                Some(byte) if byte == quote => {
                    text.push_str(self.slice(self.since(run)));
                    self.at += 1;
                    return Ok(text);
                }
                Some(byte) if byte < 0x20 => {
                    let escape = if byte == b'\t' { "\\t".to_owned() } else { format!("\\u{byte:04x}") };
                    let name = if byte == b'\t' {
                        "a tab".to_owned()
                    } else {
                        format!("the character U+{byte:04X}")
                    };
                    return Err(Fault::syntax(
                        self.here(),
                        format!("{name} cannot stand inside of quotes"),
                        format!("write `{escape}`"),
                    ));
                }
                Some(_) => self.at += 1,
            }
        }
    }

    /// The character of the escape that begins here.
    fn escape(&mut self) -> Parsed<char> {
        let start = self.at;
        self.at += 1;
        let character = match self.peek() {
            Some(byte @ (b'"' | b'\'' | b'\\' | b'/')) => char::from(byte),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                self.at = start;
                return self.unicode_escape();
            }
            // The quotes are not closed on this line either: the caller says that at the opening.
            None | Some(b'\n' | b'\r') => return Ok('\\'),
            Some(_) => {
                let span = TextSpan { start, end: self.here().end };
                return Err(Fault::syntax(
                    span,
                    format!("{} is no escape", shown(self.slice(span))),
                    "write `\\\\` for a backslash; escapes are \\\" \\\\ \\/ \\b \\f \\n \\r \\t and \\uXXXX",
                ));
            }
        };
        self.at += 1;
        Ok(character)
    }

    /// `\uXXXX`, or two of them for a character beyond U+FFFF.
    fn unicode_escape(&mut self) -> Parsed<char> {
        let start = self.at;
        let first = self.four_digits()?;
        let mut code = first;
        if (0xd800..0xdc00).contains(&first) && self.rest().starts_with("\\u") {
            let second = self.four_digits()?;
            if (0xdc00..0xe000).contains(&second) {
                code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
            }
        }
        char::from_u32(code).ok_or_else(|| {
            let span = TextSpan { start, end: start + 6 };
            Fault::syntax(
                span,
                format!("`{}` is half of a surrogate pair", self.slice(span)),
                "write the character itself, or both halves, as in `\\ud83d\\ude00`",
            )
        })
    }

    /// The number in `\uXXXX`.
    fn four_digits(&mut self) -> Parsed<u32> {
        let start = self.at;
        let digits =
            self.rest().as_bytes().get(2..6).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let Some(digits) = digits else {
            let span = TextSpan { start, end: start + 2 };
            return Err(Fault::syntax(
                span,
                "`\\u` needs four hexadecimal digits",
                "write it as in `\\u00e9`",
            ));
        };
        self.at += 6;
        Ok(digits
            .iter()
            .filter_map(|&digit| char::from(digit).to_digit(16))
            .fold(0, |code, digit| code * 16 + digit))
    }

    /// The text in the `'''` that begin here. What precedes the text on its first line is white space; as much
    /// indent as the opening has is dropped from every further line, and so is the line end before the closing.
    pub(super) fn multi_line(&mut self) -> Parsed<String> {
        let open = self.at;
        self.at += 3;
        self.skip_indent(usize::MAX);
        let mut text = String::new();
        let mut indent = None;
        if self.peek() == Some(b'\n') {
            self.at += 1;
            self.skip_indent(*indent.insert(self.indent_of(open)));
        }
        loop {
            let run = self.at;
            self.at = self.find(|bytes| matches!(bytes, [b'\n' | b'\r', ..] | [b'\'', b'\'', b'\'', ..]));
            text.push_str(self.slice(self.since(run)));
            match self.peek() {
                None => {
                    let span = TextSpan { start: open, end: open + 3 };
                    return Err(Fault::syntax(
                        span,
                        "this `'''` is never closed",
                        "add `'''` where the text ends",
                    ));
                }
                Some(b'\n') => {
                    text.push('\n');
                    self.at += 1;
                    // Counted once a text: the opening's line may be long.
                    self.skip_indent(*indent.get_or_insert_with(|| self.indent_of(open)));
                }
                Some(b'\r') => self.at += 1,
                Some(_) => {
                    self.at += 3;
                    if text.ends_with('\n') {
                        text.pop();
                    }
                    return Ok(text);
                }
            }
        }
    }

    /// How many characters precede an offset on its line.
    fn indent_of(&self, offset: usize) -> usize {
        self.source.location(offset).column - 1
    }

    /// Skips white space, at most this number of characters.
    fn skip_indent(&mut self, most: usize) {
        let blank = self.rest().bytes().take(most).take_while(|byte| matches!(byte, b' ' | b'\t' | b'\r'));
        self.at += blank.count();
    }
}
