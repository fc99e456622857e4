//! MPI between its initialization and its end, shared by all communicators of the process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::calls::Calls;
use super::library::MpiLibrary;

/// MPI of this process.
pub(super) struct Session {
    /// One thread at a time is inside of MPI.
    calls: Mutex<Box<dyn Calls>>,
    /// The library, for messages.
    pub(super) library: String,
    /// MPI is not called any more: it was left, or an operation was given up.
    closed: AtomicBool,
    /// Whether ranks and threads of this host exceed its CPUs.
    shares_cpus: AtomicBool,
}

impl Session {
    pub(super) fn new(library: MpiLibrary) -> Self {
        Self {
            calls: Mutex::new(library.calls),
            library: library.name,
            closed: AtomicBool::new(false),
            shares_cpus: AtomicBool::new(true),
        }
    }

    /// The functions, for this thread alone; `None` once MPI must not be called any more.
    pub(super) fn calls(&self) -> Option<MutexGuard<'_, Box<dyn Calls>>> {
        // Asked first: a call that never returns holds the lock.
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        Some(self.calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Closes MPI to all but [`Self::closed_calls`]; false if it was closed before.
    pub(super) fn close(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }

    /// The functions once MPI is closed to everybody else, for its end.
    pub(super) fn closed_calls(&self) -> MutexGuard<'_, Box<dyn Calls>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation stays incomplete. Nothing may make progress on it: its buffers go back to their owner.
    pub(super) fn give_up(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn shares_cpus(&self) -> bool {
        self.shares_cpus.load(Ordering::Relaxed)
    }

    pub(super) fn set_shares_cpus(&self, shares: bool) {
        self.shares_cpus.store(shares, Ordering::Relaxed);
    }
}
