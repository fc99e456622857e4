//! The shared-memory channel: pieces move through the ranks' regions in rounds, without data races.
//!
//! All ranks of a lane count the same rounds, from 0 and across collectives. In round `n` a rank may **publish** into half `n mod
//! 2` of its own region, **receive** from that half of its peers' regions, and then **consume** the round:
//!
//! - `published[r]` is the number of rounds that r has published. r stores `n + 1` with release after the bytes of
//!   round n are in its half. A peer reads them only after it has seen `published[r] ≥ n + 1` with acquire. So the
//!   bytes are written before they are read.
//! - `consumed[r]` is the number of rounds that r has read. r stores `n + 1` with release after its last read of
//!   round n. A rank writes round n into its half, over round n − 2, only after it has seen `consumed[p] ≥ n − 1`
//!   with acquire for every peer p. So the bytes of round n − 2 have been read by all before they are overwritten.
//! - A rank publishes round n only after it has consumed round n − 1 itself. So no counters of two ranks are more than
//!   two rounds apart, and 32 bits are enough to compare them.
//!
//! Each word has one writer and only grows; there is no lock that a dead rank could hold. A rank that stops at any
//! point stops the others at a wait, and every wait monitors its peers.
#![allow(unsafe_code, reason = "calls the copies of `segment.rs` when it is this rank's turn")]

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::lane::Lane;
use super::peer_monitor::PeerMonitor;
use super::rank_slot::{LEFT, RankSlot, Rounds};
use super::segment::SharedSegment;
use super::wait;
use crate::error::{CommError, LostReason};
use crate::join_options::OnSlow;
use crate::op_name::OpName;

/// One rank's end of the channel of a lane. There is one per slot and lane, because a slot is taken once.
pub(crate) struct ShmChannel {
    segment: Arc<SharedSegment>,
    /// This rank's slot.
    rank: usize,
    lane: Lane,
    spins: u32,
    published: Cell<u64>,
    consumed: Cell<u64>,
    watch: RefCell<PeerMonitor>,
    on_slow: Option<Arc<OnSlow>>,
}

impl ShmChannel {
    pub(crate) fn new(
        segment: Arc<SharedSegment>,
        rank: usize,
        lane: Lane,
        spins: u32,
        watch: PeerMonitor,
        on_slow: Option<Arc<OnSlow>>,
    ) -> Self {
        let (published, consumed) = (Cell::new(0), Cell::new(0));
        Self { segment, rank, lane, spins, published, consumed, watch: RefCell::new(watch), on_slow }
    }

    pub(crate) fn slot(&self) -> &RankSlot {
        self.segment.slot(self.rank)
    }

    /// Whether the current round is published.
    pub(crate) fn has_published(&self) -> bool {
        self.published.get() > self.consumed.get()
    }

    /// Whether `publish` would return without waiting.
    pub(crate) fn may_publish(&self) -> bool {
        let free = self.needed_of_peers();
        !self.has_published()
            && self.peers().all(|peer| {
                // Relaxed: `publish` repeats the load with acquire.
                wait::reached(self.rounds(peer).consumed.0.load(Ordering::Relaxed), free)
            })
    }

    /// Publishes the pieces of the current round, each with its offset in the half.
    pub(crate) fn publish<'b>(
        &self,
        op: OpName,
        signature: u64,
        pieces: impl Iterator<Item = (usize, &'b [u8])>,
    ) -> Result<(), CommError> {
        assert!(!self.has_published(), "a round is published once");
        let free = self.needed_of_peers();
        for peer in self.peers() {
            self.wait(&self.rounds(peer).consumed.0, free, peer, op)?;
        }
        let round = self.published.get();
        let parity = (round % 2) as usize;
        for (offset, bytes) in pieces {
            // SAFETY: it is our half, and only this rank writes to it. Every peer has consumed round n − 2, which lay
            // there, and reads round n only after the store below.
            unsafe { self.segment.write([self.lane.number, self.rank, parity], offset, bytes) };
        }
        let words = &self.rounds(self.rank).published.0;
        // Relaxed: ordered by the release store that follows.
        words.signatures[parity].store(signature, Ordering::Relaxed);
        self.published.set(round + 1);
        // Release: a reader that sees the round sees its bytes and its signature.
        words.rounds.store((round + 1) as u32, Ordering::Release);
        wait::wake(&words.rounds);
        Ok(())
    }

