//! What happened to a run, from events.jsonl.

use std::collections::VecDeque;

use serde::Serialize;
use serde_json::Value;

use crate::status::{self, LONGEST_TEXT, text};
use crate::tail::Lines;

/// Newest events kept.
const MOST_EVENTS: usize = 500;
/// Resumes shown.
const MOST_SEAMS: usize = 100;

/// Something that happened to a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct HistoryEvent {
    /// Seconds since 1970.
    pub time: f64,
    pub event: String,
    pub step: Option<u64>,
    pub detail: String,
}

/// events.jsonl.
#[derive(Default)]
pub(crate) struct EventHistory {
    pub(crate) events: VecDeque<HistoryEvent>,
    pub(crate) seams: VecDeque<u64>,
    pub(crate) garbage: u64,
    /// Counts events, to notice new ones.
    pub(crate) count: u64,
    /// How the run ended, unless it was started again.
    pub(crate) end: Option<EndState>,
    /// Steps of its last start.
    pub(crate) steps: u64,
}

/// The state in which a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndState {
    Done,
    Stopped,
    Failed,
}

impl EndState {
    const ALL: [Self; 3] = [Self::Done, Self::Stopped, Self::Failed];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

impl Lines for EventHistory {
    fn reset(&mut self) {
        *self = Self::default();
    }

    fn line(&mut self, line: &[u8]) {
        let parsed: Option<Value> = serde_json::from_slice(line).ok();
        let Some((name, raw)) = parsed.and_then(|raw| Some((text(raw.get("event")?)?, raw))) else {
            self.garbage += 1;
            return;
        };
        let step = raw["step"].as_u64();
        match name.as_str() {
            "end" => self.end = raw["state"].as_str().and_then(EndState::of),
            "start" => {
                self.end = None;
                self.steps = raw["steps"].as_u64().unwrap_or(0);
            }
            "resume" => self.end = None,
            _ => {}
        }
        if let (Some(step), "resume") = (step, name.as_str()) {
            if self.seams.len() == MOST_SEAMS {
                self.seams.pop_front();
            }
            self.seams.push_back(step);
        }
        let time = raw["time"].as_f64().filter(|time| time.is_finite()).unwrap_or(0.0);
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(HistoryEvent { time, step, detail: detail(&raw), event: name });
        self.count += 1;
    }

    fn overlong(&mut self) {
        self.garbage += 1;
    }
}

/// The other fields of an event as text.
fn detail(raw: &Value) -> String {
    let Some(fields) = raw.as_object() else { return String::new() };
    let shown = fields.iter().filter(|(name, _)| !["time", "event", "step"].contains(&name.as_str()));
    let one = |(name, value): (&String, &Value)| match value {
        Value::String(text) => format!("{name} {}", text.chars().take(LONGEST_TEXT).collect::<String>()),
        Value::Number(number) => {
            let short = number.as_f64().filter(|_| number.is_f64()).map(crate::figures::number);
            format!("{name} {}", short.unwrap_or_else(|| number.to_string()))
        }
        other => format!("{name} {other}"),
    };
    status::shown(&shown.map(one).collect::<Vec<_>>().join(" · "), 400)
}
