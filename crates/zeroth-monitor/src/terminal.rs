//! The terminal view: redrawn twice a second and on a key or a resize.

mod charts;
mod panels;
mod saved_modes;
mod theme;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{self, ProcessLiveness};
use crate::run::Run;
pub use saved_modes::{TerminalModes, is_stopped};
use theme::Theme;

/// How often runs are read and the screen is redrawn.
const PERIOD: Duration = Duration::from_millis(500);
/// How long a key is waited for before signals are looked at.
const KEYS: Duration = Duration::from_millis(250);

/// Options of the terminal view.
#[derive(Debug, Clone, Copy)]
pub struct ViewOptions {
    /// Whether colours are used.
    pub colour: bool,
    /// The process of the run that this view belongs to: Ctrl-C is passed on to it.
    pub run: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tab {
    Overview,
    Ranks,
    Events,
    Config,
}

impl Tab {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Overview, "overview"),
        (Self::Ranks, "ranks"),
        (Self::Events, "events"),
        (Self::Config, "config"),
    ];
}

struct View {
    runs: Vec<Run>,
    /// The run whose details are shown.
    selected: usize,
    tab: Tab,
    scroll: u16,
    theme: Theme,
    /// A message about the last key.
    note: Option<&'static str>,
    options: ViewOptions,
}

/// Shows runs until q is pressed or `stop` is set. The terminal is restored in every case, also after a panic.
pub fn watch(runs: Vec<Run>, options: ViewOptions, stop: &Arc<AtomicBool>) -> io::Result<()> {
    let mut terminal = ratatui::try_init()?;
    let shown = View::new(runs, options).run(&mut terminal, stop);
    // Restored even if drawing failed; the first error counts.
    shown.and(ratatui::try_restore())
}

/// Asks a view in a child process to leave, with the terminal restored.
pub fn close_view(child: &std::process::Child) {
    // It may have left by itself.
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
}

