//! Monitoring of peers during a wait: dead, stopped, never joined, or only slow.

use std::time::Duration;

use crate::error::LostReason;
use crate::heartbeat::Process;
use crate::op_name::LastOp;
use crate::op_name::OpName;
use crate::rank_slot::{FREE, JOINED};
use crate::segment::Segment;
use crate::wait::SLICE;

/// Timeouts. Tests shorten the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// The heartbeat interval.
    pub heartbeat: Duration,
    /// A rank whose heartbeat has not moved for this long is stopped.
    pub lost: Duration,
    /// The interval of warnings during a long wait.
    pub slow: Duration,
    /// The time for a rank to join.
    pub join: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(250),
            lost: Duration::from_secs(5),
            slow: Duration::from_secs(30),
            join: Duration::from_mins(1),
        }
    }
}

/// A warning: a live rank has been waited for long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlowRank {
    /// The rank being waited for.
    pub rank: usize,
    /// Its current or last collective; `None` before its first.
    pub last: Option<LastOp>,
    /// The waiting collective.
    pub waiting_in: OpName,
    /// The time waited.
    pub seconds: u64,
}

impl std::fmt::Display for SlowRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} has waited {} s for rank {}", self.waiting_in, self.seconds, self.rank)?;
        match &self.last {
            Some(last) => write!(f, ", which lives and is {last}"),
            None => write!(f, ", which has not been in a collective yet"),
        }
    }
}

struct Peer {
    heartbeat: u64,
    silent: Duration,
    /// Set once it has joined.
    process: Option<Process>,
}

/// One rank's observations of its peers.
pub(crate) struct PeerMonitor {
    rank: usize,
    timing: Timing,
    peers: Vec<Peer>,
    waited: Duration,
    /// Time since the last check, and since the last check of processes other than the awaited one.
    unlooked: Duration,
    unlooked_all: Duration,
}

impl PeerMonitor {
    pub(crate) fn new(rank: usize, world: usize, timing: Timing) -> Self {
        let peers =
            (0..world).map(|_| Peer { heartbeat: 0, silent: Duration::ZERO, process: None }).collect();
        let zero = Duration::ZERO;
        Self { rank, timing, peers, waited: zero, unlooked: zero, unlooked_all: zero }
    }

