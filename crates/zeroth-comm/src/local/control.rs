//! The control plane in words of the segment: whether the first step has begun, what the launcher asks for, and what ranks
//! publish about themselves.
//!
//! No signal is used: cluster managers send theirs to every process of a job, and a rank could not tell who asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::rank_slot::{FREE, LEFT};
use super::segment::SharedSegment;
use crate::comm::{JobControl, RankObservation, RankObserver};
use crate::process::{Process, ProcessState};
use crate::progress::RankPhase;

const OPEN: u32 = 0;
const BEGUN: u32 = 1;
const STOPPED: u32 = 2;

/// A rank's end of the control plane.
pub(super) struct LocalControl {
    pub(super) segment: Arc<SharedSegment>,
    pub(super) rank: usize,
}

impl JobControl for LocalControl {
    fn begin_first_step(&self) -> bool {
        decide_first_step(&self.segment, BEGUN)
    }

    fn stop_before_first_step(&self) -> bool {
        stop_before_first_step(&self.segment)
    }

    fn is_stop_requested(&self) -> bool {
        // Relaxed, here and below: nothing else is published through these words.
        self.segment.header().stop_requested.load(Ordering::Relaxed) != 0
    }

    fn save_requests(&self) -> u32 {
        self.segment.header().save_requests.load(Ordering::Relaxed)
    }

    fn publish_progress(&self, phase: RankPhase, step: Option<u64>) {
        self.segment.slot(self.rank).progress().set(phase, step);
    }

    fn observer(&self) -> Box<dyn RankObserver> {
        Box::new(LocalObserver(Arc::clone(&self.segment)))
    }
}

/// As [`JobControl::stop_before_first_step`], for holders of the segment.
pub(super) fn stop_before_first_step(segment: &SharedSegment) -> bool {
    decide_first_step(segment, STOPPED)
}

fn decide_first_step(segment: &SharedSegment, wanted: u32) -> bool {
    let word = &segment.header().first_step;
    // Relaxed: no other memory is published through this word.
    match word.compare_exchange(OPEN, wanted, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => true,
        Err(decided) => decided == wanted,
    }
}

/// Observes the ranks whose slots are in a segment.
pub(super) struct LocalObserver(pub(super) Arc<SharedSegment>);

impl RankObserver for LocalObserver {
    fn world(&self) -> usize {
        self.0.layout.world
    }

    fn look(&self, rank: usize) -> RankObservation {
        let slot = self.0.slot(rank);
        let state = slot.state();
        let process = (state != FREE).then(|| slot.process());
        let (phase, step) = slot.progress().get();
        RankObservation {
            process,
            state: process.map_or(ProcessState::Absent, |(pid, started)| Process::new(pid, started).state()),
            left: state == LEFT,
            heartbeat: slot.heartbeat(),
            phase,
            step,
            last: slot.last_op(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Handle;
    use crate::local::LocalJob;
    use crate::{JoinOptions, OpName};

    #[test]
    fn a_job_is_stopped_or_begun_and_never_both() {
        let job = LocalJob::create(2, 0).unwrap();
        let [first, second] = [0, 1].map(|rank| job.join(rank, &JoinOptions::default()).unwrap().control());
        assert!(first.begin_first_step() && second.begin_first_step() && first.begin_first_step());
        assert!(!second.stop_before_first_step() && !job.stop_before_first_step());

        let job = LocalJob::create(1, 0).unwrap();
        let only = job.join(0, &JoinOptions::default()).unwrap().control();
        assert!(job.stop_before_first_step() && only.stop_before_first_step());
        assert!(!only.begin_first_step());
    }

    #[test]
    fn every_rank_sees_what_the_launcher_asks_for() {
        let job = LocalJob::create(2, 0).unwrap();
        let ranks = [0, 1].map(|rank| job.join(rank, &JoinOptions::default()).unwrap().control());
        for rank in &ranks {
            assert!(!rank.is_stop_requested() && rank.save_requests() == 0);
        }
        job.request_save();
        job.request_save();
        job.request_stop();
        for rank in &ranks {
            assert!(rank.is_stop_requested() && rank.save_requests() == 2);
        }
    }

    #[test]
    fn a_rank_is_observed_from_joining_to_leaving() {
        let job = LocalJob::create(1, 0).unwrap();
        let observer = job.observer();
        assert_eq!(observer.look(0).state, ProcessState::Absent);
        let comm = job.join(0, &JoinOptions::default()).unwrap();
        comm.control().publish_progress(RankPhase::Training, Some(7));
        comm.all_gather(OpName::new(7, "gather", 3), &[1], &mut [0], &[1]).and_then(Handle::wait).unwrap();
        let seen = observer.look(0);
        assert_eq!((seen.state, seen.phase, seen.step), (ProcessState::Running, RankPhase::Training, 7));
        assert_eq!(seen.process.unwrap().0, std::process::id());
        assert_eq!(seen.last.unwrap().name, "gather");
        comm.control().publish_progress(RankPhase::Saving, None);
        assert_eq!((observer.look(0).phase, observer.look(0).step), (RankPhase::Saving, 7));
        drop(comm);
        assert!(observer.look(0).left);
    }
}
