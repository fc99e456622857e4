//! The model of one run folder, read incrementally and never written.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::curves::Curves;
use crate::event_history::{EndState, EventHistory, HistoryEvent};
use crate::process;
use crate::series::Series;
use crate::status::{self, LONGEST_TEXT, MonitoredRank, StatusFile, json, text};
use crate::tail::Tail;

/// Checkpoints and timelines listed, newest first.
const MOST_LISTED: usize = 100;
/// Entries of a folder that are looked at.
const MOST_ENTRIES: usize = 20_000;
/// How often folders are listed.
const LISTING: Duration = Duration::from_secs(2);

/// A run that cannot be watched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum OpenError {
    #[error("there is no folder {}: give the --output of a `zeroth train`", folder.display())]
    Missing { folder: PathBuf },
    #[error("cannot read {}: {source}", folder.display())]
    Unreadable { folder: PathBuf, source: std::io::Error },
    #[error(
        "{} contains no run: neither metrics.jsonl nor status.json is there; give the --output of a `zeroth train`{}",
        folder.display(), nested.as_ref().map(|run| format!(", such as {}", run.display())).unwrap_or_default()
    )]
    NoRun { folder: PathBuf, nested: Option<PathBuf> },
}

/// A checkpoint in the run folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct ListedCheckpoint {
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds since 1970.
    pub time: f64,
}

/// A value of the resolved config.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RunSetting {
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
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Run {
    /// Its name: `--run-name`, else the folder's.
    pub name: String,
    pub folder: PathBuf,
    metrics: Tail,
    events_tail: Tail,
    pub(crate) curves: Curves,
    log: EventHistory,
    status: Option<StatusFile>,
    machine: Option<String>,
    plan: Value,
    checkpoints: Vec<ListedCheckpoint>,
    timelines: Vec<String>,
    listed: Option<Instant>,
    /// The last error of reading a file.
    problem: Option<String>,
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
        let real = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let own = real.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let mut run = Self {
            name: status::shown(&own, LONGEST_TEXT),
            folder: folder.to_owned(),
            metrics: Tail::new(&folder.join("metrics.jsonl")),
            events_tail: Tail::new(&folder.join("events.jsonl")),
            curves: Curves::default(),
            log: EventHistory::default(),
            status: None,
            machine: process::machine(),
            plan: Value::Null,
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
        self.status = StatusFile::read(&self.folder.join("status.json"), self.status.as_ref());
        if self.listed.is_none_or(|listed| listed.elapsed() >= LISTING) {
            self.listed = Some(Instant::now());
            self.checkpoints = checkpoints(&self.folder.join("checkpoints"));
            self.timelines = timelines(&self.folder.join("logs"));
            if self.plan.is_null() {
                self.plan = json(&self.folder.join("plan.json")).unwrap_or(Value::Null);
                if let Some(name) = text(&self.plan["run_name"]) {
                    self.name = name;
                }
            }
        }
        before != self.version()
    }

    fn version(&self) -> (u64, u64, u64, u64) {
        (self.curves.generation, self.curves.lines, self.log.count, self.curves.garbage)
    }

    /// The state of the run: as it says, or `lost`. Without a status, its events tell how it ended; else it is `unknown`.
    pub fn state(&self) -> &str {
        match &self.status {
            Some(status) => status.state(self.machine.as_deref()),
            None => self.log.end.map_or("unknown", EndState::name),
        }
    }

    /// Whether nothing more will happen.
    pub fn has_ended(&self) -> bool {
        self.status.as_ref().map_or(self.log.end.is_some(), StatusFile::has_ended)
    }

    /// The last step.
    pub fn step(&self) -> u64 {
        let by_curve = self.curves.get("loss").and_then(Series::last).map_or(0, |(step, _)| step);
        by_curve.max(self.status.as_ref().map_or(0, |status| status.step))
    }

    /// Steps of the run; 0 if unknown.
    pub fn steps(&self) -> u64 {
        self.status.as_ref().map_or(self.log.steps, |status| status.steps)
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
    pub fn ranks(&self) -> Vec<MonitoredRank> {
        self.status.as_ref().map_or_else(Vec::new, |status| status.ranks(self.machine.as_deref()))
    }

    /// Seconds since the status changed.
    pub fn silence(&self) -> Option<f64> {
        self.status.as_ref().map(|status| status.silence().as_secs_f64())
    }

    /// Events, oldest first.
    pub fn events(&self) -> impl DoubleEndedIterator<Item = &HistoryEvent> {
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
    pub fn checkpoints(&self) -> &[ListedCheckpoint] {
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
            let categories: Vec<(String, u64)> = categories
                .filter_map(|(name, bytes)| Some((status::shown(name, 40), bytes.as_u64()?)))
                .collect();
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
    pub fn settings(&self) -> Vec<RunSetting> {
        let origins = json(&self.folder.join("origin.json"));
        let Some(Value::Object(origins)) = origins else { return Vec::new() };
        let setting = |(key, entry): (&String, &Value)| RunSetting {
            key: status::shown(key, 100),
            value: status::shown(&entry["value"].to_string(), LONGEST_TEXT),
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

fn checkpoints(folder: &Path) -> Vec<ListedCheckpoint> {
    let entry = |(step, path): (u64, PathBuf)| {
        let files = fs::read_dir(&path).into_iter().flatten().flatten().take(MOST_ENTRIES);
        let bytes = files.filter_map(|file| file.metadata().ok()).filter(fs::Metadata::is_file);
        let modified = fs::metadata(path.join("manifest.json")).and_then(|found| found.modified()).ok()?;
        let time = modified.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs_f64();
        Some(ListedCheckpoint { step, bytes: bytes.map(|found| found.len()).sum(), time })
    };
    numbered(folder, "step-", "").into_iter().filter_map(entry).collect()
}

fn timelines(logs: &Path) -> Vec<String> {
    let found = numbered(logs, "step-", ".trace.json");
    found.into_iter().map(|(step, _)| format!("step-{step}.trace.json")).collect()
}
