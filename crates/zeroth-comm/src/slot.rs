//! A rank's slot in the control pages: who it is, whether it lives, where it is, how far its rounds are.
//!
//! All of it is atomics, so that any rank may look at any time, and all-zero bytes are a valid empty slot. Only the
//! rank that took the slot writes to it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::comm::OpName;
use crate::error::OpSeen;

/// Nobody has come yet.
pub(crate) const FREE: u32 = 0;
/// Taken, and not yet filled in.
const JOINING: u32 = 1;
/// At work.
pub(crate) const JOINED: u32 = 2;
/// Left in order.
pub(crate) const LEFT: u32 = 3;

const NAME_WORDS: usize = 5;
const NAME_BYTES: usize = 8 * NAME_WORDS;

/// One cache line, so that a waiting rank does not slow the writer of the neighbouring field.
#[repr(C, align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// What a rank has published: see `lanes.rs`.
#[repr(C)]
pub(crate) struct Published {
    /// Rounds published, modulo 2³². A futex.
    pub(crate) rounds: AtomicU32,
    /// The collective of the round in each half, written before `rounds`.
    pub(crate) signatures: [AtomicU64; 2],
}

#[repr(C)]
pub(crate) struct Life {
    state: AtomicU32,
    pid: AtomicU32,
    /// Clock ticks since boot at which the process started: a pid used again is not the same process.
    started: AtomicU64,
    heartbeat: AtomicU64,
}

/// Where a rank is: a sequence lock with one writer.
#[repr(C)]
struct Place {
    /// Odd while being written; 0 before the first op.
    sequence: AtomicU32,
    inside: AtomicU32,
    step: AtomicU64,
    index: AtomicU32,
    name: [AtomicU64; NAME_WORDS],
}

/// A rank's part of the control pages.
#[repr(C)]
pub(crate) struct Slot {
    pub(crate) published: Line<Published>,
    /// Rounds this rank has finished reading, modulo 2³². A futex.
    pub(crate) consumed: Line<AtomicU32>,
    life: Line<Life>,
    place: Line<Place>,
}

impl Slot {
    /// Takes the slot for a process. `Err` is the pid of whoever has it.
    pub(crate) fn take(&self, pid: u32, started: u64) -> Result<(), u32> {
        let life = &self.life.0;
        // Relaxed: the exchange alone decides who has the slot; nothing is read through it.
        if life.state.compare_exchange(FREE, JOINING, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Err(life.pid.load(Ordering::Relaxed));
        }
        life.pid.store(pid, Ordering::Relaxed);
        life.started.store(started, Ordering::Relaxed);
        // Release: whoever sees JOINED (acquire) sees pid and start.
        life.state.store(JOINED, Ordering::Release);
        Ok(())
    }

    /// Leaves in order. Release: whoever sees LEFT sees every round this rank has published and consumed.
    pub(crate) fn leave(&self) {
        self.life.0.state.store(LEFT, Ordering::Release);
    }

    /// FREE (also while joining), JOINED or LEFT. Acquire: pairs with `take` and `leave`.
    pub(crate) fn state(&self) -> u32 {
        match self.life.0.state.load(Ordering::Acquire) {
            JOINING => FREE,
            state => state,
        }
    }

    /// Pid and start of the process; meaningful once `state` is not FREE.
    pub(crate) fn process(&self) -> (u32, u64) {
        let life = &self.life.0;
        (life.pid.load(Ordering::Relaxed), life.started.load(Ordering::Relaxed))
    }

    /// One beat. Relaxed: only that the number moves has a meaning.
    pub(crate) fn beat(&self) {
        self.life.0.heartbeat.fetch_add(1, Ordering::Relaxed);
    }

    /// Beats so far.
    pub(crate) fn heartbeat(&self) -> u64 {
        self.life.0.heartbeat.load(Ordering::Relaxed)
    }

