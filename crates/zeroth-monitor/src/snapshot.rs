//! Runs as JSON: for `--format json`, and for the page. A whole snapshot first, then what is new.

use serde::Serialize;

use crate::event_history::HistoryEvent;
use crate::run::{ListedCheckpoint, PlannedTier, Run, RunSetting};
use crate::status::MonitoredRank;

/// Points of a curve in a snapshot: more than any screen has columns.
const POINTS: usize = 1500;

/// Everything about a run that is small and changes.
#[derive(Debug, Serialize)]
pub(crate) struct Facts<'a> {
    name: &'a str,
    folder: String,
    state: &'a str,
    model: Option<&'a str>,
    device: Option<&'a str>,
    host: Option<&'a str>,
    step: u64,
    steps: u64,
    seconds_left: Option<f64>,
    status_age: Option<f64>,
    ended: bool,
    garbage_lines: u64,
    problem: Option<&'a str>,
    seams: Vec<u64>,
    ranks: Vec<MonitoredRank>,
    planned: Vec<PlannedTier>,
    overhead: Option<u64>,
    checkpoints: &'a [ListedCheckpoint],
    events: Vec<&'a HistoryEvent>,
    timelines: &'a [String],
}

impl<'a> Facts<'a> {
    fn of(run: &'a Run, events: usize) -> Self {
        let (model, device) = run.model();
        Self {
            name: &run.name,
            folder: run.folder.display().to_string(),
            state: run.state(),
            model,
            device,
            host: run.host(),
            step: run.step(),
            steps: run.steps(),
            seconds_left: run.seconds_left(),
            status_age: run.silence(),
            ended: run.has_ended(),
            garbage_lines: run.garbage(),
            problem: run.problem(),
            seams: run.seams().collect(),
            ranks: run.ranks(),
            planned: run.planned(),
            overhead: run.overhead(),
            checkpoints: run.checkpoints(),
            events: run.events().rev().take(events).collect(),
            timelines: run.timelines(),
        }
    }
}

/// A curve: first step, last step, minimum, maximum and last value of each bucket.
#[derive(Debug, Serialize)]
struct Curve<'a> {
    name: &'a str,
    points: Vec<(u64, u64, f64, f64, f64)>,
    gaps: u64,
}

/// A run with its curves.
#[derive(Debug, Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    facts: Facts<'a>,
    curves: Vec<Curve<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    config: Option<Vec<RunSetting>>,
}

/// A run with what is new in its curves.
#[derive(Debug, Serialize)]
struct Part<'a> {
    #[serde(flatten)]
    facts: Facts<'a>,
    new: Vec<(&'a str, Vec<(u64, f64)>)>,
}

#[derive(Serialize)]
struct All<T> {
    whole: bool,
    runs: Vec<T>,
}

fn whole(run: &Run, points: usize, config: bool) -> Whole<'_> {
    let curves = run.curves.series.iter().map(|(name, series)| Curve {
        name,
        points: series
            .buckets(points)
            .iter()
            .map(|bucket| (bucket.first, bucket.last, bucket.min, bucket.max, bucket.end))
            .collect(),
        gaps: series.gaps,
    });
    Whole { facts: Facts::of(run, 100), curves: curves.collect(), config: config.then(|| run.settings()) }
}

/// All runs with their curves and configs.
pub fn snapshot(runs: &[Run]) -> serde_json::Value {
    let runs: Vec<_> = runs.iter().map(|run| whole(run, POINTS, true)).collect();
    serde_json::to_value(All { whole: true, runs }).unwrap_or_default()
}

/// What a page has been sent.
#[derive(Default)]
pub(crate) struct Sent {
    runs: Vec<SentRun>,
}

#[derive(PartialEq)]
struct SentRun {
    generation: u64,
    /// The last step of each curve.
    steps: Vec<u64>,
}

impl Sent {
    /// The next message: whole at first and where a curve has started over, else only what is new.
    pub(crate) fn next(&mut self, runs: &[Run]) -> String {
        let position = |run: &Run| SentRun {
            generation: run.curves.generation,
            steps: run
                .curves
                .series
                .iter()
                .map(|(_, series)| series.last().map_or(0, |(step, _)| step))
                .collect(),
        };
        let now: Vec<SentRun> = runs.iter().map(position).collect();
        let parts: Option<Vec<Part<'_>>> = (self.runs.len() == runs.len())
            .then(|| runs.iter().zip(&self.runs).map(|(run, sent)| part(run, sent)).collect())
            .flatten();
        self.runs = now;
        let text = if let Some(runs) = parts {
            serde_json::to_string(&All { whole: false, runs })
        } else {
            let runs: Vec<_> = runs.iter().map(|run| whole(run, POINTS, false)).collect();
            serde_json::to_string(&All { whole: true, runs })
        };
        text.unwrap_or_default()
    }
}

/// What is new since `sent`; `None` where that cannot be told.
fn part<'a>(run: &'a Run, sent: &SentRun) -> Option<Part<'a>> {
    if run.curves.generation != sent.generation {
        return None;
    }
    let mut new = Vec::new();
    for (at, (name, series)) in run.curves.series.iter().enumerate() {
        let before = sent.steps.get(at).copied().unwrap_or(0);
        let last = series.last().map_or(0, |(step, _)| step);
        if last < before {
            return None;
        }
        if last > before {
            new.push((name.as_str(), series.since(before)?));
        }
    }
    Some(Part { facts: Facts::of(run, 40), new })
}
