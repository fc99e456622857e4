//! Errors of reading a config, each with its location and a remedy.

use std::fmt;
use std::ops::Deref;

use super::location::{Location, TextSpan};

/// A config that cannot be read. The parts are fields: `error.location`, `error.message`, `error.help`, …
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct ReadError(Box<ReadProblem>); // boxed: a `Result` that carries it stays small

/// The parts of a [`ReadError`].
#[derive(Debug, Clone)]
pub struct ReadProblem {
    /// The kind of problem.
    pub kind: ReadErrorKind,
    /// The file's path, or `<base64>`, `<argument>`, ….
    pub source_name: String,
    /// Its location; absent where the whole file is the problem.
    pub location: Option<Location>,
    /// The bytes of the text it is about; never absent where there is a place.
    pub span: Option<TextSpan>,
    /// The problem, without its location.
    pub message: String,
    /// What to write instead, where that is known.
    pub help: Option<String>,
    /// The line of `location`, whole and without its end.
    pub line_text: Option<String>,
}

/// The kind of a [`ReadError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadErrorKind {
    /// There is no such file.
    NotFound,
    /// The system refused: a folder, no permission, a broken disk.
    Io,
    /// More than [`MAX_BYTES`](super::MAX_BYTES).
    TooLarge,
    /// Not UTF-8.
    Encoding,
    /// Nothing but white space and comments.
    Empty,
    /// Neither JSON nor Hjson, or a number out of range.
    Syntax,
    /// Nested deeper than [`MAX_DEPTH`](super::MAX_DEPTH).
    TooDeep,
    /// A list or a single value instead of an object.
    NotAnObject,
}

impl ReadError {
    /// An error about a file as a whole.
    pub(super) fn whole(
        kind: ReadErrorKind,
        source_name: impl Into<String>,
        message: impl Into<String>,
        help: Option<String>,
    ) -> Self {
        let (source_name, message) = (source_name.into(), message.into());
        Self(Box::new(ReadProblem {
            kind,
            source_name,
            location: None,
            span: None,
            message,
            help,
            line_text: None,
        }))
    }

    /// The error of a fault at a location of the named text; `line_text` is its line.
    pub(super) fn at(fault: Fault, source_name: String, location: Location, line_text: String) -> Self {
        Self(Box::new(ReadProblem {
            kind: fault.kind,
            source_name,
            location: Some(location),
            span: Some(fault.span),
            message: fault.message,
            help: fault.help,
            line_text: Some(line_text),
        }))
    }

    /// The same error about a text that goes by another name.
    pub(super) fn renamed(mut self, source_name: String) -> Self {
        self.0.source_name = source_name;
        self
    }

    /// The same error with this help where it had none.
    pub(super) fn or_help(mut self, help: &str) -> Self {
        self.0.help.get_or_insert_with(|| help.to_owned());
        self
    }
}

impl Deref for ReadError {
    type Target = ReadProblem;

    fn deref(&self) -> &ReadProblem {
        &self.0
    }
}

impl fmt::Display for ReadProblem {
    /// `NAME: line L, column C: message`, or `NAME: message`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.source_name)?;
        if let Some(location) = self.location {
            write!(f, "{location}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// A problem at a span of a text, without the text's name and lines.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) kind: ReadErrorKind,
    pub(super) span: TextSpan,
    pub(super) message: String,
    pub(super) help: Option<String>,
}

/// The result of a part of the reader.
pub(super) type Parsed<T> = Result<T, Fault>;

impl Fault {
    /// A syntax error with advice.
    pub(super) fn syntax(span: TextSpan, message: impl Into<String>, help: impl Into<String>) -> Self {
        let (message, help) = (message.into(), Some(help.into()));
        Self { kind: ReadErrorKind::Syntax, span, message, help }
    }
}

/// A piece of the text for a message: at most 40 characters, in back quotes, nothing that would steer a terminal.
pub(super) fn shown(text: &str) -> String {
    const MOST: usize = 40;
    let mut shown: String =
        text.chars().take(MOST).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}
