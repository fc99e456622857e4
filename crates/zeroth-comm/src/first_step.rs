//! Whether a job may still be stopped without leaving a trace: one word of the segment, decided once for all ranks.
//!
//! Either a rank begins the first step or the launcher stops the job, whichever comes first. So no rank runs a step
//! that its launcher believes never began, and no signal is lost in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::segment::Segment;

const OPEN: u32 = 0;
const BEGUN: u32 = 1;
const STOPPED: u32 = 2;

/// A rank's handle to that word.
#[derive(Clone)]
pub struct FirstStep(pub(crate) Arc<Segment>);

impl FirstStep {
    /// Begins the first step. False if the job was stopped before: then no step may run.
    pub fn begin(&self) -> bool {
        decide(&self.0.header().first_step, BEGUN)
    }

    /// Stops the job. False if a rank has begun the first step: then there is something to save.
    pub fn stop(&self) -> bool {
        stop(&self.0)
    }
}

/// As [`FirstStep::stop`], for holders of the segment.
pub(crate) fn stop(segment: &Segment) -> bool {
    decide(&segment.header().first_step, STOPPED)
}

fn decide(word: &AtomicU32, wanted: u32) -> bool {
    // Relaxed: no other memory is published through this word.
    match word.compare_exchange(OPEN, wanted, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => true,
        Err(decided) => decided == wanted,
    }
}

#[cfg(test)]
mod tests {
    use crate::local::{Job, Options};

    #[test]
    fn a_job_is_stopped_or_begun_and_never_both() {
        let job = Job::create(2, 0).unwrap();
        let [first, second] = [0, 1].map(|rank| job.join(rank, &Options::default()).unwrap().first_step());
        assert!(first.begin() && second.begin() && first.begin());
        assert!(!second.stop() && !job.stop_before_first_step());

        let job = Job::create(1, 0).unwrap();
        let only = job.join(0, &Options::default()).unwrap().first_step();
        assert!(job.stop_before_first_step() && only.stop());
        assert!(!only.begin());
    }
}
