//! The model of one run folder, read incrementally and never written.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::flat_json::{Field, fields};
use crate::process;
use crate::series::Series;
use crate::status::{Rank, Status, json, text};
use crate::tail::{Lines, Tail};

/// Curves of a run, at most: names come from a file.
const MOST_SERIES: usize = 40;
/// Newest events kept.
const MOST_EVENTS: usize = 500;
/// Resumes shown.
const MOST_SEAMS: usize = 100;
/// Checkpoints and timelines listed, newest first.
const MOST_LISTED: usize = 100;
/// Entries of a folder that are looked at.
const MOST_ENTRIES: usize = 20_000;
/// How often folders are listed.
const LISTING: Duration = Duration::from_secs(2);
/// Fields of metrics.jsonl that are no curves.
const NO_CURVES: [&str; 6] = ["step", "tokens", "samples_seen", "skipped", "eval_tokens", "eval_perplexity"];

/// A run that cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no such folder.
    #[error("there is no folder {}: give the --output of a `zeroth train`", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// It cannot be read.
    #[error("cannot read {}: {source}", folder.display())]
    Unreadable {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not a run.
    #[error(
        "{} contains no run: neither metrics.jsonl nor status.json is there; give the --output of a `zeroth train`{}",
        folder.display(), nested.as_ref().map(|run| format!(", such as {}", run.display())).unwrap_or_default()
    )]
    NoRun {
        /// The folder.
        folder: PathBuf,
        /// A run inside of it.
        nested: Option<PathBuf>,
    },
}

/// Something that happened to a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    /// Seconds since 1970.
    pub time: f64,
    /// Its name.
    pub event: String,
    /// Its step.
    pub step: Option<u64>,
    /// Details.
    pub detail: String,
}

/// A checkpoint in the run folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckpointEntry {
    /// Its step.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds since 1970.
    pub time: f64,
}

/// A value of the resolved config.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setting {
    /// The key.
    pub key: String,
    /// Its value as JSON.
    pub value: String,
    /// Where it came from.
    pub origin: String,
}

/// Bytes of a tier, planned.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlannedTier {
    /// `device` or `host`.
    pub tier: &'static str,
    /// Categories with their bytes.
    pub categories: Vec<(String, u64)>,
    /// All of it.
    pub total: u64,
}

/// A run folder that is followed.
pub struct Run {
    /// Its name: `--run-name`, else the folder's.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    metrics: Tail,
    events_tail: Tail,
    pub(crate) curves: Curves,
    log: Log,
    status: Option<Status>,
    machine: Option<String>,
    plan: Value,
    checkpoints: Vec<CheckpointEntry>,
    timelines: Vec<String>,
    listed: Option<Instant>,
    /// The last error of reading a file.
    problem: Option<String>,
}

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
                if let Field::Number(number) = value
                    && (1.0..9e15).contains(&number)
                    && number.fract() == 0.0
                {
                    step = Some(number as u64);
                }
                return;
            }
            let Some(step) = step else { return };
            // Lines have the same fields in the same order, mostly.
            let is_next = series.get(place).is_some_and(|(known, _)| known == name);
            let found =
                if is_next { Some(place) } else { series.iter().position(|(known, _)| known == name) };
            let found = match found {
                Some(found) => found,
                None if series.len() < MOST_SERIES && name.len() <= 64 && value != Field::Other => {
                    series.push((name.chars().filter(|c| !c.is_control()).collect(), Series::default()));
                    series.len() - 1
                }
                None => return,
            };
            place = found + 1;
            match value {
                Field::Number(number) => series[found].1.push(step, number),
                Field::Null => series[found].1.gaps += 1,
                Field::Other => {}
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

/// events.jsonl.
#[derive(Default)]
struct Log {
    events: VecDeque<Event>,
    seams: VecDeque<u64>,
    garbage: u64,
    /// Counts events, to notice new ones.
    count: u64,
}

impl Lines for Log {
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
        self.events.push_back(Event { time, step, detail: detail(&raw), event: name });
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
        Value::String(_) => format!("{name} {}", text(value).unwrap_or_default()),
        Value::Number(number) => {
            let short = number.as_f64().filter(|_| number.is_f64()).map(crate::figures::number);
            format!("{name} {}", short.unwrap_or_else(|| number.to_string()))
        }
        other => format!("{name} {other}"),
    };
    shown.map(one).collect::<Vec<_>>().join(" · ").chars().filter(|c| !c.is_control()).take(400).collect()
}

