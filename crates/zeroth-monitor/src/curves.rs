//! The curves of a run, from metrics.jsonl.

use zeroth_base::escape_control_characters;

use crate::flat_json::{JsonField, fields};
use crate::series::Series;
use crate::tail::Lines;

/// Curves of a run, at most: names come from a file.
const MOST_SERIES: usize = 40;
/// The longest name of a curve.
const LONGEST_NAME: usize = 64;
/// Curves that views show, which no others displace.
const OWN_CURVES: [&str; 7] = ["loss", "eval_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "step_ms"];
/// Fields of metrics.jsonl that are no curves.
const NO_CURVES: [&str; 6] = ["step", "tokens", "samples_seen", "skipped", "eval_tokens", "eval_perplexity"];

/// The curves of metrics.jsonl.
#[derive(Default)]
pub(crate) struct Curves {
    pub(crate) series: Vec<(String, Series)>,
    /// Lines that are no metrics.
    pub(crate) garbage: u64,
    /// Counts how often the file started over.
    pub(crate) generation: u64,
    pub(crate) lines: u64,
}

impl Curves {
    pub(crate) fn get(&self, name: &str) -> Option<&Series> {
        self.series.iter().find(|(known, _)| known == name).map(|(_, series)| series)
    }
}

impl Lines for Curves {
    fn reset(&mut self) {
        *self = Self { generation: self.generation + 1, ..Self::default() };
    }

    fn line(&mut self, line: &[u8]) {
        let mut step = None;
        let mut place = 0;
        let series = &mut self.series;
        let wants = |name: &str| name == "step" || !NO_CURVES.contains(&name);
        let is_object = fields(line, wants, |name, value| {
            if name == "step" {
                // Exact in an f64; more steps than that no run has.
                if let JsonField::Number(number) = value
                    && (1.0..9e15).contains(&number)
                    && number.fract() == 0.0
                {
                    step = Some(number as u64);
                }
                return;
            }
            let Some(step) = step else { return };
            // A curve is known by its name as it is shown: two names that look alike are one.
            let name = escape_control_characters(name);
            // Lines have the same fields in the same order, mostly.
            let is_next = series.get(place).is_some_and(|(known, _)| *known == name);
            let found =
                if is_next { Some(place) } else { series.iter().position(|(known, _)| *known == name) };
            let found = match found {
                Some(found) => found,
                None if name.len() <= LONGEST_NAME
                    && value != JsonField::Other
                    && (series.len() < MOST_SERIES || OWN_CURVES.contains(&name.as_ref())) =>
                {
                    series.push((name.into_owned(), Series::default()));
                    series.len() - 1
                }
                None => return,
            };
            place = found + 1;
            match value {
                JsonField::Number(number) => series[found].1.push(step, number),
                JsonField::Null => series[found].1.gaps += 1,
                JsonField::Other => {}
            }
        });
        if is_object && step.is_some() {
            self.lines += 1;
        } else {
            self.garbage += 1;
        }
    }

    fn overlong(&mut self) {
        self.garbage += 1;
    }
}