/// Draws runs once, as text of this size.
pub fn draw_once(runs: Vec<Run>, width: u16, height: u16) -> Vec<String> {
    let mut view = View::new(runs, ViewOptions { colour: false, run: None });
    let Ok(mut terminal) = ratatui::Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(|frame| view.draw(frame));
    let cells = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| cells[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(row).collect()
}

impl View {
    fn new(runs: Vec<Run>, options: ViewOptions) -> Self {
        let theme = Theme { colour: options.colour };
        Self { runs, selected: 0, tab: Tab::Overview, scroll: 0, theme, note: None, options }
    }

    fn run(&mut self, terminal: &mut ratatui::DefaultTerminal, stop: &AtomicBool) -> io::Result<()> {
        let mut next = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if Instant::now() >= next {
                let is_gone = |run| process::state(run, None) == ProcessLiveness::Gone;
                if self.options.run.is_some_and(is_gone) {
                    return Ok(());
                }
                for run in &mut self.runs {
                    run.poll();
                }
                terminal.draw(|frame| self.draw(frame))?;
                next = Instant::now() + PERIOD;
            }
            let wait = next.saturating_duration_since(Instant::now()).min(KEYS);
            // A signal interrupts the wait.
            match event::poll(wait) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let is_interrupt =
                        key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                    if is_interrupt && !self.interrupt() || !is_interrupt && self.key(key.code) {
                        return Ok(());
                    }
                    next = Instant::now();
                }
                Event::Resize(..) => next = Instant::now(),
                _ => {}
            }
        }
        Ok(())
    }

    /// Passes Ctrl-C on to the run; false if this view stands alone.
    fn interrupt(&mut self) -> bool {
        let Some(run) = self.options.run.and_then(|run| Pid::from_raw(run as i32)) else { return false };
        self.note = Some(match kill_process(run, Signal::INT) {
            Ok(()) => "Ctrl-C was passed on: the run finishes its step and saves",
            Err(_) => "the run has ended",
        });
        true
    }

    /// Handles a key; true to leave.
    fn key(&mut self, code: KeyCode) -> bool {
        let at = Tab::ALL.iter().position(|(tab, _)| *tab == self.tab).unwrap_or(0);
        let mut go = |place: usize| {
            self.tab = Tab::ALL[place % Tab::ALL.len()].0;
            self.scroll = 0;
        };
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Tab | KeyCode::Right => go(at + 1),
            KeyCode::BackTab | KeyCode::Left => go(at + Tab::ALL.len() - 1),
            KeyCode::Char(digit @ '1'..='4') => go(digit as usize - '1' as usize),
            KeyCode::Char('n') => self.selected = (self.selected + 1) % self.runs.len().max(1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(20),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(20),
            _ => {}
        }
        false
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        if area.width < 20 || area.height < 6 {
            let line =
                self.runs.first().map_or_else(String::new, |run| format!("{} {}", run.state(), run.step()));
            frame.render_widget(Paragraph::new(line), area);
            return;
        }
        let heads = self.runs.len().min(4) as u16;
        let [top, body, bottom] =
            Layout::vertical([Constraint::Length(heads), Constraint::Min(3), Constraint::Length(1)])
                .areas(area);
        let lines: Vec<Line<'_>> = self
            .runs
            .iter()
            .enumerate()
            .skip(self.selected.saturating_sub(usize::from(heads) - 1))
            .take(heads.into())
            .map(|(at, run)| {
                panels::head(run, at, self.runs.len(), at == self.selected, top.width, self.theme)
            })
            .collect();
        frame.render_widget(Paragraph::new(lines), top);
        frame.render_widget(Paragraph::new(self.foot(bottom.width)), bottom);
        let Some(run) = self.runs.get(self.selected) else { return };
        match self.tab {
            Tab::Overview => self.overview(frame, body),
            Tab::Ranks => {
                let memory = (run.planned().len() as u16 * 2 + 4).min(body.height / 2);
                let [up, down] =
                    Layout::vertical([Constraint::Min(3), Constraint::Length(memory)]).areas(body);
                panels::ranks(frame, up, run, self.scroll, self.theme);
                panels::memory(frame, down, run, self.theme);
            }
            Tab::Events => {
                let count = (run.checkpoints().len() as u16 + 2).clamp(3, (body.height / 3).max(3));
                let [up, down] =
                    Layout::vertical([Constraint::Min(3), Constraint::Length(count)]).areas(body);
                panels::events(frame, up, run, self.scroll, self.theme);
                panels::checkpoints(frame, down, run, self.theme);
            }
            Tab::Config => panels::config(frame, body, run, &mut self.scroll, self.theme),
        }
    }

    fn overview(&self, frame: &mut Frame<'_>, body: Rect) {
        let run = &self.runs[self.selected];
        if body.width >= 110 && body.height >= 16 {
            let [left, right] = Layout::horizontal([Constraint::Fill(5), Constraint::Fill(3)]).areas(body);
            let [large, small] = Layout::vertical([Constraint::Fill(3), Constraint::Fill(2)]).areas(left);
            charts::loss(frame, large, &self.runs, self.selected, self.theme);
            charts::small(frame, small, &self.runs, self.selected, 4, self.theme);
            let memory = (run.planned().len() as u16 * 2 + 4).min(10);
            let ranks = (run.ranks().len() as u16 + 3).clamp(4, body.height / 3);
            let [one, two, three] =
                Layout::vertical([Constraint::Length(ranks), Constraint::Length(memory), Constraint::Min(3)])
                    .areas(right);
            panels::ranks(frame, one, run, 0, self.theme);
            panels::memory(frame, two, run, self.theme);
            panels::events(frame, three, run, 0, self.theme);
            return;
        }
        let ranks = (run.ranks().len() as u16 + 3).clamp(4, (body.height / 4).max(4));
        let figures = panels::figures(run, body.width, self.theme);
        let small = if body.height >= 24 && body.width >= 60 { body.height / 4 } else { 0 };
        let [one, two, three, four] = Layout::vertical([
            Constraint::Min(5),
            Constraint::Length(figures.len() as u16),
            Constraint::Length(small),
            Constraint::Length(ranks.min(body.height.saturating_sub(5 + figures.len() as u16))),
        ])
        .areas(body);
        charts::loss(frame, one, &self.runs, self.selected, self.theme);
        frame.render_widget(Paragraph::new(figures), two);
        if small > 0 {
            charts::small(
                frame,
                three,
                &self.runs,
                self.selected,
                if body.width >= 80 { 4 } else { 2 },
                self.theme,
            );
        }
        if four.width >= 70 {
            let [left, right] = Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(four);
            panels::ranks(frame, left, run, 0, self.theme);
            panels::memory(frame, right, run, self.theme);
        } else {
            panels::ranks(frame, four, run, 0, self.theme);
        }
    }

    fn foot(&self, width: u16) -> Line<'static> {
        if let Some(note) = self.note {
            return Line::from(Span::styled(note, self.theme.warning()));
        }
        let mut spans = Vec::new();
        for ((tab, name), number) in Tab::ALL.into_iter().zip(1..) {
            let label = if width >= 60 { format!(" {number} {name} ") } else { format!(" {name} ") };
            spans.push(Span::styled(label, if tab == self.tab { Theme::SELECTED } else { self.theme.dim() }));
        }
        if width >= 60 {
            let more = if self.runs.len() > 1 { "  n next run" } else { "" };
            spans.push(Span::styled(format!("{more}  q leave"), self.theme.dim()));
        } else {
            spans.push(Span::styled(" q", self.theme.dim()));
        }
        Line::from(spans)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The rows of a tab at a size, without the frame.
    fn drawn(folder: &std::path::Path, tab: Tab, width: u16, height: u16) -> Vec<String> {
        let mut view = View::new(vec![Run::open(folder).unwrap()], ViewOptions { colour: false, run: None });
        view.tab = tab;
        let mut terminal = ratatui::Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let cells = terminal.backend().buffer();
        let row =
            |y| (1..width - 1).map(|x| cells[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(row).collect()
    }

    #[test]
    fn keys_and_values_of_the_config_are_whole_at_any_width() {
        const LONG: &str = "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        let folder = tempfile::tempdir().unwrap();
        let text = "x".repeat(150);
        let origins = serde_json::json!({
            LONG: {"value": true, "origin": "file", "detail": "zero3.json, line 12"},
            "optimizer.type": {"value": "AdamW", "origin": "flag", "detail": "--optim"},
            "a": {"value": text, "origin": "default"},
        });
        fs::write(folder.path().join("origin.json"), origins.to_string()).unwrap();
        for width in [20, 40, 80, 120, 200] {
            let rows = drawn(folder.path(), Tab::Config, width, 50);
            let joined: String = rows.concat().split_whitespace().collect();
            for wanted in [LONG, "zero3.json,line12", "optimizer.type", "AdamW", "--optim", &text] {
                assert!(joined.contains(wanted), "{width} cuts {wanted}: {rows:#?}");
            }
        }
        let wide = drawn(folder.path(), Tab::Config, 120, 50);
        let row = wide.iter().find(|row| row.contains(LONG)).unwrap();
        assert!(row.contains("true") && row.contains("line 12"), "{wide:#?}");
        let values: Vec<usize> = ["true", "AdamW"]
            .iter()
            .filter_map(|value| wide.iter().find_map(|row| row.find(value)))
            .collect();
        // The quote of a text.
        assert_eq!(values[0] + 1, values[1], "values are below each other: {wide:#?}");
    }
}
