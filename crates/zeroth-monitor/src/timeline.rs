//! The timeline of a step, from a trace file in Chrome's format, made small enough for a page.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::status::shown;

/// The longest trace file that is read.
const LONGEST_FILE: u64 = 64 << 20;
/// Spans shown; the shortest are left out first.
const MOST_SPANS: usize = 20_000;

/// A trace that cannot be shown.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TimelineError {
    #[error("there is no timeline of that name")]
    Missing,
    #[error("it is longer than {} MB: open it at ui.perfetto.dev", LONGEST_FILE >> 20)]
    TooLong,
    #[error("it is not a trace in Chrome's format")]
    Invalid,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TraceFile {
    trace_events: Vec<TraceEvent>,
}

#[derive(Deserialize)]
struct TraceEvent {
    #[serde(default)]
    name: String,
    #[serde(default)]
    ph: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    pid: u64,
}

/// A timeline: microseconds from the first span of any rank.
#[derive(Debug, Serialize, PartialEq)]
pub struct Timeline {
    /// Rows, one per rank and queue.
    pub lanes: Vec<Lane>,
    /// Names of spans.
    pub names: Vec<String>,
    /// Length in microseconds.
    pub length: f64,
    /// Spans that are not shown.
    pub left_out: usize,
}

/// A queue of a rank.
#[derive(Debug, Serialize, PartialEq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Lane {
    pub rank: u64,
    pub queue: String,
    /// Begin, duration and name's index of each span.
    pub spans: Vec<(f64, f64, usize)>,
}

impl Timeline {
    /// Reads a trace file.
    pub fn read(path: &Path) -> Result<Self, TimelineError> {
        if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
            return Err(TimelineError::Missing);
        }
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|_| TimelineError::Missing)?;
        file.take(LONGEST_FILE + 1).read_to_end(&mut bytes).map_err(|_| TimelineError::Missing)?;
        if bytes.len() as u64 > LONGEST_FILE {
            return Err(TimelineError::TooLong);
        }
        let trace: TraceFile = serde_json::from_slice(&bytes).map_err(|_| TimelineError::Invalid)?;
        Ok(Self::of(trace.trace_events))
    }

    fn of(mut events: Vec<TraceEvent>) -> Self {
        events.retain(|event| {
            event.ph == "X" && event.ts.is_finite() && event.dur.is_finite() && event.dur >= 0.0
        });
        let left_out = events.len().saturating_sub(MOST_SPANS);
        if left_out > 0 {
            events.select_nth_unstable_by(MOST_SPANS, |one, other| other.dur.total_cmp(&one.dur));
            events.truncate(MOST_SPANS);
        }
        events.sort_by(|one, other| one.ts.total_cmp(&other.ts));
        // Every rank has a clock of its own; a step begins on all of them together.
        let mut origins: Vec<(u64, f64)> = Vec::new();
        let (mut lanes, mut names): (Vec<Lane>, Vec<String>) = (Vec::new(), Vec::new());
        let mut length: f64 = 0.0;
        for event in events {
            let origin = match origins.iter().find(|(rank, _)| *rank == event.pid) {
                Some((_, origin)) => *origin,
                None if origins.len() < 64 => {
                    origins.push((event.pid, event.ts));
                    event.ts
                }
                None => continue,
            };
            let (name, queue) = (shown(&event.name, 80), shown(&event.cat, 80));
            let known = names.iter().position(|known| *known == name);
            let name = known.unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            });
            let lane = lanes.iter().position(|lane| lane.rank == event.pid && lane.queue == queue);
            let lane = match lane {
                Some(lane) => lane,
                None if lanes.len() < 512 => {
                    lanes.push(Lane { rank: event.pid, queue, spans: Vec::new() });
                    lanes.len() - 1
                }
                None => continue,
            };
            let begin = event.ts - origin;
            length = length.max(begin + event.dur);
            lanes[lane].spans.push((begin, event.dur, name));
        }
        lanes.sort_by(|one, other| (one.rank, &one.queue).cmp(&(other.rank, &other.queue)));
        Self { lanes, names, length, left_out }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_begin_together_and_garbage_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let text = r#"{"traceEvents": [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}},
            {"name": "matmul", "cat": "compute", "ph": "X", "ts": 100.0, "dur": 5.0, "pid": 0, "tid": 0},
            {"name": "gather", "cat": "comm", "ph": "X", "ts": 103.0, "dur": 4.0, "pid": 0, "tid": 1},
            {"name": "matmul", "cat": "compute", "ph": "X", "ts": 7.0, "dur": 6.0, "pid": 1, "tid": 0}]}"#;
        std::fs::write(&path, text).unwrap();
        let timeline = Timeline::read(&path).unwrap();
        let lanes: Vec<_> = timeline.lanes.iter().map(|lane| (lane.rank, lane.queue.as_str())).collect();
        assert_eq!(lanes, [(0, "comm"), (0, "compute"), (1, "compute")]);
        assert_eq!(timeline.lanes[0].spans, [(3.0, 4.0, 1)]);
        assert_eq!(timeline.lanes[2].spans, [(0.0, 6.0, 0)]);
        assert_eq!((timeline.length, timeline.left_out), (7.0, 0));
        std::fs::write(&path, "[]").unwrap();
        assert!(matches!(Timeline::read(&path), Err(TimelineError::Invalid)));
        assert!(matches!(Timeline::read(folder.path()), Err(TimelineError::Missing)));
    }
}
