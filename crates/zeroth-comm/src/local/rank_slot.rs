//! A rank's slot in the control pages: its process, heartbeat, current collective and round counters.
//!
//! Everything is atomic, so that any rank may read it at any time, and zeroed bytes are a valid empty slot. Only the
//! rank that took the slot writes to it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::lane::Lane;
use crate::op_name::LastOp;
use crate::op_name::OpName;
use crate::progress::ProgressWords;

/// Not taken.
pub(crate) const FREE: u32 = 0;
/// Taken, but not yet initialised.
const JOINING: u32 = 1;
/// Joined.
pub(crate) const JOINED: u32 = 2;
/// Left the job.
pub(crate) const LEFT: u32 = 3;

const NAME_WORDS: usize = 5;
const NAME_BYTES: usize = 8 * NAME_WORDS;

/// Aligned to a cache line, to avoid false sharing.
#[repr(C, align(64))]
pub(crate) struct CacheLine<T>(pub(crate) T);

/// Published rounds: see `shm_channel.rs`.
#[repr(C)]
pub(crate) struct Published {
    /// Rounds published, modulo 2³². A futex.
    pub(crate) rounds: AtomicU32,
    /// The signature of the collective in each half, written before `rounds`.
    pub(crate) signatures: [AtomicU64; 2],
}

#[repr(C)]
pub(crate) struct Life {
    state: AtomicU32,
    pid: AtomicU32,
    /// The process's start time in clock ticks since boot, which distinguishes reused pids.
    started: AtomicU64,
    heartbeat: AtomicU64,
}

/// A rank's current collective: a seqlock with one writer.
#[repr(C)]
struct CurrentOp {
    /// Odd while being written; 0 before the first collective.
    sequence: AtomicU32,
    inside: AtomicU32,
    step: AtomicU64,
    index: AtomicU32,
    name: [AtomicU64; NAME_WORDS],
}

/// Progress of one rank's device, on pages of its own: where the device is, and what its host has enqueued.
#[repr(C, align(64))]
pub(crate) struct DeviceCounter {
    /// The last point that the device has reached; written by the device.
    pub(crate) arrived: AtomicU32,
    /// The last point that was enqueued; written by the host.
    pub(crate) enqueued: AtomicU32,
}

/// The round counters of a rank in a lane: see `shm_channel.rs`.
#[repr(C)]
pub(crate) struct Rounds {
    pub(crate) published: CacheLine<Published>,
    /// Rounds that this rank has consumed, modulo 2³². A futex.
    pub(crate) consumed: CacheLine<AtomicU32>,
}

/// A rank's part of the control pages.
#[repr(C)]
pub(crate) struct RankSlot {
    /// By lane.
    pub(crate) rounds: [Rounds; Lane::COUNT],
    life: CacheLine<Life>,
    place: CacheLine<CurrentOp>,
    progress: CacheLine<ProgressWords>,
}

impl RankSlot {
    /// Takes the slot for a process. `Err` holds the pid of its owner.
    pub(crate) fn take(&self, pid: u32, started: u64) -> Result<(), u32> {
        let life = &self.life.0;
        // Relaxed: the exchange alone decides the owner; nothing is read through it.
        if life.state.compare_exchange(FREE, JOINING, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Err(life.pid.load(Ordering::Relaxed));
        }
        life.pid.store(pid, Ordering::Relaxed);
        life.started.store(started, Ordering::Relaxed);
        // Release: a reader that sees JOINED (acquire) sees pid and start time.
        life.state.store(JOINED, Ordering::Release);
        Ok(())
    }

    /// Leaves the job. Release: a reader of LEFT sees every round this rank has published and consumed.
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

    /// Pid and start time of the process; valid once `state` is not FREE.
    pub(crate) fn process(&self) -> (u32, u64) {
        let life = &self.life.0;
        (life.pid.load(Ordering::Relaxed), life.started.load(Ordering::Relaxed))
    }

    /// Beats once. Relaxed: only the change of the counter matters.
    pub(crate) fn beat(&self) {
        self.life.0.heartbeat.fetch_add(1, Ordering::Relaxed);
    }

    /// The heartbeat counter.
    pub(crate) fn heartbeat(&self) -> u64 {
        self.life.0.heartbeat.load(Ordering::Relaxed)
    }

    /// The rank's phase and step.
    pub(crate) fn progress(&self) -> &ProgressWords {
        &self.progress.0
    }

    /// Publishes the collective that this rank enters.
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

    /// Marks the collective as done. Relaxed: used in messages only.
    pub(crate) fn exit(&self) {
        self.place.0.inside.store(0, Ordering::Relaxed);
    }

    /// The rank's current or last collective.
    pub(crate) fn last_op(&self) -> Option<LastOp> {
        // A rank that died while writing leaves an odd number forever: after some attempts, return what is there.
        for _ in 0..100 {
            let (seen, whole) = self.look()?;
            if whole {
                return Some(seen);
            }
            std::hint::spin_loop();
        }
        self.look().map(|(seen, _)| seen)
    }

    /// One read attempt, and whether it was consistent.
    fn look(&self) -> Option<(LastOp, bool)> {
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
        let seen = LastOp {
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

    fn empty() -> RankSlot {
        RankSlot {
            rounds: std::array::from_fn(|_| Rounds {
                published: CacheLine(Published {
                    rounds: AtomicU32::new(0),
                    signatures: [const { AtomicU64::new(0) }; 2],
                }),
                consumed: CacheLine(AtomicU32::new(0)),
            }),
            life: CacheLine(Life {
                state: AtomicU32::new(0),
                pid: AtomicU32::new(0),
                started: AtomicU64::new(0),
                heartbeat: AtomicU64::new(0),
            }),
            place: CacheLine(CurrentOp {
                sequence: AtomicU32::new(0),
                inside: AtomicU32::new(0),
                step: AtomicU64::new(0),
                index: AtomicU32::new(0),
                name: [const { AtomicU64::new(0) }; NAME_WORDS],
            }),
            progress: CacheLine(ProgressWords::default()),
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
    fn the_last_position_is_reported_with_its_name_truncated_at_a_character() {
        let slot = empty();
        assert_eq!(slot.last_op(), None);
        slot.enter(OpName::new(3, "gather", 9));
        let seen = LastOp { step: 3, name: "gather".to_owned(), index: 9, inside: true };
        assert_eq!(slot.last_op(), Some(seen.clone()));
        slot.exit();
        assert_eq!(slot.last_op(), Some(LastOp { inside: false, ..seen }));
        // 39 bytes, then a character of two: 40 would cut it in half.
        slot.enter(OpName::new(4, "abcdefghijklmnopqrstuvwxyzabcdefghijklmé", 1));
        assert_eq!(slot.last_op().unwrap().name, "abcdefghijklmnopqrstuvwxyzabcdefghijklm");
    }

    #[test]
    fn a_writer_that_died_half_way_does_not_hold_a_reader() {
        let slot = empty();
        slot.enter(OpName::new(3, "gather", 9));
        slot.place.0.sequence.store(3, Ordering::Relaxed);
        assert_eq!(slot.last_op().unwrap().step, 3);
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
