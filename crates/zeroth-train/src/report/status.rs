//! status.json: what a run is doing now, rewritten every second by a thread of the launcher, or of rank 0 where another
//! launcher started it.
//!
//! The thread reads what ranks publish anyway; a step never waits for it, and a file that cannot be written is not an error.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;
use zeroth_base::unfinished_path;
use zeroth_comm::{ProcessState, RankObservation, RankObserver, RankPhase};
use zeroth_machine::{Gpu, GpuMemory};

use super::events::{EventLog, RunEvent, now};
use super::resident::resident_bytes_of;
use crate::run_folder::{EVENTS, STATUS};

/// How often the file is written.
const PERIOD: Duration = Duration::from_secs(1);
/// How long the end of a run waits for the last write, on a disk that hangs.
const LAST_PATIENCE: Duration = Duration::from_secs(2);
/// Reading the memory of a process holds a lock of its address space, and costs time with its size: at most one part in
/// this many of the time is spent on it.
const MEMORY_SHARE: u32 = 500;
/// Marks the file as ours, and its layout.
const VERSION: u32 = 1;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// All steps are done.
    Done,
    /// Stopped by a signal, after a save.
    Stopped,
    /// Failed.
    Failed,
}

/// Facts of a run that do not change.
#[derive(Debug, Clone)]
pub struct RunFacts {
    /// Number of ranks.
    pub ranks: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Completed steps that it resumes after.
    pub resumed_after: Option<u64>,
    /// The model's name.
    pub model: String,
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Planned bytes of a rank: tiers, each with its categories.
    pub plan: Value,
    /// GPUs in use: rank r has the one with index r modulo their number.
    pub gpus: Vec<Gpu>,
}

/// Runs a write, unless the run folder is being removed.
pub type WriteGate = Box<dyn Fn(&mut dyn FnMut()) + Send>;

/// Writes status.json and the launcher's events. Dropped without [`Self::finish`], the run has failed.
pub struct StatusWriter {
    shared: Arc<SharedState>,
}

struct SharedState {
    state: Mutex<WriterState>,
    changed: Condvar,
}

#[derive(Default)]
struct WriterState {
    observer: Option<Box<dyn RankObserver>>,
    events: Vec<RunEvent>,
    lost: Option<u64>,
    end: Option<RunState>,
    is_written: bool,
}

impl StatusWriter {
    /// Starts the thread. Without one there is no status, and the run goes on.
    pub fn start(folder: &Path, facts: RunFacts, gate: WriteGate) -> Self {
        let (pid, host) = (std::process::id(), host());
        let mut events =
            vec![RunEvent::Start { ranks: facts.ranks, steps: facts.steps, host: host.clone(), pid }];
        events.extend(facts.resumed_after.map(|step| RunEvent::Resume { step }));
        let state = WriterState { events, ..WriterState::default() };
        let shared = Arc::new(SharedState { state: Mutex::new(state), changed: Condvar::new() });
        let inside = Arc::clone(&shared);
        let mut writer = StatusThread {
            path: folder.join(STATUS),
            unfinished: unfinished_path(folder, STATUS),
            events: folder.join(EVENTS),
            gpus: (!facts.gpus.is_empty()).then(|| GpuMemory::open(&facts.gpus)).flatten(),
            facts,
            host,
            ranks: Vec::new(),
            next_memory: Instant::now(),
            last: None,
        };
        let started = std::thread::Builder::new()
            .name("status".to_owned())
            .spawn(move || writer.run(&inside, &gate))
            .is_ok();
        if !started {
            shared.lock().is_written = true;
        }
        Self { shared }
    }

    /// Observes these ranks from now on.
    pub fn observe(&self, observer: Box<dyn RankObserver>) {
        self.shared.lock().observer = Some(observer);
        self.shared.changed.notify_all();
    }

    /// A function that observes, for a launcher that outlives this call.
    pub fn observe_with(&self) -> impl Fn(Box<dyn RankObserver>) + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move |observer| {
            shared.lock().observer = Some(observer);
            shared.changed.notify_all();
        }
    }

    /// A rank was lost; the run ends, or starts again.
    pub fn rank_lost(&self, rank: u64, reason: String) {
        let mut state = self.shared.lock();
        state.lost = Some(rank);
        state.events.push(RunEvent::RankLost { rank, reason });
        self.shared.changed.notify_all();
    }

    /// The run starts again after these steps.
    pub fn restarted(&self, step: u64) {
        let mut state = self.shared.lock();
        state.lost = None;
        state.events.push(RunEvent::Resume { step });
        self.shared.changed.notify_all();
    }

    /// Writes the end of the run, and waits for it a moment.
    pub fn finish(self, how: RunState) {
        self.end(how);
    }

    fn end(&self, how: RunState) {
        let mut state = self.shared.lock();
        if state.end.is_none() {
            state.end = Some(how);
            self.shared.changed.notify_all();
        }
        drop(self.shared.changed.wait_timeout_while(state, LAST_PATIENCE, |state| !state.is_written));
    }
}

impl Drop for StatusWriter {
    fn drop(&mut self) {
        self.end(RunState::Failed);
    }
}

