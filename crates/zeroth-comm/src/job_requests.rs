//! What a launcher asks of its ranks: two words of the segment, which ranks poll between steps.
//!
//! No signal is used: cluster managers send theirs to every process of a job, and a rank could not tell who asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::segment::Segment;

/// The requests to the ranks of a job. It outlives a rank's membership.
#[derive(Clone)]
pub struct JobRequests(pub(crate) Arc<Segment>);

impl JobRequests {
    /// Asks all ranks to stop.
    pub fn stop(&self) {
        self.stop_word().store(1, Ordering::Relaxed);
    }

    /// Whether they were asked to.
    pub fn is_stop_requested(&self) -> bool {
        // Relaxed, here and below: nothing else is published through these words.
        self.stop_word().load(Ordering::Relaxed) != 0
    }

    /// Asks for a save.
    pub fn save(&self) {
        self.save_word().fetch_add(1, Ordering::Relaxed);
    }

    /// How often a save was asked for, modulo 2³².
    pub fn saves(&self) -> u32 {
        self.save_word().load(Ordering::Relaxed)
    }

    fn stop_word(&self) -> &AtomicU32 {
        &self.0.header().stop_requested
    }

    fn save_word(&self) -> &AtomicU32 {
        &self.0.header().save_requests
    }
}

#[cfg(test)]
mod tests {
    use crate::local::{Job, Options};

    #[test]
    fn every_rank_sees_what_the_launcher_asks_for() {
        let job = Job::create(2, 0).unwrap();
        let ranks = [0, 1].map(|rank| job.join(rank, &Options::default()).unwrap().requests());
        for rank in &ranks {
            assert!(!rank.is_stop_requested() && rank.saves() == 0);
        }
        job.requests().save();
        job.requests().save();
        job.requests().stop();
        for rank in &ranks {
            assert!(rank.is_stop_requested() && rank.saves() == 2);
        }
    }
}
