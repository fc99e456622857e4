//! The text of a config, with its name and its lines.

use super::error::{Fault, ReadError, ReadErrorKind};
use super::location::{Location, TextSpan};

/// A config's text with its name and where lines begin.
#[derive(Debug, Clone)]
pub struct ConfigSource {
    name: String,
    text: String,
    line_starts: Vec<usize>,
}

impl ConfigSource {
    /// A text that is at hand. A byte order mark at its start is dropped.
    pub fn from_text(name: impl Into<String>, text: impl Into<String>) -> ConfigSource {
        let mut text: String = text.into();
        if text.starts_with('\u{feff}') {
            text.drain(..'\u{feff}'.len_utf8());
        }
        Self::new(name.into(), text)
    }

    fn new(name: String, text: String) -> ConfigSource {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        ConfigSource { name, text, line_starts }
    }

    /// A text as bytes, which must be UTF-8.
    pub fn from_bytes(name: impl Into<String>, mut bytes: Vec<u8>) -> Result<ConfigSource, ReadError> {
        let name = name.into();
        if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
            return Err(ReadError::whole(
                ReadErrorKind::Encoding,
                name,
                "the text is UTF-16; a config is UTF-8",
                Some("save it as UTF-8, as with `iconv -f UTF-16 -t UTF-8 OLD > NEW`".to_owned()),
            ));
        }
        if bytes.starts_with("\u{feff}".as_bytes()) {
            bytes.drain(..'\u{feff}'.len_utf8());
        }
        match String::from_utf8(bytes) {
            Ok(text) => Ok(ConfigSource::new(name, text)),
            Err(error) => {
                let start = error.utf8_error().valid_up_to();
                let byte = error.as_bytes()[start];
                // Up to the bad byte the replaced text is the same: the place is right, and the line can be shown.
                let readable =
                    ConfigSource::new(name, String::from_utf8_lossy(error.as_bytes()).into_owned());
                let fault = Fault {
                    kind: ReadErrorKind::Encoding,
                    span: TextSpan { start, end: start + '\u{fffd}'.len_utf8() },
                    message: format!("the byte 0x{byte:02X} is not UTF-8"),
                    help: Some("save the file as UTF-8".to_owned()),
                };
                Err(readable.error(fault))
            }
        }
    }

    /// The error of a fault in this text.
    pub(super) fn error(&self, fault: Fault) -> ReadError {
        let location = self.location(fault.span.start);
        ReadError::at(fault, self.name.clone(), location, self.line(location.line).to_owned())
    }

    /// What the text goes by in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The place of a byte of the text; beyond the end it is the end's.
    pub fn location(&self, offset: usize) -> Location {
        let offset = self.text.floor_char_boundary(offset);
        let line = self.line_starts.partition_point(|&start| start <= offset);
        let column = self.text[self.line_starts[line - 1]..offset].chars().count() + 1;
        Location { line, column }
    }

    /// A line of the text without its end, counted from 1; empty where there is no such line.
    pub fn line(&self, line: usize) -> &str {
        let Some(&start) = line.checked_sub(1).and_then(|index| self.line_starts.get(index)) else {
            return "";
        };
        let text = match self.line_starts.get(line) {
            Some(&next) => &self.text[start..next - 1],
            None => &self.text[start..],
        };
        text.strip_suffix('\r').unwrap_or(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_lines_and_characters_from_one() {
        let source = ConfigSource::from_text("x", "a\r\nbé\n\nlast");
        for (offset, line, column) in [
            (0, 1, 1),
            (1, 1, 2),
            (3, 2, 1),
            (4, 2, 2),
            (6, 2, 3),
            (7, 3, 1),
            (8, 4, 1),
            (12, 4, 5),
            (99, 4, 5),
        ] {
            assert_eq!(source.location(offset), Location { line, column }, "offset {offset}");
        }
        assert_eq!(source.location(5), Location { line: 2, column: 2 }, "inside of é is é");
        assert_eq!([1, 2, 3, 4, 5, 0].map(|line| source.line(line)), ["a", "bé", "", "last", "", ""]);
    }
}
