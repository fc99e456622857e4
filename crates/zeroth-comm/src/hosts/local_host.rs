//! The ranks of one host, as the thread that holds its control connection sees them through their segment.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::message::RankBeat;
use crate::comm::RankObserver;
use crate::error::RankLost;
use crate::join_options::Timing;
use crate::local::{
    BEGUN, COUNTED, EndedBy, LocalObserver, OPEN, PeerMonitor, STOPPED, SharedSegment, decide,
};

/// How often memory is read: the kernel locks a process's address space for it.
const MEMORY: Duration = Duration::from_secs(2);

/// The ranks of this host.
pub(super) struct LocalHost {
    segment: Arc<SharedSegment>,
    observer: LocalObserver,
    monitor: PeerMonitor,
    is_reported: bool,
    /// Whether a wish to begin, and one to stop, was passed on.
    wished: [bool; 2],
    /// What the launcher has asked, as passed on.
    asked: (bool, u32),
    resident: Vec<Option<u64>>,
    /// When memory was read.
    read: Option<Instant>,
}

impl LocalHost {
    /// The slot of this process's rank is 0: it is the leader.
    pub(super) fn new(segment: Arc<SharedSegment>, timing: Timing) -> Self {
        let ranks = segment.layout.world;
        let mut monitor = PeerMonitor::new(0, ranks, timing);
        monitor.begin(&segment);
        Self {
            observer: LocalObserver(Arc::clone(&segment)),
            segment,
            monitor,
            is_reported: false,
            wished: [false; 2],
            asked: (false, 0),
            resident: vec![None; ranks],
            read: None,
        }
    }

    /// Judges the ranks of this host. Returns the one that has ended the job, once.
    pub(super) fn watch(&mut self, watched: Duration) -> Option<RankLost> {
        if self.segment.ended().is_none()
            && let Err((slot, reason)) = self.monitor.look(&self.segment, 0, watched.min(COUNTED))
        {
            self.segment.end(slot, reason);
        }
        let ended = self.segment.ended().filter(|_| !self.is_reported)?;
        self.is_reported = true;
        matches!(ended, EndedBy::Slot(..)).then(|| self.segment.describe(ended))
    }

    /// What a rank of this host newly wishes of the first step: to stop before it, or to begin.
    pub(super) fn wish(&mut self) -> Option<bool> {
        let hosts = &self.segment.header().hosts;
        let new = [BEGUN, STOPPED]
            .iter()
            .zip(&self.wished)
            .position(|(wish, old)| !old && hosts.is_wished(*wish))?;
        self.wished[new] = true;
        Some(new == 1)
    }

    /// What the launcher of this host asks since the last look: to stop, and for how many saves.
    pub(super) fn asked(&mut self) -> Option<(bool, u32)> {
        let hosts = &self.segment.header().hosts;
        let stop = hosts.asked_stop.load(Ordering::Relaxed) != 0;
        let saves = hosts.asked_saves.load(Ordering::Relaxed);
        let before = std::mem::replace(&mut self.asked, (stop, saves));
        (before != self.asked).then(|| (stop, saves.wrapping_sub(before.1)))
    }

    /// Decides on the first step, where this host's word is the job's. Returns the decision.
    pub(super) fn decide(&self, stop: bool) -> u32 {
        decide(&self.segment, if stop { STOPPED } else { BEGUN });
        self.segment.header().first_step.load(Ordering::Relaxed)
    }

    /// Publishes the decision on the first step, and what all ranks are asked for.
    pub(super) fn apply(&self, first_step: u32, stop: bool, saves: u32) {
        if first_step != OPEN {
            decide(&self.segment, first_step);
        }
        let header = self.segment.header();
        header.stop_requested.store(u32::from(stop), Ordering::Relaxed);
        header.save_requests.store(saves, Ordering::Relaxed);
    }

    /// Ends the job on this host because a rank is lost, wherever it is.
    pub(super) fn end(&mut self, lost: &RankLost) {
        let first = self.segment.rank_of(0);
        match lost.rank.checked_sub(first).filter(|slot| *slot < self.segment.layout.world) {
            Some(slot) => {
                self.segment.end(slot, lost.reason);
            }
            None => self.segment.end_elsewhere(lost),
        }
        self.is_reported = true;
    }

    /// The heartbeats of the ranks.
    pub(super) fn beats(&mut self, now: Instant) -> Vec<RankBeat> {
        let reads = self.read.is_none_or(|read| now.duration_since(read) >= MEMORY);
        if reads {
            self.read = Some(now);
        }
        let first = self.segment.rank_of(0);
        let beat = |(slot, resident): (usize, &mut Option<u64>)| {
            let mut seen = self.observer.look(slot);
            if let (true, Some((pid, _))) = (reads, seen.process) {
                *resident = resident_bytes(pid).or(*resident);
            }
            seen.resident = *resident;
            RankBeat { rank: (first + slot) as u32, seen }
        };
        self.resident.iter_mut().enumerate().map(beat).collect()
    }
}

/// Resident bytes of a process of this host.
fn resident_bytes(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kilobytes = text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix(" kB"))?;
    Some(1024 * kilobytes.trim().parse::<u64>().ok()?)
}
