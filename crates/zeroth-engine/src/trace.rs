//! Traces: the times of every instruction, as a Perfetto file and for statistics.

use std::time::Instant;

use serde::Serialize;
use zeroth_kernel::Queue;
use zeroth_program::{BufferId, Instruction, Operands};

/// The timeline of one rank.
#[derive(Debug)]
pub struct Trace {
    rank: u64,
    began: Instant,
    events: Vec<TraceEvent>,
    /// Events already returned by `take_times`.
    taken: usize,
    /// Events whose times are final.
    settled: usize,
}

#[derive(Debug, Clone)]
struct TraceEvent {
    section: usize,
    instruction: usize,
    queue: Queue,
    name: String,
    operands: Operands,
    from: f64,
    to: f64,
}

/// The duration of an instruction, by the device's clock where it has one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InstructionTime {
    /// The index of the section.
    pub section: usize,
    /// The index of the instruction in its section.
    pub instruction: usize,
    /// Seconds.
    pub seconds: f64,
}

/// A complete event of the Chrome trace format, which Perfetto reads.
#[derive(Serialize)]
struct Complete<'a> {
    name: &'a str,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    dur: f64,
    pid: u64,
    tid: usize,
    args: BufferNames,
}

/// The names of an instruction's operands, as in a dump.
#[derive(Serialize)]
struct BufferNames {
    reads: Vec<String>,
    writes: Vec<String>,
}

impl Trace {
    pub(super) fn new(rank: u64) -> Self {
        Self { rank, began: Instant::now(), events: Vec::new(), taken: 0, settled: 0 }
    }

    pub(super) fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e6
    }

    /// Records an instruction, given as (section, index), that ran from `from` to now.
    pub(super) fn add(&mut self, place: (usize, usize), instruction: &Instruction, name: String, from: f64) {
        let (section, at) = place;
        let (queue, operands, to) = (instruction.queue, instruction.operands.clone(), self.now());
        self.events.push(TraceEvent { section, instruction: at, queue, name, operands, from, to });
    }

    /// Replaces the host's times by the device's, a start and an end per instruction; empty where it has no clock.
    pub(super) fn settle(&mut self, stamps: &[f64]) {
        for (event, stamps) in self.events[self.settled..].iter_mut().zip(stamps.chunks_exact(2)) {
            (event.from, event.to) = (stamps[0], stamps[1]);
        }
        self.settled = self.events.len();
    }

    /// Returns the times since the last call, in execution order. Without `keep` the events are dropped, so that a long
    /// run takes no more memory than a short one; they are then missing from the timeline.
    pub fn take_times(&mut self, keep: bool) -> Vec<InstructionTime> {
        let time_of = |event: &TraceEvent| InstructionTime {
            section: event.section,
            instruction: event.instruction,
            seconds: (event.to - event.from) / 1e6,
        };
        let times = self.events[self.taken..].iter().map(time_of).collect();
        if !keep {
            self.events.truncate(self.taken);
            self.settled = self.taken;
        }
        self.taken = self.events.len();
        times
    }

    /// The number of events so far, from which [`Self::to_json_lines_from`] continues.
    pub fn position(&self) -> usize {
        self.events.len()
    }

    /// The events of one rank as JSON objects, one per line, without the enclosing brackets: the lines of all ranks
    /// join to a file `{"traceEvents": [...]}`.
    pub fn to_json_lines(&self) -> Result<String, serde_json::Error> {
        self.to_json_lines_from(0)
    }

    /// The same of the events from a position on.
    pub fn to_json_lines_from(&self, position: usize) -> Result<String, serde_json::Error> {
        let events = self.events.get(position..).unwrap_or_default();
        let mut lines = Vec::with_capacity(events.len() + 1 + Queue::ALL.len());
        let named = |what: &str, tid: usize, name: &str| serde_json::json!({"name": what, "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": name}});
        lines.push(serde_json::to_string(&named("process_name", 0, &format!("rank {}", self.rank)))?);
        for (tid, queue) in Queue::ALL.into_iter().enumerate() {
            lines.push(serde_json::to_string(&named("thread_name", tid, queue.name()))?);
        }
        for event in events {
            let tid = Queue::ALL.iter().position(|queue| *queue == event.queue).unwrap_or(0);
            let (ts, dur) = (event.from, event.to - event.from);
            let name = &event.name;
            let list = |ids: &[BufferId]| ids.iter().map(ToString::to_string).collect();
            let args =
                BufferNames { reads: list(&event.operands.reads), writes: list(&event.operands.writes) };
            lines.push(serde_json::to_string(&Complete {
                name,
                cat: event.queue.name(),
                ph: "X",
                ts,
                dur,
                pid: self.rank,
                tid,
                args,
            })?);
        }
        Ok(lines.join(",\n"))
    }
}
