//! Progress bars: on this process's terminal, or on that of the launcher that started it.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use zeroth::train::progress::{Bar, ProgressField, duration};

use crate::output;

/// Marks a line from a rank as a progress bar for the launcher's terminal.
const PASSING: char = '\u{1}';
/// Tells a rank whether its launcher has a terminal.
pub(crate) const TERMINAL: &str = "ZEROTH_TERMINAL";

/// The destination of progress bars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terminal {
    /// No terminal: log lines are printed instead.
    None,
    /// stderr.
    Own,
    /// stderr as data: only the launcher knows the width of its terminal.
    Launchers,
}

impl Terminal {
    pub(crate) fn find() -> Self {
        match std::env::var_os(TERMINAL) {
            Some(value) if value == "1" => Self::Launchers,
            _ if std::io::stderr().is_terminal() => Self::Own,
            _ => Self::None,
        }
    }

    /// Shows a bar in place of the previous one; `None` clears the line.
    pub(crate) fn show(self, bar: Option<&Bar>) {
        match self {
            Self::None => {}
            Self::Own => output::over(&bar.map(|bar| bar.line(output::columns())).unwrap_or_default()),
            Self::Launchers => {
                if let Ok(text) = serde_json::to_string(&bar) {
                    output::raw(&format!("{PASSING}{text}\n"));
                }
            }
        }
    }
}

/// Shows a rank's progress bar on the launcher's terminal. False if the line is text.
pub(crate) fn show_passed(line: &str) -> bool {
    let Some(bar) = line.strip_prefix(PASSING).and_then(|bar| serde_json::from_str::<Option<Bar>>(bar).ok())
    else {
        return false;
    };
    Terminal::Own.show(bar.as_ref());
    true
}

/// Progress of a long operation: a bar on terminals, occasional lines elsewhere, nothing if it finishes soon.
pub(crate) struct Meter {
    what: &'static str,
    terminal: Terminal,
    begun: Instant,
    next: Instant,
    is_shown: bool,
}

impl Meter {
    const SOON: Duration = Duration::from_millis(300);
    const REDRAW: Duration = Duration::from_millis(100);
    const LINES: Duration = Duration::from_secs(10);

    pub(crate) fn new(what: &'static str) -> Self {
        Self::on(Terminal::find(), what)
    }

    fn on(terminal: Terminal, what: &'static str) -> Self {
        let begun = Instant::now();
        let first = if terminal == Terminal::None { Self::LINES } else { Self::SOON };
        Self { what, terminal, begun, next: begun + first, is_shown: false }
    }

    /// Updates the progress; `more` adds details.
    pub(crate) fn tell(&mut self, done: u64, total: u64, more: impl Fn() -> Option<String>) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        let bar = self.bar(done, total, more());
        if self.terminal == Terminal::None {
            self.next = now + Self::LINES;
            output::note(&bar.text());
        } else {
            self.next = now + Self::REDRAW;
            self.is_shown = true;
            self.terminal.show(Some(&bar));
        }
    }

    fn bar(&self, done: u64, total: u64, more: Option<String>) -> Bar {
        let share = done.min(total) as f64 / total.max(1) as f64;
        let left = self.begun.elapsed().as_secs_f64() * (1.0 - share) / share;
        let left = Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX);
        let mut fields =
            vec![ProgressField::new(0, self.what), ProgressField::new(1, format!("{:.0}%", 100.0 * share))];
        fields.extend(more.map(|more| ProgressField::new(3, more)));
        fields.push(ProgressField::new(2, format!("{} left", duration(left))));
        Bar { done, total, fields }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.is_shown {
            self.terminal.show(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_ranks_are_bars_or_text() {
        let bar = Meter::on(Terminal::Launchers, "tokenising").bar(1, 4, Some("3 rows".to_owned()));
        let line = serde_json::to_string(&Some(&bar)).unwrap();
        assert_eq!(serde_json::from_str::<Option<Bar>>(&line).unwrap(), Some(bar));
        assert!(show_passed("\u{1}null"));
        assert!(!show_passed("step 1") && !show_passed(&line));
    }

    #[test]
    fn a_meter_shows_percentage_and_time_left() {
        let mut meter = Meter::on(Terminal::None, "loading weights");
        meter.begun -= Duration::from_secs(10);
        assert_eq!(meter.bar(25, 100, None).text(), "loading weights · 25% · 30s left");
        let with_rows = meter.bar(50, 100, Some("1,200 rows".to_owned())).text();
        assert_eq!(with_rows, "loading weights · 50% · 1,200 rows · 10s left");
        assert_eq!(meter.bar(0, 0, None).text(), "loading weights · 0% · years left");
    }
}
