//! The one place that prints: results to standard output, everything else to standard error.

use std::io::{IsTerminal, Write};

use serde::Serialize;

use crate::cli::Format;
use crate::exit::Exit;
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

    /// Whether text may have colours.
    pub(crate) fn has_colours(&self) -> bool {
        self.colour
    }

    /// Text in bold, where that is wanted.
    pub(crate) fn bold(&self, text: &str) -> String {
        self.styled("1", text)
    }

    /// Text in red, yellow or green, where that is wanted.
    pub(crate) fn coloured(&self, colour: Colour, text: &str) -> String {
        let code = match colour {
            Colour::Red => "31",
            Colour::Yellow => "33",
            Colour::Green => "32",
            Colour::Dim => "2",
        };
        self.styled(code, text)
    }

    fn styled(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// The result, for people.
pub(crate) fn text(text: &str) {
    // A reader that went away (`| head`) is not an error of ours.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// A part of a result that comes bit by bit: it is seen at once.
pub(crate) fn stream(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// The result, for programs: one JSON object on standard output.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&format!("{}\n", serde_json::to_string_pretty(value)?));
    Ok(())
}

/// Something on the way.
pub(crate) fn note(message: &str) {
    stderr_writer::write(Kind::Note, &format!("{message}\n"));
}

/// A line that takes the place of the one before it, on a terminal.
pub(crate) fn over(line: &str) {
    stderr_writer::write(Kind::Progress, &format!("\r\u{1b}[K{line}"));
}

/// Something that went wrong on the way, in the words of whoever found it.
pub(crate) fn problem(message: &str) {
    stderr_writer::write(Kind::Error, &format!("{message}\n"));
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
