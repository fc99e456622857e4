//! The one place that prints: results to standard output, everything else to standard error.
//!
//! Whatever passes here is [`plain`]: no text from a file reaches a terminal as a command.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::cli::Format;
use crate::exit::Exit;
use crate::plain::{self, mark, plain};
use crate::results::written;
use crate::stderr_writer::{self, Kind};

/// Where a command's words go, and in which form.
#[derive(Debug)]
pub(crate) struct Output {
    format: Format,
    colour: bool,
}

impl Output {
    /// Colours only on a terminal, and never against `NO_COLOR`.
    pub(crate) fn new(format: Format) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { format, colour: wanted && std::io::stdout().is_terminal() && std::io::stderr().is_terminal() }
    }

    /// Whether a program reads the result.
    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// What stands before and after text in a colour; none where text has no colours.
    pub(crate) fn around(&self, colour: Colour) -> Option<[String; 2]> {
        self.colour.then(|| [mark(colour.code()), mark("0")])
    }

    /// Text in bold, where that is wanted.
    pub(crate) fn bold(&self, text: &str) -> String {
        self.styled("1", text)
    }

    /// Text in red, yellow or green, where that is wanted.
    pub(crate) fn coloured(&self, colour: Colour, text: &str) -> String {
        self.styled(colour.code(), text)
    }

    fn styled(&self, code: &str, text: &str) -> String {
        if self.colour { format!("{}{text}{}", mark(code), mark("0")) } else { text.to_owned() }
    }
}

/// The result, for people.
pub(crate) fn text(text: &str) {
    written(std::io::stdout().write_all(plain(text).as_bytes()));
}

/// A part of a result that comes bit by bit: it is seen at once.
pub(crate) fn stream(text: &str) {
    let mut out = std::io::stdout();
    written(out.write_all(plain(text).as_bytes()).and_then(|()| out.flush()));
}

/// The result, for programs: one JSON object on standard output.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&format!("{}\n", plain::json(&serde_json::to_string_pretty(value)?)));
    Ok(())
}

/// Whether a line stands on the terminal that the next one is to take the place of.
static STANDS: Mutex<bool> = Mutex::new(false);

fn stands() -> MutexGuard<'static, bool> {
    STANDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something on the way.
pub(crate) fn note(message: &str) {
    below(Kind::Note, message);
}

/// Something that went wrong on the way, in the words of whoever found it.
pub(crate) fn problem(message: &str) {
    below(Kind::Error, message);
}

/// Writes a message below a line that stands.
fn below(kind: Kind, message: &str) {
    let mut stands = stands();
    let above = if std::mem::take(&mut *stands) { "\n" } else { "" };
    stderr_writer::write(kind, &format!("{above}{}\n", plain(message)));
}

/// A line that takes the place of the one before it, on a terminal; an empty one clears it.
pub(crate) fn over(line: &str) {
    let mut stands = stands();
    *stands = !line.is_empty();
    let line: String = plain::one_line(line).chars().take(columns().saturating_sub(1)).collect();
    stderr_writer::write(Kind::Progress, &format!("\r\u{1b}[K{line}"));
}

/// Leaves a line that stands, at the end of the process.
pub(crate) fn leave_line() {
    if std::mem::take(&mut *stands()) {
        stderr_writer::write(Kind::Note, "\n");
    }
}

/// Data for the launcher of this rank, which reads its standard error.
pub(crate) fn raw(text: &str) {
    stderr_writer::write(Kind::Progress, text);
}

/// The width of the terminal now; it may change at any time.
pub(crate) fn columns() -> usize {
    const UNKNOWN: usize = 80;
    let found = terminal_size::terminal_size_of(std::io::stderr());
    found.map_or(UNKNOWN, |(width, _)| usize::from(width.0)).max(1)
}

/// Why it goes no further. A message that begins with its own "error:" comes with its place and caret.
pub(crate) fn error(message: &str) {
    let prefix = if message.starts_with("error:") { "" } else { "error: " };
    problem(&format!("{prefix}{}", message.trim_end()));
}

/// The end of a command that could not do what was asked. Causes that the message already tells are not repeated.
pub(crate) fn failure(error: &anyhow::Error) -> Exit {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    self::error(&message);
    Exit::Wrong
}

impl Colour {
    fn code(self) -> &'static str {
        match self {
            Self::Red => "31",
            Self::Yellow => "33",
            Self::Green => "32",
            Self::Dim => "2",
        }
    }
}

/// The few colours with a meaning.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Colour {
    /// Wrong.
    Red,
    /// Worth a look.
    Yellow,
    /// Fine.
    Green,
    /// In the background.
    Dim,
}
