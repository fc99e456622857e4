//! The end of MPI.
//!
//! `MPI_Finalize` of MPICH 4.0 over UCX closes its connections, which needs an answer of every rank, and then waits in a
//! barrier of the launcher, in which it answers nobody: ranks that are not early enough wait for ever. With two hosts of
//! two ranks that was most runs, and a rank that ends without it makes Hydra, the launcher, kill the others. Under Hydra
//! such a rank therefore only tells the launcher, as `PMI_Finalize` would; its connections close with the process.
#![allow(unsafe_code, reason = "the launcher's descriptor is known by number")]

use std::env;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use super::calls::Calls;

/// Barriers before the end: all ranks have what was sent to them, and enter `MPI_Finalize` together.
const BARRIERS: u32 = 3;

/// A pause after a barrier, in which its last messages leave, and between tests.
const PAUSE: Duration = Duration::from_millis(1);
const SLEEP: Duration = Duration::from_micros(20);

/// Ends MPI together with all ranks; false if one of them did not come in time, or the library or the launcher fails.
pub(super) fn finalize(calls: &dyn Calls, library: &str, deadline: Instant) -> bool {
    for _ in 0..BARRIERS {
        let Ok(mut barrier) = calls.barrier(calls.world()) else { return false };
        loop {
            match calls.test(&mut barrier) {
                Ok(true) => break,
                Ok(false) if Instant::now() < deadline => std::thread::sleep(SLEEP),
                Ok(false) | Err(_) => return false,
            }
        }
        std::thread::sleep(PAUSE);
    }
    match hydra(library) {
        Some(socket) => tell(socket),
        None => calls.finalize().is_ok(),
    }
}

/// The connection of MPICH to Hydra, whose proxy has set both variables; `None` for others.
fn hydra(library: &str) -> Option<RawFd> {
    let is_hydra = library.starts_with("MPICH Version") && env::var_os("MPI_LOCALNRANKS").is_some();
    env::var("PMI_FD").ok().filter(|_| is_hydra)?.parse().ok()
}

/// The message of PMI-1 that ends a rank's connection, and the launcher's answer.
fn tell(socket: RawFd) -> bool {
    // SAFETY: Hydra opened it for the life of this process, and MPI is not called any more.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let mut answer = [0; 64];
    rustix::io::write(socket, b"cmd=finalize\n").is_ok()
        && rustix::io::read(socket, &mut answer)
            .is_ok_and(|length| answer[..length].starts_with(b"cmd=finalize_ack"))
}
