//! Reads what ranks publish about themselves, from any thread or process that maps the job's segment. Ranks do nothing
//! for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::heartbeat::Process;
use crate::op_name::LastOp;
use crate::progress::{Phase, ProgressCell, ProgressPlace, ProgressWords};
use crate::rank_slot::{FREE, LEFT};
use crate::segment::Segment;

/// The process of a rank, by /proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It has not joined.
    Absent,
    /// It runs or sleeps.
    Running,
    /// It is stopped: SIGSTOP, or a debugger.
    Stopped,
    /// It has ended.
    Ended,
}

/// What is known about a rank at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankObservation {
    /// Process id and its start time in clock ticks since boot, once it has joined.
    pub process: Option<(u32, u64)>,
    /// The state of that process.
    pub state: ProcessState,
    /// Whether it has left the job.
    pub left: bool,
    /// A counter that moves while it lives.
    pub heartbeat: u64,
    /// Its phase.
    pub phase: Phase,
    /// Its last completed step.
    pub step: u64,
    /// Its current or last collective.
    pub last: Option<LastOp>,
}

/// Observes the ranks of a job, or the only rank of a process.
pub struct RankObserver(Source);

enum Source {
    Job(Arc<Segment>),
    Own { words: Arc<ProgressWords>, process: Option<(u32, u64)>, looks: AtomicU64 },
}

impl RankObserver {
    pub(crate) fn of(segment: Arc<Segment>) -> Self {
        Self(Source::Job(segment))
    }

    /// A rank that runs in this process without a job: where it publishes, and its observer.
    pub fn own() -> (ProgressCell, Self) {
        let words = Arc::new(ProgressWords::default());
        let cell = ProgressCell(ProgressPlace::Own(Arc::clone(&words)));
        let process = Process::own().ok();
        (cell, Self(Source::Own { words, process, looks: AtomicU64::new(0) }))
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        match &self.0 {
            Source::Job(segment) => segment.layout.world,
            Source::Own { .. } => 1,
        }
    }

    /// Looks at a rank; `rank` is below [`Self::world`].
    pub fn look(&self, rank: usize) -> RankObservation {
        match &self.0 {
            Source::Job(segment) => {
                let slot = segment.slot(rank);
                let state = slot.state();
                let process = (state != FREE).then(|| slot.process());
                let (phase, step) = slot.progress().get();
                RankObservation {
                    process,
                    state: process
                        .map_or(ProcessState::Absent, |(pid, started)| Process::new(pid, started).state()),
                    left: state == LEFT,
                    heartbeat: slot.heartbeat(),
                    phase,
                    step,
                    last: slot.last_op(),
                }
            }
            // The observer runs in the same process: it is alive.
            Source::Own { words, process, looks } => {
                let (phase, step) = words.get();
                let heartbeat = looks.fetch_add(1, Ordering::Relaxed) + 1;
                let state = ProcessState::Running;
                RankObservation { process: *process, state, left: false, heartbeat, phase, step, last: None }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpName;
    use crate::comm::{Comm, Handle};
    use crate::local::{Job, Options};

    #[test]
    fn a_rank_is_observed_from_joining_to_leaving() {
        let job = Job::create(1, 0).unwrap();
        let observer = job.observer();
        assert_eq!(observer.look(0).state, ProcessState::Absent);
        let comm = job.join(0, &Options::default()).unwrap();
        comm.progress().set(Phase::Training, Some(7));
        comm.all_gather(OpName::new(7, "gather", 3), &[1], &mut [0], &[1]).and_then(Handle::wait).unwrap();
        let seen = observer.look(0);
        assert_eq!((seen.state, seen.phase, seen.step), (ProcessState::Running, Phase::Training, 7));
        assert_eq!(seen.process.unwrap().0, std::process::id());
        assert_eq!(seen.last.unwrap().name, "gather");
        comm.progress().set(Phase::Saving, None);
        assert_eq!((observer.look(0).phase, observer.look(0).step), (Phase::Saving, 7));
        drop(comm);
        assert!(observer.look(0).left);
    }

    #[test]
    fn a_rank_without_a_job_is_alive_and_its_counter_moves() {
        let (cell, observer) = RankObserver::own();
        cell.set(Phase::Evaluating, Some(2));
        let (one, two) = (observer.look(0), observer.look(0));
        assert_eq!((one.phase, one.step, one.state), (Phase::Evaluating, 2, ProcessState::Running));
        assert!(two.heartbeat > one.heartbeat);
    }
}
