//! Judging peers while waiting for one of them: dead, stopped, never come, or only slow.

use std::time::Duration;

use crate::comm::OpName;
use crate::error::{Lost, OpSeen};
use crate::heartbeat::Process;
use crate::segment::Segment;
use crate::slot::{FREE, JOINED};
use crate::wait::SLICE;

/// How long things may take. The defaults are the product's; tests shorten them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// From one heartbeat to the next.
    pub heartbeat: Duration,
    /// A heartbeat that has not moved for this long is a stopped rank.
    pub lost: Duration,
    /// A wait of this length is a warning, and again after each such time.
    pub slow: Duration,
    /// A rank that has not joined after this long never will.
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

/// A warning: a rank with a living heartbeat is waited for, and has been for long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slow {
    /// The rank that is waited for.
    pub rank: usize,
    /// The collective it is in or was last in; `None` before its first.
    pub last: Option<OpSeen>,
    /// The collective that waits.
    pub waiting_in: OpName,
    /// For how long.
    pub seconds: u64,
}

impl std::fmt::Display for Slow {
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
    /// Known once it has joined.
    process: Option<Process>,
}

/// What one rank knows of the others.
pub(crate) struct Watch {
    rank: usize,
    timing: Timing,
    peers: Vec<Peer>,
    waited: Duration,
    /// Watched since the last look, and since the last look at processes other than the one waited for.
    unlooked: Duration,
    unlooked_all: Duration,
}

impl Watch {
    pub(crate) fn new(rank: usize, world: usize, timing: Timing) -> Self {
        let peers =
            (0..world).map(|_| Peer { heartbeat: 0, silent: Duration::ZERO, process: None }).collect();
        let zero = Duration::ZERO;
        Self { rank, timing, peers, waited: zero, unlooked: zero, unlooked_all: zero }
    }

    /// A wait begins: silence is counted from here, because nobody was watched before.
    pub(crate) fn begin(&mut self, segment: &Segment) {
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            peer.heartbeat = segment.slot(rank).heartbeat();
            peer.silent = Duration::ZERO;
        }
        self.waited = Duration::ZERO;
        self.unlooked = Duration::ZERO;
        self.unlooked_all = Duration::ZERO;
    }

    /// `watched` more of waiting for `awaited` has passed. The rank that is lost, or whether it is time to warn.
    pub(crate) fn look(
        &mut self,
        segment: &Segment,
        awaited: usize,
        watched: Duration,
    ) -> Result<bool, (usize, Lost)> {
        self.unlooked += watched;
        if self.unlooked < SLICE {
            return Ok(false);
        }
        let time = std::mem::take(&mut self.unlooked);
        self.unlooked_all += time;
        // Processes are read from /proc: with many ranks the others are asked as often as their hearts beat.
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

    fn judge(&mut self, segment: &Segment, rank: usize, time: Duration, ask: bool) -> Option<Lost> {
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
            FREE => (peer.silent >= timing.join).then_some(Lost::NeverJoined { seconds }),
            JOINED => {
                let process = peer.process.get_or_insert_with(|| {
                    let (pid, started) = slot.process();
                    Process::new(pid, started)
                });
                if ask && !process.alive() {
                    // It may have left and ended since its state was read.
                    return (slot.state() == JOINED).then_some(Lost::Dead);
                }
                (peer.silent >= timing.lost).then_some(Lost::Stopped { seconds })
            }
            // Whoever left in order owes nothing, except to a rank that waits for it: see `lanes.rs`.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::{Layout, Token};

    fn segment() -> Segment {
        Segment::create(Layout::new(3, 0).unwrap(), Token::random().unwrap()).unwrap().1
    }

    fn watch(segment: &Segment) -> Watch {
        let mut watch = Watch::new(0, 3, Timing::default());
        watch.begin(segment);
        watch
    }

    fn join(segment: &Segment, rank: usize) {
        let (pid, started) = Process::own().unwrap();
        segment.slot(rank).take(pid, started).unwrap();
    }

    /// Seconds until a verdict, in slices, while `each` runs before every look.
    fn verdict(
        watch: &mut Watch,
        segment: &Segment,
        limit: u64,
        mut each: impl FnMut(),
    ) -> Option<(f64, (usize, Lost))> {
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
        assert_eq!(found, Some((5.0, (2, Lost::Stopped { seconds: 5 }))));
    }

    #[test]
    fn a_rank_whose_process_is_gone_is_dead_at_the_first_look() {
        let segment = segment();
        join(&segment, 1);
        let (pid, started) = Process::own().unwrap();
        segment.slot(2).take(pid, started + 1).unwrap();
        let found = verdict(&mut watch(&segment), &segment, 10, || segment.slot(1).beat());
        assert_eq!(found, Some((0.25, (2, Lost::Dead))), "not waited for: asked with the heartbeat's period");
        segment.slot(2).leave();
        assert_eq!(verdict(&mut watch(&segment), &segment, 10, || segment.slot(1).beat()), None);
    }

    #[test]
    fn a_rank_that_never_came_is_named_after_a_minute() {
        let segment = segment();
        join(&segment, 1);
        let found = verdict(&mut watch(&segment), &segment, 100, || segment.slot(1).beat());
        assert_eq!(found, Some((60.0, (2, Lost::NeverJoined { seconds: 60 }))));
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
