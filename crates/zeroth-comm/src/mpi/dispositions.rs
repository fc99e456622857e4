//! Dispositions of signals. MPI libraries change some while they are opened and initialized: UCX takes SIGHUP and the
//! signals of crashes, MPICH SIGUSR1. They are put back, so that the process's own handlers work.
//!
//! SIGUSR1 alone stays ignored where MPICH took it from its default: `mpirun -disable-auto-cleanup` sends it to the
//! survivors of a rank that died, which would end them. A handler that is installed later receives it.
#![allow(unsafe_code, reason = "sigaction is a function of C")]

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use libc::{c_int, sigaction};

/// Signals of Linux without the real-time ones, most of which libc uses itself.
const SIGNALS: std::ops::Range<c_int> = 1..32;

/// The dispositions of all signals at one moment.
pub(super) struct Dispositions(Vec<(c_int, sigaction)>);

impl Dispositions {
    /// Reads them.
    pub(super) fn save() -> Self {
        Self(SIGNALS.filter_map(|signal| Some((signal, current(signal)?))).collect())
    }

    /// Puts back those that differ.
    pub(super) fn restore(&self) {
        for (signal, saved) in &self.0 {
            if current(*signal).is_none_or(|now| now.sa_sigaction == saved.sa_sigaction) {
                continue;
            }
            let mut back = *saved;
            if *signal == libc::SIGUSR1 && back.sa_sigaction == libc::SIG_DFL {
                back.sa_sigaction = libc::SIG_IGN;
            }
            // SAFETY: a disposition that was in force before, or ignoring.
            unsafe { sigaction(*signal, &raw const back, null_mut()) };
        }
    }
}

fn current(signal: c_int) -> Option<sigaction> {
    let mut now = MaybeUninit::uninit();
    // SAFETY: writes the disposition, if the signal exists.
    let code = unsafe { sigaction(signal, null(), now.as_mut_ptr()) };
    // SAFETY: written, as the code says.
    (code == 0).then(|| unsafe { now.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_was_taken_has_its_former_disposition_again() {
        let before = current(libc::SIGWINCH).unwrap().sa_sigaction;
        let saved = Dispositions::save();
        // SAFETY: ignoring is a disposition; nothing in this process waits for the signal.
        unsafe { libc::signal(libc::SIGWINCH, libc::SIG_IGN) };
        assert_ne!(current(libc::SIGWINCH).unwrap().sa_sigaction, before);
        saved.restore();
        assert_eq!(current(libc::SIGWINCH).unwrap().sa_sigaction, before);
    }
}