impl SharedState {
    /// No holder of the lock panics.
    fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of this machine.
fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| String::new(), |name| name.trim().to_owned())
}

/// What process ids are relative to: the boot and the pid namespace. A reader with the same text may look into /proc.
fn machine() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

#[derive(Serialize)]
struct RunStatus<'a> {
    #[serde(rename = "zeroth_status")]
    version: u32,
    time: f64,
    period: f64,
    state: &'a str,
    step: u64,
    steps: u64,
    model: &'a str,
    device: &'a str,
    host: &'a str,
    machine: Option<&'a str>,
    pid: u32,
    ranks: Vec<RankEntry<'a>>,
    plan: &'a Value,
}

#[derive(Serialize)]
struct RankEntry<'a> {
    rank: u64,
    host: &'a str,
    pid: Option<u32>,
    started: Option<u64>,
    state: &'static str,
    phase: &'static str,
    step: u64,
    op: Option<String>,
    heartbeat_age: Option<f64>,
    pss_bytes: Option<u64>,
    gpu_bytes: Option<u64>,
}

/// What the thread remembers of a rank.
struct RankHistory {
    heartbeat: u64,
    moved: Instant,
    pss: Option<u64>,
}

struct StatusThread {
    path: PathBuf,
    unfinished: PathBuf,
    events: PathBuf,
    facts: RunFacts,
    host: String,
    gpus: Option<GpuMemory>,
    ranks: Vec<RankHistory>,
    /// When the memory of processes is read again.
    next_memory: Instant,
    /// The last look at the ranks: at the end they are gone.
    last: Option<Vec<RankObservation>>,
}