    /// Tells the others which collective this rank is in.
    pub(crate) fn enter(&self, op: OpName) {
        let place = &self.place.0;
        let before = place.sequence.load(Ordering::Relaxed);
        place.sequence.store(before.wrapping_add(1), Ordering::Relaxed);
        // Release fence: a reader that sees one of the fields below also sees the odd number above.
        fence(Ordering::Release);
        place.inside.store(1, Ordering::Relaxed);
        place.step.store(op.step, Ordering::Relaxed);
        place.index.store(op.index, Ordering::Relaxed);
        let mut bytes = [0; NAME_BYTES];
        let kept = op.name.floor_char_boundary(NAME_BYTES);
        bytes[..kept].copy_from_slice(&op.name.as_bytes()[..kept]);
        for (word, bytes) in place.name.iter().zip(bytes.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        // Release: a reader that sees the even number sees the fields.
        place.sequence.store(before.wrapping_add(2), Ordering::Release);
    }

    /// The collective is done. Relaxed: for messages only, and on its own.
    pub(crate) fn exit(&self) {
        self.place.0.inside.store(0, Ordering::Relaxed);
    }

    /// Where the rank is, or was last.
    pub(crate) fn place(&self) -> Option<OpSeen> {
        // A rank that died while writing leaves an odd number for ever: after some looks, take what is there.
        for _ in 0..100 {
            let (seen, whole) = self.look()?;
            if whole {
                return Some(seen);
            }
            std::hint::spin_loop();
        }
        self.look().map(|(seen, _)| seen)
    }

    /// One look, and whether nothing was written meanwhile.
    fn look(&self) -> Option<(OpSeen, bool)> {
        let place = &self.place.0;
        // Acquire: with an even number the fields below are at least those it was written for.
        let before = place.sequence.load(Ordering::Acquire);
        if before == 0 {
            return None;
        }
        let mut bytes = [0; NAME_BYTES];
        for (word, bytes) in place.name.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        let used = bytes.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        let seen = OpSeen {
            step: place.step.load(Ordering::Relaxed),
            name: String::from_utf8_lossy(&bytes[..used]).into_owned(),
            index: place.index.load(Ordering::Relaxed),
            inside: place.inside.load(Ordering::Relaxed) == 1,
        };
        // Acquire fence: if a field was a later op's, the load below sees that op's odd number or a later one.
        fence(Ordering::Acquire);
        Some((seen, before.is_multiple_of(2) && place.sequence.load(Ordering::Relaxed) == before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Slot {
        Slot {
            published: Line(Published {
                rounds: AtomicU32::new(0),
                signatures: [const { AtomicU64::new(0) }; 2],
            }),
            consumed: Line(AtomicU32::new(0)),
            life: Line(Life {
                state: AtomicU32::new(0),
                pid: AtomicU32::new(0),
                started: AtomicU64::new(0),
                heartbeat: AtomicU64::new(0),
            }),
            place: Line(Place {
                sequence: AtomicU32::new(0),
                inside: AtomicU32::new(0),
                step: AtomicU64::new(0),
                index: AtomicU32::new(0),
                name: [const { AtomicU64::new(0) }; NAME_WORDS],
            }),
        }
    }

    #[test]
    fn a_slot_is_taken_once_and_says_by_whom() {
        let slot = empty();
        assert_eq!(slot.state(), FREE);
        assert_eq!(slot.take(77, 123), Ok(()));
        assert_eq!((slot.state(), slot.process()), (JOINED, (77, 123)));
        assert_eq!(slot.take(78, 124), Err(77));
        slot.leave();
        assert_eq!(slot.take(78, 124), Err(77), "a rank that left does not come back");
    }

    #[test]
    fn a_place_is_what_was_entered_last_with_its_name_cut_at_a_character() {
        let slot = empty();
        assert_eq!(slot.place(), None);
        slot.enter(OpName::new(3, "gather", 9));
        let seen = OpSeen { step: 3, name: "gather".to_owned(), index: 9, inside: true };
        assert_eq!(slot.place(), Some(seen.clone()));
        slot.exit();
        assert_eq!(slot.place(), Some(OpSeen { inside: false, ..seen }));
        // 39 bytes, then a character of two: 40 would cut it in half.
        slot.enter(OpName::new(4, "abcdefghijklmnopqrstuvwxyzabcdefghijklmé", 1));
        assert_eq!(slot.place().unwrap().name, "abcdefghijklmnopqrstuvwxyzabcdefghijklm");
    }

    #[test]
    fn a_writer_that_died_half_way_does_not_hold_a_reader() {
        let slot = empty();
        slot.enter(OpName::new(3, "gather", 9));
        slot.place.0.sequence.store(3, Ordering::Relaxed);
        assert_eq!(slot.place().unwrap().step, 3);
    }

    #[test]
    fn readers_never_see_half_of_one_op_and_half_of_another() {
        let slot = empty();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for step in 0..20_000_u32 {
                    let name = if step.is_multiple_of(2) { "even" } else { "odd, and a longer name" };
                    slot.enter(OpName::new(u64::from(step), name, step));
                }
            });
            while !writer.is_finished() {
                let Some((seen, true)) = slot.look() else { continue };
                assert_eq!(seen.step, u64::from(seen.index));
                assert_eq!(
                    seen.name,
                    if seen.index.is_multiple_of(2) { "even" } else { "odd, and a longer name" }
                );
            }
        });
    }
}
