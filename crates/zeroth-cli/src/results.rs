//! Tracks whether the result has reached stdout: a command whose result is lost has failed.

use std::io::{self, Write as _};
use std::sync::{Mutex, PoisonError};

/// The first write error.
static FAILURE: Mutex<Option<io::Error>> = Mutex::new(None);

/// Records a write error for the end of the process.
pub(crate) fn written(part: io::Result<()>) {
    // A closed reader (`| head`) is not an error.
    if let Err(error) = part
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        FAILURE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Flushes stdout, and returns the first error of writing the result.
pub(crate) fn finish() -> io::Result<()> {
    written(io::stdout().flush());
    FAILURE.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
}
