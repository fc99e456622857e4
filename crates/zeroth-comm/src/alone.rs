//! The control plane of a rank without a job: nobody asks it for anything, and it is observed in its own process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::comm::{JobControl, RankObservation, RankObserver};
use crate::process::{Process, ProcessState};
use crate::progress::{ProgressWords, RankPhase};

/// The control plane of a rank that is alone, in this process.
pub fn alone() -> Box<dyn JobControl> {
    let process = Process::own().ok();
    Box::new(Alone(Arc::new(OwnRank {
        progress: ProgressWords::default(),
        process,
        looks: AtomicU64::new(0),
    })))
}

#[derive(Clone)]
struct Alone(Arc<OwnRank>);

struct OwnRank {
    progress: ProgressWords,
    process: Option<(u32, u64)>,
    looks: AtomicU64,
}

impl JobControl for Alone {
    fn begin_first_step(&self) -> bool {
        true
    }

    fn stop_before_first_step(&self) -> bool {
        false
    }

    fn is_stop_requested(&self) -> bool {
        false
    }

    fn save_requests(&self) -> u32 {
        0
    }

    fn publish_progress(&self, phase: RankPhase, step: Option<u64>) {
        self.0.progress.set(phase, step);
    }

    fn observer(&self) -> Box<dyn RankObserver> {
        Box::new(self.clone())
    }
}

impl RankObserver for Alone {
    fn world(&self) -> usize {
        1
    }

    fn look(&self, _: usize) -> RankObservation {
        let (phase, step) = self.0.progress.get();
        // The observer runs in the same process: it is alive.
        let heartbeat = self.0.looks.fetch_add(1, Ordering::Relaxed) + 1;
        let state = ProcessState::Running;
        let process = self.0.process;
        let (last, host, resident) = (None, None, None);
        RankObservation { process, state, left: false, heartbeat, phase, step, last, host, resident }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_without_a_job_is_alive_and_its_counter_moves() {
        let control = alone();
        let observer = control.observer();
        control.publish_progress(RankPhase::Evaluating, Some(2));
        let (one, two) = (observer.look(0), observer.look(0));
        assert_eq!((one.phase, one.step, one.state), (RankPhase::Evaluating, 2, ProcessState::Running));
        assert!(two.heartbeat > one.heartbeat);
    }
}