    /// Waits for the current round of the rank `from` of the lane and copies a piece of it, with non-temporal stores where `past` is set.
    pub(crate) fn receive(
        &self,
        op: OpName,
        signature: u64,
        from: usize,
        offset: usize,
        into: &mut [u8],
        past: bool,
    ) -> Result<(), CommError> {
        let from = self.lane.slot(from);
        let words = &self.rounds(from).published.0;
        let round = self.consumed.get();
        self.wait(&words.rounds, (round + 1) as u32, from, op)?;
        let parity = (round % 2) as usize;
        // Relaxed: written before the release store that the wait above has seen.
        if words.signatures[parity].load(Ordering::Relaxed) != signature {
            return Err(self.end(from, LostReason::Differs { from: self.rank }, op));
        }
        // SAFETY: the wait has seen that round n of `from` is written. It writes this half again for round n + 2
        // only after our `consumed` is n + 1, which it becomes in `consume`, after this copy.
        unsafe { self.segment.read([self.lane.number, from, parity], offset, into, past) };
        Ok(())
    }

    /// Ends the current round: nothing more will be read of it.
    pub(crate) fn consume(&self) {
        assert!(self.has_published(), "a round is published before it is consumed");
        let done = self.consumed.get() + 1;
        self.consumed.set(done);
        let word = &self.rounds(self.rank).consumed.0;
        // Release: a peer that sees the round consumed may overwrite it; our reads come before.
        word.store(done as u32, Ordering::Release);
        wait::wake(word);
    }

    /// Waits until every peer has consumed everything that this rank has published.
    pub(crate) fn settle(&self, op: OpName) -> Result<(), CommError> {
        let all = self.published.get() as u32;
        self.peers().try_for_each(|peer| self.wait(&self.rounds(peer).consumed.0, all, peer, op))
    }

    /// The error that ended the job, if one did.
    pub(crate) fn alive(&self, op: OpName) -> Result<(), CommError> {
        match self.segment.ended() {
            None => Ok(()),
            Some(ended) => Err(self.segment.lost_on(self.rank, op, ended)),
        }
    }

    /// Ends the job for all ranks.
    pub(crate) fn end(&self, rank: usize, reason: LostReason, op: OpName) -> CommError {
        let ended = self.segment.end(rank, reason);
        self.segment.lost_on(self.rank, op, ended)
    }

    /// Leaves the job: what this rank has published stays readable.
    pub(crate) fn leave(&self) {
        self.slot().leave();
        self.segment.wake_all();
    }

    /// The slots of the other ranks of the lane.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> {
        self.lane.slots().filter(|peer| *peer != self.rank)
    }

    /// The round counters of a slot.
    fn rounds(&self, slot: usize) -> &Rounds {
        &self.segment.slot(slot).rounds[self.lane.number]
    }

    /// Rounds that every peer must have consumed before the next publish.
    fn needed_of_peers(&self) -> u32 {
        self.published.get().saturating_sub(1) as u32
    }

    fn wait(&self, word: &AtomicU32, target: u32, awaited: usize, op: OpName) -> Result<(), CommError> {
        let mut begun = false;
        wait::until(word, target, self.spins, |watched| {
            self.alive(op)?;
            let slot = self.segment.slot(awaited);
            // Acquire in `state`: a rank that is seen to have left is seen with its last counters.
            if slot.state() == LEFT && !wait::reached(word.load(Ordering::Acquire), target) {
                return Err(self.end(awaited, LostReason::Left, op));
            }
            let mut watch = self.watch.borrow_mut();
            if !begun {
                watch.begin(&self.segment);
                begun = true;
            }
            match watch.look(&self.segment, awaited, watched) {
                Err((rank, reason)) => return Err(self.end(rank, reason, op)),
                Ok(observed) => {
                    if let (Some(warning), Some(on_slow)) =
                        (watch.warning(&self.segment, awaited, observed, op), &self.on_slow)
                    {
                        on_slow(&warning);
                    }
                }
            }
            Ok(())
        })
    }
}
