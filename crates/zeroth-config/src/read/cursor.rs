//! The position of the reader in the text; skips white space and comments.

use super::error::{Fault, Parsed};
use super::location::TextSpan;
use super::source::ConfigSource;

/// A position in a source that moves forward.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    pub(super) source: &'a ConfigSource,
    /// The offset of the next byte; always on a character boundary between tokens.
    pub(super) at: usize,
}

impl<'a> Cursor<'a> {
    /// The start of a source.
    pub(super) fn new(source: &'a ConfigSource) -> Self {
        Self { source, at: 0 }
    }

    /// The next byte.
    pub(super) fn peek(&self) -> Option<u8> {
        self.source.text().as_bytes().get(self.at).copied()
    }

    /// What is left to read.
    pub(super) fn rest(&self) -> &'a str {
        &self.source.text()[self.at..]
    }

    /// The text of a span.
    pub(super) fn slice(&self, span: TextSpan) -> &'a str {
        &self.source.text()[span.start..span.end]
    }

    /// The next character's span; empty at the end.
    pub(super) fn here(&self) -> TextSpan {
        let length = self.rest().chars().next().map_or(0, char::len_utf8);
        TextSpan { start: self.at, end: self.at + length }
    }

    /// What was read since `start`.
    pub(super) fn since(&self, start: usize) -> TextSpan {
        TextSpan { start, end: self.at }
    }

    /// Steps over `token` if it comes next.
    pub(super) fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    /// The offset of the line's end: its `\n` or `\r`, or the end of the text.
    pub(super) fn line_end(&self) -> usize {
        self.find(|bytes| matches!(bytes[0], b'\n' | b'\r'))
    }

    /// The offset of the first byte from here on where `stops` holds, or the end of the text. `stops` sees the rest.
    pub(super) fn find(&self, stops: impl Fn(&[u8]) -> bool) -> usize {
        let bytes = self.source.text().as_bytes();
        (self.at..bytes.len()).find(|&at| stops(&bytes[at..])).unwrap_or(bytes.len())
    }

    /// Steps over white space and comments; whether a line ended on the way.
    pub(super) fn skip_blank(&mut self) -> Parsed<bool> {
        let mut line_ended = false;
        loop {
            match self.peek() {
                Some(b' ' | b'\t') => self.at += 1,
                Some(b'\n' | b'\r') => {
                    line_ended = true;
                    self.at += 1;
                }
                Some(b'#') => self.at = self.line_end(),
                Some(b'/') if self.rest().starts_with("//") => self.at = self.line_end(),
                Some(b'/') if self.rest().starts_with("/*") => {
                    let Some(length) = self.rest()[2..].find("*/") else {
                        let span = TextSpan { start: self.at, end: self.at + 2 };
                        return Err(Fault::syntax(
                            span,
                            "this comment is never closed",
                            "add `*/` where it ends",
                        ));
                    };
                    let comment = &self.rest()[..length + 4];
                    line_ended |= comment.contains(['\n', '\r']);
                    self.at += comment.len();
                }
                _ => return Ok(line_ended),
            }
        }
    }
}

/// Whether bytes that are not in quotes end a bare word: a separator, a closing bracket or a comment.
pub(super) fn ends_word(bytes: &[u8]) -> bool {
    matches!(bytes, [b',' | b'}' | b']' | b'#' | b'\n' | b'\r', ..] | [b'/', b'/' | b'*', ..])
}