impl StatusThread {
    fn run(&mut self, shared: &SharedState, gate: &WriteGate) {
        let (machine, is_ours) = (machine(), self.is_ours());
        let mut log = None;
        let mut state = shared.lock();
        loop {
            let (end, lost) = (state.end, state.lost);
            let events = std::mem::take(&mut state.events);
            let is_observed = state.observer.is_some();
            if let Some(observer) = state.observer.as_deref() {
                self.look(observer, end.is_some());
            }
            drop(state);
            let text = self.text(machine.as_deref(), end, lost, false);
            let mut write = || {
                let log = log.get_or_insert_with(|| EventLog::open(&self.events));
                for event in &events {
                    log.append(event);
                }
                if let Some(state) = end {
                    log.append(&RunEvent::End { state, step: self.step() });
                }
                // Not synced: it is rewritten every second, and worth nothing after a crash of the machine.
                let is_replaced = is_ours
                    && fs::write(&self.unfinished, &text)
                        .and_then(|()| fs::rename(&self.unfinished, &self.path))
                        .is_ok();
                if !is_replaced {
                    let _ = fs::remove_file(&self.unfinished);
                }
                if is_ours && !is_replaced && end.is_some() {
                    self.write_in_place(&text, &self.text(machine.as_deref(), end, lost, true));
                }
            };
            gate(&mut write);
            state = shared.lock();
            if end.is_some() {
                state.is_written = true;
                shared.changed.notify_all();
                return;
            }
            let is_idle = |state: &mut WriterState| {
                state.end.is_none() && state.events.is_empty() && state.observer.is_some() == is_observed
            };
            let waited = shared.changed.wait_timeout_while(state, PERIOD, is_idle);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the file may be replaced: somebody else's of that name stays.
    fn is_ours(&self) -> bool {
        match fs::read(&self.path) {
            Ok(found) => {
                found.is_empty()
                    || serde_json::from_slice::<Value>(&found)
                        .is_ok_and(|found| found.get("zeroth_status").is_some())
            }
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    fn look(&mut self, observer: &dyn RankObserver, is_end: bool) {
        let now = Instant::now();
        let seen: Vec<RankObservation> = (0..observer.world()).map(|rank| observer.look(rank)).collect();
        self.ranks.resize_with(seen.len(), || RankHistory { heartbeat: 0, moved: now, pss: None });
        let reads_memory = !is_end && now >= self.next_memory;
        for (history, seen) in self.ranks.iter_mut().zip(&seen) {
            if history.heartbeat != seen.heartbeat {
                (history.heartbeat, history.moved) = (seen.heartbeat, now);
            }
            if let (true, Some((pid, _))) = (reads_memory, seen.process) {
                history.pss = resident_bytes_of(pid).or(history.pss);
            }
        }
        if reads_memory {
            self.next_memory = now + (now.elapsed() * MEMORY_SHARE).max(PERIOD / 2);
        }
        self.last = Some(seen);
    }

    /// Completed steps by rank 0.
    fn step(&self) -> u64 {
        let first = self.last.as_ref().and_then(|ranks| ranks.first());
        first.map_or(0, |rank| rank.step).max(self.facts.resumed_after.unwrap_or(0))
    }

    /// Writes the end over an earlier status on a full disk, which has room for no other file: the whole text, or the short one.
    /// A reader that comes at that moment tries again.
    fn write_in_place(&self, whole: &[u8], short: &[u8]) {
        let Ok(file) = fs::OpenOptions::new().write(true).open(&self.path) else { return };
        let room = file.metadata().map_or(0, |found| found.len() as usize);
        if let Some(text) = [whole, short].into_iter().find(|text| text.len() <= room) {
            // Blanks after JSON are JSON.
            let mut padded = text.to_vec();
            padded.resize(room, b' ');
            let _ = file.write_all_at(&padded, 0);
        }
    }

    /// The file's contents; a short one leaves out the ranks and the plan.
    fn text(
        &self,
        machine: Option<&str>,
        end: Option<RunState>,
        lost: Option<u64>,
        is_short: bool,
    ) -> Vec<u8> {
        let ranks = self.last.as_deref().filter(|_| !is_short).unwrap_or_default();
        let phase =
            self.last.as_ref().and_then(|ranks| ranks.first()).map_or(RankPhase::Starting, |rank| rank.phase);
        let state = match end {
            Some(RunState::Done) => "done",
            Some(RunState::Stopped) => "stopped",
            Some(RunState::Failed) => "failed",
            None => phase.name(),
        };
        let entries = ranks.iter().zip(&self.ranks).zip(0..).map(|((seen, history), rank)| RankEntry {
            rank,
            host: &self.host,
            pid: seen.process.map(|(pid, _)| pid),
            started: seen.process.map(|(_, started)| started),
            state: rank_state(seen, end.is_some(), lost == Some(rank)),
            phase: seen.phase.name(),
            step: seen.step,
            op: seen.last.as_ref().map(|op| format!("{}#{}", op.name, op.index)),
            heartbeat_age: seen.process.map(|_| history.moved.elapsed().as_secs_f64()),
            pss_bytes: history.pss,
            gpu_bytes: self
                .gpus
                .as_ref()
                .and_then(|gpus| gpus.used((rank as usize).checked_rem(self.facts.gpus.len())?)),
        });
        let status = RunStatus {
            version: VERSION,
            time: now(),
            period: PERIOD.as_secs_f64(),
            state,
            step: self.step(),
            steps: self.facts.steps,
            model: &self.facts.model,
            device: self.facts.device,
            host: &self.host,
            machine,
            pid: std::process::id(),
            ranks: entries.collect(),
            plan: if is_short { &Value::Null } else { &self.facts.plan },
        };
        serde_json::to_vec(&status).unwrap_or_default()
    }
}

/// The state of a rank. After the end only the one that was lost is dead: the others ended because of it.
fn rank_state(seen: &RankObservation, is_end: bool, is_lost: bool) -> &'static str {
    match seen.state {
        _ if is_lost => "dead",
        _ if is_end => "ended",
        ProcessState::Absent => "starting",
        _ if seen.left => "ended",
        ProcessState::Running => "running",
        ProcessState::Stopped => "stopped",
        ProcessState::Ended => "dead",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeroth_comm::alone;

    fn facts() -> RunFacts {
        RunFacts {
            ranks: 1,
            steps: 10,
            resumed_after: Some(2),
            model: "tiny".to_owned(),
            device: "cpu",
            plan: serde_json::json!({"device": {"total": 7}}),
            gpus: Vec::new(),
        }
    }

    fn free() -> WriteGate {
        Box::new(|write| write())
    }

    fn json(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn the_end_is_written_with_the_last_state_of_the_ranks() {
        let folder = tempfile::tempdir().unwrap();
        let writer = StatusWriter::start(folder.path(), facts(), free());
        let control = alone();
        control.publish_progress(RankPhase::Training, Some(5));
        writer.observe(control.observer());
        writer.finish(RunState::Done);
        let status = json(&folder.path().join("status.json"));
        assert_eq!((&status["state"], &status["step"]), (&"done".into(), &5.into()));
        assert_eq!(status["ranks"][0]["pid"], std::process::id());
        assert_eq!(status["ranks"][0]["state"], "ended");
        assert_eq!(status["plan"]["device"]["total"], 7);
        let events = fs::read_to_string(folder.path().join("events.jsonl")).unwrap();
        let names: Vec<Value> = events
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone())
            .collect();
        assert_eq!(names, ["start", "resume", "end"]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary stays");
    }

    #[test]
    fn a_lost_rank_is_dead_and_a_dropped_writer_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let writer = StatusWriter::start(folder.path(), facts(), free());
        writer.observe(alone().observer());
        writer.rank_lost(0, "killed by signal 9".to_owned());
        drop(writer);
        let status = json(&folder.path().join("status.json"));
        assert_eq!((&status["state"], &status["ranks"][0]["state"]), (&"failed".into(), &"dead".into()));
    }

    #[test]
    fn files_of_others_stay_and_a_missing_folder_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("status.json");
        fs::write(&theirs, "{\"mine\": 1}").unwrap();
        StatusWriter::start(folder.path(), facts(), free()).finish(RunState::Stopped);
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "{\"mine\": 1}");
        StatusWriter::start(&folder.path().join("absent"), facts(), free()).finish(RunState::Stopped);
        assert!(!folder.path().join("absent").exists());
    }
}
