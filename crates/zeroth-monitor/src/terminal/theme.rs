//! Colours and emphasis; without colours, emphasis alone.

use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;

use crate::status::Health;

#[derive(Debug, Clone, Copy)]
pub(super) struct Theme {
    pub(super) colour: bool,
}

/// Colours of curves, distinct for most eyes.
const CURVES: [Color; 6] =
    [Color::Cyan, Color::Yellow, Color::Magenta, Color::Green, Color::Blue, Color::LightRed];

impl Theme {
    pub(super) const TITLE: Style = Style::new().add_modifier(Modifier::BOLD);
    pub(super) const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);

    fn colour(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    pub(super) fn dim(self) -> Style {
        if self.colour { Style::new().fg(Color::DarkGray) } else { Style::new() }
    }

    pub(super) fn warning(self) -> Style {
        self.colour(Color::Yellow).add_modifier(Modifier::BOLD)
    }

    pub(super) fn bad(self) -> Style {
        let style = self.colour(Color::Red).add_modifier(Modifier::BOLD);
        if self.colour { style } else { style.add_modifier(Modifier::REVERSED) }
    }

    pub(super) fn good(self) -> Style {
        self.colour(Color::Green)
    }

    pub(super) fn bar(self) -> Style {
        self.colour(Color::Cyan)
    }

    pub(super) fn curve(self, number: usize) -> Style {
        self.colour(CURVES[number % CURVES.len()])
    }

    /// Curves without colours differ by their marks.
    pub(super) fn marker(self, number: usize) -> Marker {
        match number {
            _ if self.colour => Marker::Braille,
            0 => Marker::Braille,
            1 => Marker::Dot,
            _ => Marker::Block,
        }
    }

    pub(super) fn state(self, state: &str) -> Style {
        match state {
            "failed" | "lost" => self.bad(),
            "stopped" | "stopped by a signal" | "unknown" => self.warning(),
            _ => self.good(),
        }
    }

    /// A mark and a style: colours are never the only difference.
    pub(super) fn health(self, health: Health) -> (&'static str, Style) {
        match health {
            Health::Running => ("●", self.good()),
            Health::Starting => ("○", self.dim()),
            Health::Stopped => ("‖", self.warning()),
            Health::Silent => ("?", self.bad()),
            Health::Dead => ("✖", self.bad()),
            Health::Ended => ("·", self.dim()),
        }
    }
}
