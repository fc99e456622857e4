//! status.json as it is read: every field may be missing, every number is bounded, and what it says about processes of this
//! machine is checked.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeroth_base::escape_control_characters;

use crate::process::{self, ProcessLiveness};

/// The longest JSON file that is read.
const LONGEST_FILE: u64 = 16 << 20;
/// Ranks shown, at most.
const MOST_RANKS: usize = 4096;
/// A rank whose heartbeat, or a run whose status, is older than this is lost.
pub(crate) const SILENT: Duration = Duration::from_secs(5);
/// The longest text taken from a file of the run.
pub(crate) const LONGEST_TEXT: usize = 200;

/// Reads a JSON file of a run; `None` if it is missing, too long or not JSON.
pub(crate) fn json(path: &Path) -> Option<Value> {
    // A FIFO or a device of that name is not opened.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LONGEST_FILE + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 > LONGEST_FILE { None } else { serde_json::from_slice(&bytes).ok() }
}

/// A text of a file as it is shown.
pub(crate) fn text(value: &Value) -> Option<String> {
    value.as_str().map(|text| shown(text, LONGEST_TEXT))
}

/// At most this number of characters, with control characters escaped: no view passes on what steers a terminal or reorders a page.
pub(crate) fn shown(text: &str, most: usize) -> String {
    escape_control_characters(text).chars().take(most).collect()
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawStatus {
    zeroth_status: Value,
    time: Value,
    state: Value,
    step: Value,
    steps: Value,
    model: Value,
    device: Value,
    host: Value,
    machine: Value,
    pid: Value,
    ranks: Value,
    plan: Value,
}

/// The state of a rank, as shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Not joined yet.
    Starting,
    /// Its heart beats.
    Running,
    /// Its process is stopped.
    Stopped,
    /// Its heartbeat has not moved for five seconds.
    Silent,
    /// Its process is gone.
    Dead,
    /// It has ended by itself.
    Ended,
}

impl Health {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Silent => "silent",
            Self::Dead => "dead",
            Self::Ended => "ended",
        }
    }

    /// Whether it is shown red.
    pub const fn is_bad(self) -> bool {
        matches!(self, Self::Silent | Self::Dead)
    }
}

/// A rank, as shown.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct MonitoredRank {
    pub rank: u64,
    pub host: String,
    pub pid: Option<u32>,
    #[serde(skip)]
    started: Option<u64>,
    pub health: Health,
    /// Its last completed step.
    pub step: u64,
    /// Its current or last collective.
    pub op: Option<String>,
    /// Seconds since its heartbeat moved.
    pub heartbeat_age: Option<f64>,
    /// Proportional set size.
    pub pss_bytes: Option<u64>,
    /// Memory in use on its GPU, by the driver.
    pub gpu_bytes: Option<u64>,
}

/// status.json at one moment.
#[derive(Debug, Clone)]
pub(crate) struct StatusFile {
    time: f64,
    /// When this `time` was first seen, and how old it was then.
    seen: Instant,
    age: Duration,
    state: String,
    pub(crate) step: u64,
    pub(crate) steps: u64,
    pub(crate) model: Option<String>,
    pub(crate) device: Option<String>,
    pub(crate) host: String,
    machine: Option<String>,
    pid: Option<u32>,
    ranks: Vec<MonitoredRank>,
    pub(crate) plan: Value,
}

