//! `trace`: when every instruction ran, as a file that Perfetto shows.

use std::time::Instant;

use serde::Serialize;
use zeroth_device::Queue;

/// What one rank did when.
#[derive(Debug)]
pub struct Trace {
    rank: u64,
    began: Instant,
    events: Vec<Event>,
}

#[derive(Debug, Clone)]
struct Event {
    queue: Queue,
    name: String,
    from: f64,
    to: f64,
}

/// An event as Chrome's trace format has it: Perfetto reads it.
#[derive(Serialize)]
struct Complete<'a> {
    name: &'a str,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    dur: f64,
    pid: u64,
    tid: usize,
}

impl Trace {
    pub(super) fn new(rank: u64) -> Self {
        Self { rank, began: Instant::now(), events: Vec::new() }
    }

    pub(super) fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e6
    }

    pub(super) fn add(&mut self, queue: Queue, name: String, from: f64) {
        let to = self.now();
        self.events.push(Event { queue, name, from, to });
    }

    /// The events of one rank as JSON objects, one a line, without the brackets around them: ranks' lines join to a
    /// file `{"traceEvents": [...]}`.
    pub fn to_json_lines(&self) -> Result<String, serde_json::Error> {
        let mut lines = Vec::with_capacity(self.events.len() + 1 + Queue::ALL.len());
        let named = |what: &str, tid: usize, name: &str| serde_json::json!({"name": what, "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": name}});
        lines.push(serde_json::to_string(&named("process_name", 0, &format!("rank {}", self.rank)))?);
        for (tid, queue) in Queue::ALL.into_iter().enumerate() {
            lines.push(serde_json::to_string(&named("thread_name", tid, queue.name()))?);
        }
        for event in &self.events {
            let tid = Queue::ALL.iter().position(|queue| *queue == event.queue).unwrap_or(0);
            let (ts, dur) = (event.from, event.to - event.from);
            let name = &event.name;
            lines.push(serde_json::to_string(&Complete {
                name,
                cat: event.queue.name(),
                ph: "X",
                ts,
                dur,
                pid: self.rank,
                tid,
            })?);
        }
        Ok(lines.join(",\n"))
    }
}