impl Run {
    /// Opens a run folder and reads what is there.
    pub fn open(folder: &Path) -> Result<Self, OpenError> {
        let missing = || OpenError::Missing { folder: folder.to_owned() };
        match fs::metadata(folder) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(OpenError::NoRun { folder: folder.to_owned(), nested: None }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(missing()),
            Err(source) => return Err(OpenError::Unreadable { folder: folder.to_owned(), source }),
        }
        if let Err(source) = fs::read_dir(folder) {
            return Err(OpenError::Unreadable { folder: folder.to_owned(), source });
        }
        if !is_run(folder) {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MOST_ENTRIES);
            let nested = entries.map(|entry| entry.path()).find(|path| is_run(path));
            return Err(OpenError::NoRun { folder: folder.to_owned(), nested });
        }
        let plan = json(&folder.join("plan.json")).unwrap_or(Value::Null);
        let real = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let own = real.file_name().map(|name| name.to_string_lossy().into_owned());
        let mut run = Self {
            name: text(&plan["run_name"]).or_else(|| text(&Value::String(own?))).unwrap_or_default(),
            folder: folder.to_owned(),
            metrics: Tail::new(&folder.join("metrics.jsonl")),
            events_tail: Tail::new(&folder.join("events.jsonl")),
            curves: Curves::default(),
            log: Log::default(),
            status: None,
            machine: process::machine(),
            plan,
            checkpoints: Vec::new(),
            timelines: Vec::new(),
            listed: None,
            problem: None,
        };
        run.poll();
        Ok(run)
    }

    /// Reads what is new; true if something was.
    pub fn poll(&mut self) -> bool {
        let before = self.version();
        let metrics = self.metrics.poll(&mut self.curves);
        let events = self.events_tail.poll(&mut self.log);
        let failed = [("metrics.jsonl", metrics), ("events.jsonl", events)]
            .into_iter()
            .find_map(|(name, read)| Some(format!("cannot read {name}: {}", read.err()?)));
        self.problem = failed;
        self.status = Status::read(&self.folder.join("status.json"), self.status.as_ref());
        if self.listed.is_none_or(|listed| listed.elapsed() >= LISTING) {
            self.listed = Some(Instant::now());
            self.checkpoints = checkpoints(&self.folder.join("checkpoints"));
            self.timelines = timelines(&self.folder.join("logs"));
            if self.plan.is_null() {
                self.plan = json(&self.folder.join("plan.json")).unwrap_or(Value::Null);
            }
        }
        before != self.version()
    }

    fn version(&self) -> (u64, u64, u64, u64) {
        (self.curves.generation, self.curves.lines, self.log.count, self.curves.garbage)
    }

    /// The state of the run: as it says, or `lost`, or `unknown` without a status.
    pub fn state(&self) -> &str {
        self.status.as_ref().map_or("unknown", |status| status.state(self.machine.as_deref()))
    }

    /// Whether nothing more will happen.
    pub fn has_ended(&self) -> bool {
        self.status.as_ref().is_some_and(Status::has_ended)
    }

    /// The last step.
    pub fn step(&self) -> u64 {
        let by_curve = self.curves.get("loss").and_then(Series::last).map_or(0, |(step, _)| step);
        by_curve.max(self.status.as_ref().map_or(0, |status| status.step))
    }

    /// Steps of the run; 0 if unknown.
    pub fn steps(&self) -> u64 {
        self.status.as_ref().map_or(0, |status| status.steps)
    }

    /// The model and the device.
    pub fn model(&self) -> (Option<&str>, Option<&str>) {
        let status = self.status.as_ref();
        (
            status.and_then(|status| status.model.as_deref()),
            status.and_then(|status| status.device.as_deref()),
        )
    }

    /// The machine of the launcher.
    pub fn host(&self) -> Option<&str> {
        self.status.as_ref().map(|status| status.host.as_str())
    }

    /// Its ranks.
    pub fn ranks(&self) -> Vec<Rank> {
        self.status.as_ref().map_or_else(Vec::new, |status| status.ranks(self.machine.as_deref()))
    }

    /// Seconds since the status changed.
    pub fn silence(&self) -> Option<f64> {
        self.status.as_ref().map(|status| status.silence().as_secs_f64())
    }

    /// Events, oldest first.
    pub fn events(&self) -> impl DoubleEndedIterator<Item = &Event> {
        self.log.events.iter()
    }

    /// Steps after which the run was resumed.
    pub fn seams(&self) -> impl Iterator<Item = u64> {
        self.log.seams.iter().copied()
    }

    /// Lines that could not be read.
    pub fn garbage(&self) -> u64 {
        self.curves.garbage + self.log.garbage
    }

    /// Why a file cannot be read.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Checkpoints, newest first.
    pub fn checkpoints(&self) -> &[CheckpointEntry] {
        &self.checkpoints
    }

    /// Names of timelines in `logs/`, newest first.
    pub fn timelines(&self) -> &[String] {
        &self.timelines
    }

    /// Planned bytes of a rank by tier and category.
    pub fn planned(&self) -> Vec<PlannedTier> {
        let from_status = self.status.as_ref().map(|status| &status.plan).filter(|plan| plan.is_object());
        let tier = |tier: &'static str| {
            let key = format!("{tier}_bytes");
            let raw = from_status.map_or_else(|| &self.plan[key.as_str()], |plan| &plan[tier]);
            let categories = raw.as_object()?.iter().filter(|(name, _)| *name != "total").take(20);
            let categories: Vec<(String, u64)> =
                categories.filter_map(|(name, bytes)| Some((name.clone(), bytes.as_u64()?))).collect();
            let sum = categories.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
            Some(PlannedTier { tier, categories, total: raw["total"].as_u64().unwrap_or(sum) })
        };
        ["device", "host"].into_iter().filter_map(tier).filter(|tier| tier.total > 0).collect()
    }

    /// Planned bytes of the process outside of the plan's tiers.
    pub fn overhead(&self) -> Option<u64> {
        let status = self.status.as_ref().and_then(|status| status.plan["overhead"].as_u64());
        status.or_else(|| self.plan["overhead_bytes"]["total"].as_u64())
    }

    /// The resolved config with origins, from origin.json.
    pub fn settings(&self) -> Vec<Setting> {
        let origins = json(&self.folder.join("origin.json"));
        let Some(Value::Object(origins)) = origins else { return Vec::new() };
        let setting = |(key, entry): (&String, &Value)| Setting {
            key: key.chars().filter(|c| !c.is_control()).take(100).collect(),
            value: entry["value"].to_string().chars().take(200).collect(),
            origin: text(&entry["detail"]).or_else(|| text(&entry["origin"])).unwrap_or_default(),
        };
        origins.iter().take(1000).map(setting).collect()
    }

    /// The last value of a curve.
    pub fn last(&self, curve: &str) -> Option<f64> {
        self.curves.get(curve)?.last().map(|(_, value)| value)
    }

    /// Estimated seconds to the end, by the time of the last steps.
    pub fn seconds_left(&self) -> Option<f64> {
        if self.has_ended() || self.state() == "lost" {
            return None;
        }
        let recent = self.curves.get("step_ms")?.since(self.step().saturating_sub(50))?;
        let mean = recent.iter().map(|(_, ms)| ms).sum::<f64>() / recent.len().max(1) as f64;
        let left = self.steps().checked_sub(self.step()).filter(|_| self.steps() > 0)?;
        Some(left as f64 * mean / 1e3).filter(|seconds| seconds.is_finite())
    }
}

