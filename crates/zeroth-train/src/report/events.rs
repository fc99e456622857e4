//! events.jsonl: what happened to a run, one line each. For people who watch it; training never depends on it.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde::Serialize;

use super::append_file::AppendFile;
use super::status::RunState;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs, reason = "names say what they are")]
pub enum RunEvent {
    /// The run started.
    Start {
        /// Number of ranks.
        ranks: u64,
        /// Steps it will do.
        steps: u64,
        /// Host of the launcher.
        host: String,
        /// Its process id.
        pid: u32,
    },
    /// It continues after these steps: resumed, or restarted after a rank died.
    Resume {
        /// Completed steps.
        step: u64,
    },
    /// A checkpoint was committed.
    Save {
        step: u64,
        /// How long training was stalled by it.
        stalled_ms: f64,
    },
    /// An evaluation was completed.
    Eval {
        /// Completed steps.
        step: u64,
        /// The loss; `null` if it is not finite.
        eval_loss: f64,
    },
    /// The update of a step was skipped.
    Skip { step: u64 },
    /// A timeline of a step was written.
    Trace {
        step: u64,
        /// The file, relative to the run folder.
        file: String,
    },
    /// A rank was lost.
    RankLost {
        rank: u64,
        /// How it ended, and where.
        reason: String,
    },
    /// The run ended.
    End {
        state: RunState,
        /// Completed steps.
        step: u64,
    },
}

#[derive(Serialize)]
struct EventLine<'a> {
    time: f64,
    #[serde(flatten)]
    event: &'a RunEvent,
}

/// An open events.jsonl. Several processes may append to it.
#[derive(Debug)]
pub struct EventLog(Option<AppendFile>);

impl EventLog {
    /// Opens the file to append, or creates it. One that cannot be opened takes no events.
    pub fn open(path: &Path) -> Self {
        // Not blocking: somebody's FIFO of that name must not hold up the run.
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
        let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        Self(file.ok().map(|file| AppendFile::new(path, file)))
    }

    /// Appends an event in one write. Best effort: on a full disk it is tried again with the next one.
    pub fn append(&mut self, event: &RunEvent) {
        let Some(file) = &mut self.0 else { return };
        let Ok(mut line) = serde_json::to_vec(&EventLine { time: now(), event }) else { return };
        line.push(b'\n');
        file.append(&line);
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_lines_with_time_and_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        EventLog::open(&path).append(&RunEvent::Eval { step: 3, eval_loss: f64::NAN });
        EventLog::open(&path).append(&RunEvent::End { state: RunState::Done, step: 4 });
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["event"], &lines[0]["step"]), (&"eval".into(), &3.into()));
        assert!(lines[0]["eval_loss"].is_null() && lines[0]["time"].as_f64().unwrap() > 1e9);
        assert_eq!((&lines[1]["event"], &lines[1]["state"]), (&"end".into(), &"done".into()));
    }

    #[test]
    fn a_path_that_takes_no_file_takes_no_events() {
        let folder = tempfile::tempdir().unwrap();
        EventLog::open(folder.path()).append(&RunEvent::Skip { step: 1 });
        EventLog::open(&folder.path().join("absent/events.jsonl")).append(&RunEvent::Skip { step: 1 });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
