//! What the threads of a device know of a lost rank.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Whether a rank is lost, and how long NCCL took to abort after it.
#[derive(Debug, Default)]
pub(super) struct Loss {
    lost: AtomicBool,
    /// Microseconds of the longest abort, and one.
    abort: AtomicU64,
}

impl Loss {
    /// A rank is lost: whoever waits for peers ends that.
    pub(super) fn declare(&self) {
        self.lost.store(true, Ordering::Release);
    }

    pub(super) fn is_declared(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// A communicator was aborted within `time`.
    pub(super) fn aborted(&self, time: Duration) {
        self.abort.fetch_max(1 + time.as_micros() as u64, Ordering::Release);
    }

    /// The longest time of an abort; `None` before the first has ended.
    pub(super) fn abort_time(&self) -> Option<Duration> {
        self.abort.load(Ordering::Acquire).checked_sub(1).map(Duration::from_micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_abort_counts() {
        let loss = Loss::default();
        assert_eq!((loss.is_declared(), loss.abort_time()), (false, None));
        loss.declare();
        loss.aborted(Duration::ZERO);
        assert_eq!((loss.is_declared(), loss.abort_time()), (true, Some(Duration::ZERO)));
        loss.aborted(Duration::from_millis(3));
        loss.aborted(Duration::from_millis(2));
        assert_eq!(loss.abort_time(), Some(Duration::from_millis(3)));
    }
}
