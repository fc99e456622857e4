//! Waiting for a counter: a short spin, then futex sleeps in slices.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex::{self, Flags, Timespec};

/// The longest sleep, and so the interval at which a waiting rank checks its peers.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// The most that one slice counts for. A rank that was itself suspended has not observed its peers meanwhile and must
/// not declare them silent.
pub(crate) const COUNTED: Duration = Duration::from_millis(500);

/// Spins before the first sleep: tens of microseconds, about the cost of a sleep and a wake.
const SPINS: u32 = 2_000;

/// The number of spins: none where ranks × threads exceed the available CPUs.
pub(crate) fn spins(world: usize, threads: usize) -> u32 {
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if world > 1 && world.saturating_mul(threads) <= allowed { SPINS } else { 0 }
}

/// Whether a counter modulo 2³² has reached `target`. Counters are never 2³¹ apart: see `shm_channel.rs`.
pub(crate) fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target).cast_signed() >= 0
}

/// Waits until `word` has reached `target`.
///
/// `look` is called before every sleep with the time since its last call, and ends the wait with its error.
pub(crate) fn until<E>(
    word: &AtomicU32,
    target: u32,
    spins: u32,
    mut look: impl FnMut(Duration) -> Result<(), E>,
) -> Result<(), E> {
    // Acquire, here and below: everything the writer did before it advanced the counter is visible.
    let mut seen = word.load(Ordering::Acquire);
    for _ in 0..spins {
        if reached(seen, target) {
            return Ok(());
        }
        std::hint::spin_loop();
        seen = word.load(Ordering::Acquire);
    }
    let mut last = Instant::now();
    let mut watched = Duration::ZERO;
    while !reached(seen, target) {
        look(watched)?;
        sleep(word, seen);
        let now = Instant::now();
        watched = (now - last).min(COUNTED);
        last = now;
        seen = word.load(Ordering::Acquire);
    }
    Ok(())
}

/// Sleeps while `word` is `seen`, for at most a slice. The kernel compares and sleeps atomically, so no wake-up is
/// lost.
fn sleep(word: &AtomicU32, seen: u32) {
    let slice = Timespec { tv_sec: 0, tv_nsec: i64::from(SLICE.subsec_nanos()) };
    // Changed, interrupted or timed out: the caller checks again in any case. Not PRIVATE, since other processes wake
    // it.
    let _ = futex::wait(word, Flags::empty(), seen, Some(&slice));
}

/// Wakes all waiters of `word`.
pub(crate) fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_compare_across_their_overflow() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(0, u32::MAX) && reached(1, u32::MAX) && !reached(u32::MAX, 0));
    }

    #[test]
    fn a_waiter_wakes_when_the_counter_comes_and_sees_what_was_written_before() {
        let (word, data) = (AtomicU32::new(u32::MAX), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                data.store(7, Ordering::Relaxed);
                word.store(0, Ordering::Release);
                wake(&word);
            });
            until(&word, 0, 0, |_| Ok::<(), ()>(())).unwrap();
            assert_eq!(data.load(Ordering::Relaxed), 7);
        });
    }

    #[test]
    fn looking_around_ends_a_wait_that_would_last_for_ever() {
        let word = AtomicU32::new(0);
        let mut watched = Duration::ZERO;
        let ended = until(&word, 1, 10, |time| {
            watched += time;
            if watched > 3 * SLICE { Err(watched) } else { Ok(()) }
        });
        assert!(ended.unwrap_err() <= 3 * SLICE + COUNTED);
    }

    #[test]
    fn nobody_spins_when_ranks_and_threads_do_not_fit_the_processors() {
        let allowed = std::thread::available_parallelism().unwrap().get();
        assert_eq!(spins(allowed + 1, 1), 0);
        assert_eq!(spins(2, allowed), 0);
        assert_eq!(spins(1, 1), 0);
    }
}
