//! Ignored signals that survive exec.
#![allow(unsafe_code, reason = "calls signal(2), for which the system-call crate has no safe function")]

use std::ffi::c_int;
use std::io;

use rustix::process::Signal;

/// `SIG_IGN` and `SIG_ERR` of signal(2) on Linux.
const IGNORED: usize = 1;
const FAILED: usize = usize::MAX;

unsafe extern "C" {
    // The C library's, which the standard library links. A handler is a pointer or one of the values above.
    fn signal(number: c_int, handler: usize) -> usize;
}

/// Ignores a signal. Safe between fork and exec: it takes no lock and does not allocate.
pub(super) fn ignore(number: Signal) -> io::Result<()> {
    // SAFETY: the signature is that of signal(2) with its pointer as an integer of the same size, and ignoring installs no
    // code that could run.
    let before = unsafe { signal(number.as_raw(), IGNORED) };
    if before == FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}
