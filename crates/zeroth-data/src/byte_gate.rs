//! Bounds what all threads hold at a time.

use std::sync::{Condvar, Mutex, PoisonError};

/// A number of bytes that threads share. Those that ask for more than is left wait.
pub(super) struct ByteGate {
    left: Mutex<usize>,
    returned: Condvar,
}

/// Bytes taken from a gate, returned on drop.
pub(super) struct Taken<'a> {
    gate: &'a ByteGate,
    bytes: usize,
}

impl ByteGate {
    pub(super) fn of(bytes: usize) -> Self {
        Self { left: Mutex::new(bytes), returned: Condvar::new() }
    }

    /// Takes bytes, at most as many as the gate has. A thread that holds some must not ask for more.
    pub(super) fn take(&self, bytes: usize) -> Taken<'_> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let enough = self.returned.wait_while(left, |left| *left < bytes);
        *enough.unwrap_or_else(PoisonError::into_inner) -= bytes;
        Taken { gate: self, bytes }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.gate.left.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.gate.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn threads_hold_no_more_than_the_gate_has() {
        let gate = ByteGate::of(10);
        let (held, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for bytes in [10, 4, 3, 7, 1, 6, 0, 5] {
                let (gate, held, most) = (&gate, &held, &most);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let taken = gate.take(bytes);
                        most.fetch_max(held.fetch_add(bytes, Ordering::SeqCst) + bytes, Ordering::SeqCst);
                        thread::yield_now();
                        held.fetch_sub(bytes, Ordering::SeqCst);
                        drop(taken);
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), 10);
    }
}
