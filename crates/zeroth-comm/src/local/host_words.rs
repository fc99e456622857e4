//! What a segment knows of other hosts: where its own host stands among them, what its ranks ask of the coordinator, and the
//! verdict on a rank of another host.
//!
//! Only the thread of the host's leader that holds the control connection writes the place and the verdict. Zeroed bytes are
//! valid: the host has all ranks of the job.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::error::{LostReason, RankLost};
use crate::op_name::LastOp;
use crate::place::MOST_NAME;

/// Bytes of an operation's name that are kept.
const OP_BYTES: usize = 40;

/// A text in words.
#[repr(C)]
struct TextWords<const WORDS: usize> {
    length: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> TextWords<WORDS> {
    /// Relaxed: ordered by what the caller stores afterwards.
    fn set(&self, text: &str) {
        let kept = text.floor_char_boundary(8 * WORDS);
        for (word, bytes) in self.words.iter().zip(text.as_bytes()[..kept].chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
        self.length.store(kept as u32, Ordering::Relaxed);
    }

    fn get(&self) -> String {
        let bytes: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        let length = (self.length.load(Ordering::Relaxed) as usize).min(bytes.len());
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }
}

/// A lost rank of another host.
#[repr(C)]
struct LostElsewhere {
    rank: AtomicU32,
    pid: AtomicU32,
    reason: AtomicU32,
    detail: AtomicU32,
    /// 0: it had not been in a collective; 1: after this one; 2: inside.
    position: AtomicU32,
    index: AtomicU32,
    step: AtomicU64,
    op: TextWords<{ OP_BYTES / 8 }>,
    host: TextWords<{ MOST_NAME.div_ceil(8) }>,
}

/// The part of a segment's header that concerns other hosts.
#[repr(C)]
pub(crate) struct HostWords {
    /// Ranks of the job on all hosts; 0 where this host has them all.
    world: AtomicU32,
    first: AtomicU32,
    /// What ranks of this host wish of the first step: bits by decision.
    wishes: AtomicU32,
    /// What the launcher of this host asks: to stop, and how often to save.
    pub(crate) asked_stop: AtomicU32,
    pub(crate) asked_saves: AtomicU32,
    name: TextWords<{ MOST_NAME.div_ceil(8) }>,
    elsewhere: LostElsewhere,
}

impl HostWords {
    /// Says that the host is one of several, and where its ranks begin.
    pub(crate) fn set(&self, first: usize, world: usize, name: &str) {
        self.name.set(name);
        self.first.store(first as u32, Ordering::Relaxed);
        // Release: whoever sees the world sees the name and the first rank.
        self.world.store(world as u32, Ordering::Release);
    }

    /// Whether the job has ranks on other hosts.
    pub(crate) fn is_one_of_several(&self) -> bool {
        self.world.load(Ordering::Acquire) != 0
    }

    /// The rank of the segment's first slot.
    pub(crate) fn first(&self) -> usize {
        if self.is_one_of_several() { self.first.load(Ordering::Relaxed) as usize } else { 0 }
    }

    /// The host's name in the job.
    pub(crate) fn name(&self) -> Option<String> {
        self.is_one_of_several().then(|| self.name.get())
    }

    /// Asks the coordinator for a decision on the first step.
    pub(crate) fn wish(&self, decision: u32) {
        self.wishes.fetch_or(1 << decision, Ordering::Relaxed);
    }

    /// Whether a rank of this host has wished for a decision.
    pub(crate) fn is_wished(&self, decision: u32) -> bool {
        self.wishes.load(Ordering::Relaxed) & 1 << decision != 0
    }

    /// Writes the verdict. The caller ends the segment afterwards, with release.
    pub(crate) fn set_elsewhere(&self, lost: &RankLost) {
        let words = &self.elsewhere;
        let (reason, detail) = lost.reason.to_numbers();
        words.rank.store(lost.rank as u32, Ordering::Relaxed);
        words.pid.store(lost.pid, Ordering::Relaxed);
        words.reason.store(u32::from(reason), Ordering::Relaxed);
        words.detail.store(detail, Ordering::Relaxed);
        words.host.set(&lost.host);
        let position = lost.last.as_ref().map_or(0, |last| 1 + u32::from(last.inside));
        words.position.store(position, Ordering::Relaxed);
        if let Some(last) = &lost.last {
            words.index.store(last.index, Ordering::Relaxed);
            words.step.store(last.step, Ordering::Relaxed);
            words.op.set(&last.name);
        }
    }

    /// The verdict; only once the segment has ended by it.
    pub(crate) fn elsewhere(&self) -> RankLost {
        let words = &self.elsewhere;
        let number = |word: &AtomicU32| word.load(Ordering::Relaxed);
        let last = (number(&words.position) != 0).then(|| LastOp {
            step: words.step.load(Ordering::Relaxed),
            name: words.op.get(),
            index: number(&words.index),
            inside: number(&words.position) == 2,
        });
        let reason = LostReason::of_numbers(number(&words.reason) as u8, number(&words.detail));
        RankLost {
            rank: number(&words.rank) as usize,
            host: words.host.get(),
            pid: number(&words.pid),
            reason: reason.unwrap_or(LostReason::Dead),
            last,
            by: None,
            waiting_in: None,
        }
    }
}