    /// Starts a wait: silence is counted from here, since peers were not observed before.
    pub(crate) fn begin(&mut self, segment: &Segment) {
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            peer.heartbeat = segment.slot(rank).heartbeat();
            peer.silent = Duration::ZERO;
        }
        self.waited = Duration::ZERO;
        self.unlooked = Duration::ZERO;
        self.unlooked_all = Duration::ZERO;
    }

    /// Accounts for `watched` more of waiting for `awaited`. Returns the lost rank, or whether a warning is due.
    pub(crate) fn look(
        &mut self,
        segment: &Segment,
        awaited: usize,
        watched: Duration,
    ) -> Result<bool, (usize, LostReason)> {
        self.unlooked += watched;
        if self.unlooked < SLICE {
            return Ok(false);
        }
        let time = std::mem::take(&mut self.unlooked);
        self.unlooked_all += time;
        // Processes are read from /proc: with many ranks, those not awaited are checked at the heartbeat interval.
        let all = self.unlooked_all >= self.timing.heartbeat;
        if all {
            self.unlooked_all = Duration::ZERO;
        }
        let own = self.rank;
        for rank in (0..self.peers.len()).filter(|rank| *rank != own) {
            if let Some(lost) = self.judge(segment, rank, time, all || rank == awaited) {
                return Err((rank, lost));
            }
        }
        let before = self.waited;
        self.waited += time;
        let times = |waited: Duration| waited.as_nanos() / self.timing.slow.as_nanos().max(1);
        Ok(times(before) != times(self.waited))
    }

    /// Seconds waited so far.
    pub(crate) fn seconds(&self) -> u64 {
        self.waited.as_secs()
    }

    fn judge(&mut self, segment: &Segment, rank: usize, time: Duration, ask: bool) -> Option<LostReason> {
        let (slot, peer, timing) = (segment.slot(rank), &mut self.peers[rank], &self.timing);
        let heartbeat = slot.heartbeat();
        if heartbeat == peer.heartbeat {
            peer.silent += time;
        } else {
            peer.heartbeat = heartbeat;
            peer.silent = Duration::ZERO;
        }
        let seconds = peer.silent.as_secs() as u32;
        match slot.state() {
            FREE => (peer.silent >= timing.join).then_some(LostReason::NeverJoined { seconds }),
            JOINED => {
                let process = peer.process.get_or_insert_with(|| {
                    let (pid, started) = slot.process();
                    Process::new(pid, started)
                });
                if ask && !process.alive() {
                    // It may have left and ended since its state was read.
                    return (slot.state() == JOINED).then_some(LostReason::Dead);
                }
                (peer.silent >= timing.lost).then_some(LostReason::Stopped { seconds })
            }
            // A rank that left is only missed by one that waits for it: see `shm_channel.rs`.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::{SegmentLayout, Token};

    fn segment() -> Segment {
        Segment::create(SegmentLayout::new(3, 0).unwrap(), Token::random().unwrap()).unwrap().1
    }

    fn watch(segment: &Segment) -> PeerMonitor {
        let mut watch = PeerMonitor::new(0, 3, Timing::default());
        watch.begin(segment);
        watch
    }

    fn join(segment: &Segment, rank: usize) {
        let (pid, started) = Process::own().unwrap();
        segment.slot(rank).take(pid, started).unwrap();
    }

    /// Seconds until a verdict, in slices, while `each` runs before every look.
    fn verdict(
        watch: &mut PeerMonitor,
        segment: &Segment,
        limit: u64,
        mut each: impl FnMut(),
    ) -> Option<(f64, (usize, LostReason))> {
        for slices in 1..=limit * 20 {
            each();
            if let Err(lost) = watch.look(segment, 1, SLICE) {
                return Some((slices as f64 / 20.0, lost));
            }
        }
        None
    }

    #[test]
    fn a_silent_heart_is_a_stopped_rank_after_five_seconds_and_a_beating_one_never() {
        let segment = segment();
        (1..3).for_each(|rank| join(&segment, rank));
        let mut watch = watch(&segment);
        let beats = || (1..3).for_each(|rank| segment.slot(rank).beat());
        assert_eq!(verdict(&mut watch, &segment, 100, beats), None);
        // Rank 2 falls silent; rank 1, which is waited for, does not.
        let found = verdict(&mut watch, &segment, 100, || segment.slot(1).beat());
        assert_eq!(found, Some((5.0, (2, LostReason::Stopped { seconds: 5 }))));
    }

    #[test]
    fn a_rank_whose_process_is_gone_is_dead_at_the_first_look() {
        let segment = segment();
        join(&segment, 1);
        let (pid, started) = Process::own().unwrap();
        segment.slot(2).take(pid, started + 1).unwrap();
        let found = verdict(&mut watch(&segment), &segment, 10, || segment.slot(1).beat());
        assert_eq!(
            found,
            Some((0.25, (2, LostReason::Dead))),
            "not waited for: asked with the heartbeat's period"
        );
        segment.slot(2).leave();
        assert_eq!(verdict(&mut watch(&segment), &segment, 10, || segment.slot(1).beat()), None);
    }

    #[test]
    fn a_rank_that_never_came_is_named_after_a_minute() {
        let segment = segment();
        join(&segment, 1);
        let found = verdict(&mut watch(&segment), &segment, 100, || segment.slot(1).beat());
        assert_eq!(found, Some((60.0, (2, LostReason::NeverJoined { seconds: 60 }))));
    }

    #[test]
    fn a_long_wait_for_a_living_rank_warns_every_thirty_seconds() {
        let segment = segment();
        (1..3).for_each(|rank| join(&segment, rank));
        let mut watch = watch(&segment);
        let mut warned = Vec::new();
        for _ in 0..20 * 95 {
            (1..3).for_each(|rank| segment.slot(rank).beat());
            if watch.look(&segment, 1, SLICE).unwrap() {
                warned.push(watch.seconds());
            }
        }
        assert_eq!(warned, [30, 60, 90]);
    }
}
