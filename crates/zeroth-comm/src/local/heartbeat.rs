//! A rank's heartbeat thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::segment::SharedSegment;
use crate::error::JoinError;

/// A thread that increments the counter in its rank's slot until it is dropped.
pub(crate) struct Heartbeat {
    heart: Arc<Heart>,
    // An `Option` because it is joined by value.
    thread: Option<JoinHandle<()>>,
}

/// State shared by the thread and its owner.
struct Heart {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The thread has not started.
    Starting,
    Beating,
    /// The thread is asked to end.
    Stopping,
}

impl Heartbeat {
    pub(crate) fn start(
        segment: Arc<SharedSegment>,
        rank: usize,
        period: Duration,
    ) -> Result<Self, JoinError> {
        let heart = Arc::new(Heart { state: Mutex::new(State::Starting), changed: Condvar::new() });
        let inside = Arc::clone(&heart);
        let thread = std::thread::Builder::new()
            .name(format!("heartbeat {rank}"))
            .spawn(move || inside.run(&segment, rank, period))
            .map_err(|source| JoinError::System { what: "start the heartbeat", source })?;
        // A rank has joined once its heartbeat started.
        let state = heart.lock();
        drop(heart.changed.wait_while(state, |state| *state == State::Starting));
        Ok(Self { heart, thread: Some(thread) })
    }
}

impl Heart {
    fn run(&self, segment: &SharedSegment, rank: usize, period: Duration) {
        let mut state = self.lock();
        *state = State::Beating;
        // The owner continues when it gets the lock, after the first beat.
        self.changed.notify_all();
        while *state == State::Beating {
            segment.slot(rank).beat();
            // This wait does not allocate, like every part of a step.
            let waited = self.changed.wait_timeout_while(state, period, |state| *state == State::Beating);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// No one panics while holding the lock, and the state is always consistent.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        *self.heart.lock() = State::Stopping;
        self.heart.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and the rank is leaving anyway.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::{JobToken, SegmentLayout};
    use super::*;

    #[test]
    fn a_heart_beats_until_it_is_dropped() {
        let (_file, segment) =
            SharedSegment::create(SegmentLayout::new(1, 0).unwrap(), JobToken::random().unwrap()).unwrap();
        let segment = Arc::new(segment);
        let heart = Heartbeat::start(Arc::clone(&segment), 0, Duration::from_millis(1)).unwrap();
        while segment.slot(0).heartbeat() < 3 {
            std::thread::yield_now();
        }
        drop(heart);
        let last = segment.slot(0).heartbeat();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(segment.slot(0).heartbeat(), last);
    }
}