impl StatusFile {
    /// Reads the file; `before` tells how long it has not changed.
    pub(crate) fn read(path: &Path, before: Option<&Self>) -> Option<Self> {
        let raw: RawStatus = serde_json::from_value(json(path)?).ok()?;
        raw.zeroth_status.as_u64()?;
        let time = raw.time.as_f64().filter(|time| time.is_finite()).unwrap_or(0.0);
        let (seen, age) = match before.filter(|before| before.time == time) {
            Some(before) => (before.seen, before.age),
            None => (Instant::now(), if before.is_some() { Duration::ZERO } else { age(time) }),
        };
        let ranks = raw.ranks.as_array().map_or(&[][..], Vec::as_slice);
        Some(Self {
            time,
            seen,
            age,
            state: text(&raw.state).unwrap_or_default(),
            step: raw.step.as_u64().unwrap_or(0),
            steps: raw.steps.as_u64().unwrap_or(0),
            model: text(&raw.model),
            device: text(&raw.device),
            host: text(&raw.host).unwrap_or_default(),
            machine: raw.machine.as_str().map(str::to_owned),
            pid: raw.pid.as_u64().and_then(|pid| pid.try_into().ok()),
            ranks: ranks
                .iter()
                .take(MOST_RANKS)
                .zip(0..)
                .map(|(rank, number)| read_rank(rank, number))
                .collect(),
            plan: raw.plan,
        })
    }

    /// How long the file has not changed.
    pub(crate) fn silence(&self) -> Duration {
        self.seen.elapsed().saturating_add(self.age)
    }

    /// Whether the run says that it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state.as_str(), "done" | "stopped" | "failed")
    }

    /// The state of the run. One whose writer is gone, or silent elsewhere, is lost.
    pub(crate) fn state(&self, own_machine: Option<&str>) -> &str {
        if self.has_ended() {
            return &self.state;
        }
        let is_here = own_machine.is_some() && self.machine.as_deref() == own_machine;
        match self.pid.filter(|_| is_here).map(|pid| process::state(pid, None)) {
            Some(ProcessLiveness::Gone) => "lost",
            Some(ProcessLiveness::Stopped) => "stopped by a signal",
            // A pid may be used again: then its file tells.
            _ if self.silence() > SILENT => "lost",
            _ => &self.state,
        }
    }

    /// The ranks, with what this machine knows about their processes.
    pub(crate) fn ranks(&self, own_machine: Option<&str>) -> Vec<MonitoredRank> {
        let is_here = own_machine.is_some() && self.machine.as_deref() == own_machine;
        let silence = self.silence();
        let look = |rank: &MonitoredRank| {
            let mut rank = rank.clone();
            if self.has_ended() {
                return rank;
            }
            // A second old at most is what the writer promises.
            let stale = silence.saturating_sub(Duration::from_secs(1)).as_secs_f64();
            rank.heartbeat_age = rank.heartbeat_age.map(|age| age + stale);
            if !matches!(rank.health, Health::Running | Health::Starting | Health::Stopped) {
                return rank;
            }
            let here = rank.pid.filter(|_| is_here).map(|pid| process::state(pid, rank.started));
            rank.health = match here {
                Some(ProcessLiveness::Gone) => Health::Dead,
                Some(ProcessLiveness::Stopped) => Health::Stopped,
                _ if rank.health == Health::Stopped => Health::Stopped,
                _ if rank.heartbeat_age.is_some_and(|age| age > SILENT.as_secs_f64()) => Health::Silent,
                _ => rank.health,
            };
            rank
        };
        self.ranks.iter().map(look).collect()
    }
}

/// How old a time of another clock is; one in the future is new.
fn age(time: f64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
    Duration::try_from_secs_f64((now - time).max(0.0)).unwrap_or(Duration::MAX / 4)
}

fn read_rank(raw: &Value, number: u64) -> MonitoredRank {
    MonitoredRank {
        rank: raw["rank"].as_u64().unwrap_or(number),
        host: text(&raw["host"]).unwrap_or_default(),
        pid: raw["pid"].as_u64().and_then(|pid| pid.try_into().ok()),
        started: raw["started"].as_u64(),
        health: match raw["state"].as_str() {
            Some("running") => Health::Running,
            Some("stopped") => Health::Stopped,
            Some("dead") => Health::Dead,
            Some("ended") => Health::Ended,
            _ => Health::Starting,
        },
        step: raw["step"].as_u64().unwrap_or(0),
        op: text(&raw["op"]),
        heartbeat_age: raw["heartbeat_age"].as_f64().filter(|age| age.is_finite()),
        pss_bytes: raw["pss_bytes"].as_u64(),
        gpu_bytes: raw["gpu_bytes"].as_u64(),
    }
}
