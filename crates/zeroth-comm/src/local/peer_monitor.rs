//! Monitoring of peers during a wait: dead, stopped, never joined, or only slow.

use std::time::Duration;

use super::rank_slot::{FREE, JOINED};
use super::segment::SharedSegment;
use super::wait::SLICE;
use crate::error::LostReason;
use crate::join_options::{Silence, SlowRank, Timing};
use crate::op_name::OpName;
use crate::process::Process;

struct Peer {
    heartbeat: u64,
    silent: Duration,
    /// Whether its silence has been noted.
    noted: bool,
    /// Set once it has joined.
    process: Option<Process>,
}

/// What a look at the peers found, where none is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Observed {
    Nothing,
    /// The awaited rank lives, and a warning is due.
    Slow,
    /// A rank has been silent for this number of seconds.
    Silent {
        rank: usize,
        seconds: u64,
    },
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
        let peers = (0..world)
            .map(|_| Peer { heartbeat: 0, silent: Duration::ZERO, noted: false, process: None })
            .collect();
        let zero = Duration::ZERO;
        Self { rank, timing, peers, waited: zero, unlooked: zero, unlooked_all: zero }
    }

    /// Starts a wait: silence is counted from here, since peers were not observed before.
    pub(crate) fn begin(&mut self, segment: &SharedSegment) {
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            peer.heartbeat = segment.slot(rank).heartbeat();
            (peer.silent, peer.noted) = (Duration::ZERO, false);
        }
        self.waited = Duration::ZERO;
        self.unlooked = Duration::ZERO;
        self.unlooked_all = Duration::ZERO;
    }

    /// Accounts for `watched` more of waiting for `awaited`. Returns the lost rank, or what there is to warn of.
    pub(crate) fn look(
        &mut self,
        segment: &SharedSegment,
        awaited: usize,
        watched: Duration,
    ) -> Result<Observed, (usize, LostReason)> {
        self.unlooked += watched;
        if self.unlooked < SLICE {
            return Ok(Observed::Nothing);
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
        if let Some(silent) = self.newly_silent(segment) {
            return Ok(silent);
        }
        let times = |waited: Duration| waited.as_nanos() / self.timing.slow.as_nanos().max(1);
        Ok(if times(before) == times(self.waited) { Observed::Nothing } else { Observed::Slow })
    }

    /// A rank whose silence is to be noted, once, and by one of the others.
    fn newly_silent(&mut self, segment: &SharedSegment) -> Option<Observed> {
        let (own, limit) = (self.rank, self.timing.silent);
        let is_due = |(rank, peer): &(usize, &mut Peer)| {
            let is_noted_here = own == usize::from(*rank == 0);
            *rank != own && is_noted_here && !peer.noted && peer.silent >= limit
        };
        let (rank, peer) = self
            .peers
            .iter_mut()
            .enumerate()
            .filter(|(rank, _)| segment.slot(*rank).state() == JOINED)
            .find(is_due)?;
        peer.noted = true;
        Some(Observed::Silent { rank, seconds: peer.silent.as_secs() })
    }

    /// The warning of what was observed during a wait for `awaited`, if there is one.
    pub(crate) fn warning(
        &self,
        segment: &SharedSegment,
        awaited: usize,
        observed: Observed,
        waiting_in: OpName,
    ) -> Option<SlowRank> {
        let (rank, seconds, silence) = match observed {
            Observed::Nothing => return None,
            Observed::Slow => (awaited, self.waited.as_secs(), None),
            Observed::Silent { rank, seconds } => {
                let (pid, limit) = (segment.slot(rank).process().0, self.timing.lost.as_secs());
                (rank, seconds, Some(Silence { pid, limit }))
            }
        };
        let last = segment.slot(rank).last_op();
        Some(SlowRank { rank: segment.rank_of(rank), silence, last, waiting_in, seconds })
    }

    fn judge(
        &mut self,
        segment: &SharedSegment,
        rank: usize,
        time: Duration,
        ask: bool,
    ) -> Option<LostReason> {
        let (slot, peer, timing) = (segment.slot(rank), &mut self.peers[rank], &self.timing);
        let heartbeat = slot.heartbeat();
        if heartbeat == peer.heartbeat {
            peer.silent += time;
        } else {
            peer.heartbeat = heartbeat;
            (peer.silent, peer.noted) = (Duration::ZERO, false);
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
    use super::super::segment::{JobToken, SegmentLayout};
    use super::*;

    fn segment() -> SharedSegment {
        SharedSegment::create(SegmentLayout::new(3, 0).unwrap(), JobToken::random().unwrap()).unwrap().1
    }

    fn watch(segment: &SharedSegment) -> PeerMonitor {
        let mut watch = PeerMonitor::new(0, 3, Timing::default());
        watch.begin(segment);
        watch
    }

    fn join(segment: &SharedSegment, rank: usize) {
        let (pid, started) = Process::own().unwrap();
        segment.slot(rank).take(pid, started).unwrap();
    }

    /// Seconds until a verdict, in slices, while `each` runs before every look.
    fn verdict(
        watch: &mut PeerMonitor,
        segment: &SharedSegment,
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
    fn a_silent_heart_is_a_stopped_rank_after_thirty_seconds_and_a_beating_one_never() {
        let segment = segment();
        (1..3).for_each(|rank| join(&segment, rank));
        let mut watch = watch(&segment);
        let beats = || (1..3).for_each(|rank| segment.slot(rank).beat());
        assert_eq!(verdict(&mut watch, &segment, 100, beats), None);
        // Rank 2 falls silent; rank 1, which is waited for, does not.
        let found = verdict(&mut watch, &segment, 100, || segment.slot(1).beat());
        assert_eq!(found, Some((30.0, (2, LostReason::Stopped { seconds: 30 }))));
    }

    #[test]
    fn silence_is_noted_once_after_three_seconds_and_again_only_after_a_beat() {
        let segment = segment();
        (1..3).for_each(|rank| join(&segment, rank));
        let mut watch = watch(&segment);
        let mut noted = Vec::new();
        for slice in 0..20 * 20 {
            segment.slot(1).beat();
            if slice == 10 * 20 {
                segment.slot(2).beat();
            }
            let observed = watch.look(&segment, 1, SLICE).unwrap();
            if let Some(warning) = watch.warning(&segment, 1, observed, OpName::new(4, "gather", 1)) {
                noted.push((slice / 20, warning));
            }
        }
        let [(2, warning), (13, _)] = noted.as_slice() else { panic!("{noted:?}") };
        let pid = std::process::id();
        let words = format!("waits for rank 2 (pid {pid}), which has not responded for 3 s");
        assert!(warning.to_string().contains(&words), "{warning}");
        assert!(warning.to_string().contains("After 30 s the run ends without a save"), "{warning}");
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
            if watch.look(&segment, 1, SLICE).unwrap() == Observed::Slow {
                warned.push(watch.waited.as_secs());
            }
        }
        assert_eq!(warned, [30, 60, 90]);
    }
}
