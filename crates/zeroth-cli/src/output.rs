//! All printing: results go to stdout, everything else to stderr.
//!
//! All text is sanitised with [`sanitize()`], so that no file content can control the terminal.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::cli::Format;
use crate::exit::Exit;
use crate::results::written;
use crate::sanitize::{self, colour_marker, sanitize};
use crate::stderr_writer::{self, LineKind};

/// Output format and colours of a command.
#[derive(Debug)]
pub(crate) struct Output {
    format: Format,
    colour: bool,
}

impl Output {
    /// Colours only on a terminal, and not with `NO_COLOR`.
    pub(crate) fn new(format: Format) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { format, colour: wanted && std::io::stdout().is_terminal() && std::io::stderr().is_terminal() }
    }

    /// Whether the output is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Escape markers around coloured text; `None` without colours.
    pub(crate) fn around(&self, colour: Colour) -> Option<[String; 2]> {
        self.colour.then(|| [colour_marker(colour.code()), colour_marker("0")])
    }

    /// Bold text, if colours are enabled.
    pub(crate) fn bold(&self, text: &str) -> String {
        self.styled("1", text)
    }

    /// Coloured text, if colours are enabled.
    pub(crate) fn coloured(&self, colour: Colour, text: &str) -> String {
        self.styled(colour.code(), text)
    }

    fn styled(&self, code: &str, text: &str) -> String {
        if self.colour {
            format!("{}{text}{}", colour_marker(code), colour_marker("0"))
        } else {
            text.to_owned()
        }
    }
}

/// Prints a result as text.
pub(crate) fn text(text: &str) {
    written(std::io::stdout().write_all(sanitize(text).as_bytes()));
}

/// Prints a part of a streamed result and flushes.
pub(crate) fn stream(text: &str) {
    let mut out = std::io::stdout();
    written(out.write_all(sanitize(text).as_bytes()).and_then(|()| out.flush()));
}

/// Prints a result as one JSON object on stdout.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&format!("{}\n", sanitize::json(&serde_json::to_string_pretty(value)?)));
    Ok(())
}

/// Whether the terminal's current line is a progress line that the next one overwrites.
static STANDS: Mutex<bool> = Mutex::new(false);

fn stands() -> MutexGuard<'static, bool> {
    STANDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints a message.
pub(crate) fn note(message: &str) {
    below(LineKind::Note, message);
}

/// Prints an error message verbatim.
pub(crate) fn problem(message: &str) {
    below(LineKind::Error, message);
}

/// Prints a message below a progress line.
fn below(kind: LineKind, message: &str) {
    let mut stands = stands();
    let above = if std::mem::take(&mut *stands) { "\n" } else { "" };
    stderr_writer::write(kind, &format!("{above}{}\n", sanitize(message)));
}

/// Prints a line that overwrites the previous one on a terminal; an empty one clears it.
pub(crate) fn over(line: &str) {
    let mut stands = stands();
    *stands = !line.is_empty();
    let line: String = sanitize::one_line(line).chars().take(columns().saturating_sub(1)).collect();
    stderr_writer::write(LineKind::Progress, &format!("\r\u{1b}[K{line}"));
}

/// Ends a progress line before the process exits.
pub(crate) fn leave_line() {
    if std::mem::take(&mut *stands()) {
        stderr_writer::write(LineKind::Note, "\n");
    }
}

/// Writes data for the launcher of this rank, which reads its stderr.
pub(crate) fn raw(text: &str) {
    stderr_writer::write(LineKind::Progress, text);
}

/// Prints what a person at a terminal types after, without a newline.
pub(crate) fn ask(marker: &str) {
    stderr_writer::write(LineKind::Note, marker);
}

/// The current width of the terminal.
pub(crate) fn columns() -> usize {
    const UNKNOWN: usize = 80;
    let found = terminal_size::terminal_size_of(std::io::stderr());
    found.map_or(UNKNOWN, |(width, _)| usize::from(width.0)).max(1)
}

/// Prints an error. A message that starts with "error:" has a source snippet and is printed as is.
pub(crate) fn error(message: &str) {
    let prefix = if message.starts_with("error:") { "" } else { "error: " };
    problem(&format!("{prefix}{}", message.trim_end()));
    if message.contains(TOO_MANY_OPEN_FILES) {
        note(&too_many_open_files());
    }
}

/// How the operating system's message of EMFILE ends.
const TOO_MANY_OPEN_FILES: &str = "(os error 24)";

/// What to change where a process may not open another file.
fn too_many_open_files() -> String {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit =
        limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    let limit = limit.map(|limit| format!(" to {limit}")).unwrap_or_default();
    format!(
        "note: `ulimit -n` limits the open files of a process{limit}, and a run needs more: `ulimit -n 4096` in this shell raises \
         it, up to the hard limit (`ulimit -Hn`)"
    )
}

/// Prints the error of a failed command; causes already in the message are not repeated.
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

/// Colours by meaning.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Colour {
    /// Errors.
    Red,
    /// Warnings.
    Yellow,
    /// Success.
    Green,
    /// Less important text.
    Dim,
}