/// origin.json is the first file of a run that is being prepared.
fn is_run(folder: &Path) -> bool {
    ["metrics.jsonl", "status.json", "origin.json"].iter().any(|name| folder.join(name).is_file())
}

fn number(name: &str, first: &str, last: &str) -> Option<u64> {
    let digits = name.strip_prefix(first)?.strip_suffix(last)?;
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.is_empty();
    digits.parse().ok().filter(|_| is_plain)
}

/// Entries of a folder with a number in their names, highest first.
fn numbered(folder: &Path, first: &str, last: &str) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MOST_ENTRIES);
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| Some((number(entry.file_name().to_str()?, first, last)?, entry.path())))
        .collect();
    found.sort_unstable_by(|one, other| other.cmp(one));
    found.truncate(MOST_LISTED);
    found
}

fn checkpoints(folder: &Path) -> Vec<CheckpointEntry> {
    let entry = |(step, path): (u64, PathBuf)| {
        let files = fs::read_dir(&path).into_iter().flatten().flatten().take(MOST_ENTRIES);
        let bytes = files.filter_map(|file| file.metadata().ok()).filter(fs::Metadata::is_file);
        let modified = fs::metadata(path.join("manifest.json")).and_then(|found| found.modified()).ok()?;
        let time = modified.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs_f64();
        Some(CheckpointEntry { step, bytes: bytes.map(|found| found.len()).sum(), time })
    };
    numbered(folder, "step-", "").into_iter().filter_map(entry).collect()
}

fn timelines(logs: &Path) -> Vec<String> {
    let found = numbered(logs, "step-", ".trace.json");
    found.into_iter().map(|(step, _)| format!("step-{step}.trace.json")).collect()
}
