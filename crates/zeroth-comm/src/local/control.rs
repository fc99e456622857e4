//! The control plane in words of the segment: whether the first step has begun, what the launcher asks for, and what ranks
//! publish about themselves. In a job on several hosts the first step is decided by the coordinator, and requests reach all
//! ranks through it: ranks and launchers leave wishes in words that the host's leader reads.
//!
//! No signal is used: cluster managers send theirs to every process of a job, and a rank could not tell who asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::peer_monitor::PeerMonitor;
use super::rank_slot::{FREE, LEFT};
use super::segment::SharedSegment;
use super::wait::COUNTED;
use crate::comm::{JobControl, RankObservation, RankObserver};
use crate::join_options::Timing;
use crate::process::{Process, ProcessState};
use crate::progress::RankPhase;

/// The first step is not decided.
pub(crate) const OPEN: u32 = 0;
/// It has begun.
pub(crate) const BEGUN: u32 = 1;
/// The job was stopped before it.
pub(crate) const STOPPED: u32 = 2;

/// Polling interval while the coordinator decides on the first step.
const LOOK: Duration = Duration::from_millis(5);
/// How long a launcher waits for that decision: it may be the one that ends a host whose leader is gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// A rank's end of the control plane.
pub(crate) struct LocalControl {
    pub(crate) segment: Arc<SharedSegment>,
    /// Its slot.
    pub(crate) rank: usize,
    pub(crate) timing: Timing,
}

impl JobControl for LocalControl {
    fn begin_first_step(&self) -> bool {
        self.decide_first_step(BEGUN)
    }

    fn stop_before_first_step(&self) -> bool {
        self.decide_first_step(STOPPED)
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

impl LocalControl {
    fn decide_first_step(&self, wanted: u32) -> bool {
        let hosts = &self.segment.header().hosts;
        if !hosts.is_one_of_several() {
            return decide(&self.segment, wanted);
        }
        hosts.wish(wanted);
        let mut monitor = PeerMonitor::new(self.rank, self.segment.layout.world, self.timing);
        monitor.begin(&self.segment);
        let mut last = Instant::now();
        loop {
            if let Some(decided) = decided(&self.segment) {
                return decided == wanted;
            }
            // The next collective reports it.
            if self.segment.ended().is_some() {
                return wanted == BEGUN;
            }
            std::thread::sleep(LOOK);
            let now = Instant::now();
            if let Err((slot, reason)) = monitor.look(&self.segment, 0, (now - last).min(COUNTED)) {
                self.segment.end(slot, reason);
            }
            last = now;
        }
    }
}

/// As [`JobControl::stop_before_first_step`], for a launcher, which holds the segment and is no rank.
pub(super) fn stop_before_first_step(segment: &SharedSegment) -> bool {
    let hosts = &segment.header().hosts;
    if !hosts.is_one_of_several() {
        return decide(segment, STOPPED);
    }
    hosts.wish(STOPPED);
    let began = Instant::now();
    while segment.ended().is_none() && began.elapsed() < PATIENCE {
        if let Some(decided) = decided(segment) {
            return decided == STOPPED;
        }
        std::thread::sleep(LOOK);
    }
    false
}

/// What was decided on the first step.
fn decided(segment: &SharedSegment) -> Option<u32> {
    // Relaxed: no other memory is published through this word.
    Some(segment.header().first_step.load(Ordering::Relaxed)).filter(|word| *word != OPEN)
}

/// Decides on the first step: once, where all ranks see this segment, or where the coordinator keeps the decision.
pub(crate) fn decide(segment: &SharedSegment, wanted: u32) -> bool {
    let word = &segment.header().first_step;
    match word.compare_exchange(OPEN, wanted, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => true,
        Err(decided) => decided == wanted,
    }
}

/// Asks all ranks of the job to stop.
pub(crate) fn request_stop(segment: &SharedSegment) {
    let header = segment.header();
    let asked = header.hosts.is_one_of_several();
    let word = if asked { &header.hosts.asked_stop } else { &header.stop_requested };
    // Relaxed, here and below: nothing else is published through these words.
    word.store(1, Ordering::Relaxed);
}

/// Asks the ranks of the job for a save.
pub(crate) fn request_save(segment: &SharedSegment) {
    let header = segment.header();
    let asked = header.hosts.is_one_of_several();
    let word = if asked { &header.hosts.asked_saves } else { &header.save_requests };
    word.fetch_add(1, Ordering::Relaxed);
}

/// Observes the ranks whose slots are in a segment.
pub(crate) struct LocalObserver(pub(crate) Arc<SharedSegment>);

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
            host: None,
            resident: None,
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
