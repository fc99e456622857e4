//! Tracks whether the result has reached stdout: a command whose result is lost has failed.

use std::io::{self, Write as _};
use std::sync::{Mutex, PoisonError};

use crate::exit::Exit;
use crate::output;

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

/// The final exit code: failure if the result was not written.
pub(crate) fn end(exit: Exit) -> Exit {
    written(io::stdout().flush());
    let failure = FAILURE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(failure) = failure else { return exit };
    output::error(&format!("cannot write the result to standard output: {failure}"));
    if exit == Exit::Done { Exit::Failed } else { exit }
}
