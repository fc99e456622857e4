//! Whether all of a result has reached standard output: a command whose result is lost has failed.

use std::io::{self, Write as _};
use std::sync::{Mutex, PoisonError};

use crate::exit::Exit;
use crate::output;

/// Why a result could not be written.
static FAILURE: Mutex<Option<io::Error>> = Mutex::new(None);

/// Remembers for the end of the process that a part could not be written.
pub(crate) fn written(part: io::Result<()>) {
    // A reader that went away (`| head`) is not an error of ours.
    if let Err(error) = part
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        FAILURE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// The end of the process: a failure where its result is not written.
pub(crate) fn end(exit: Exit) -> Exit {
    written(io::stdout().flush());
    let failure = FAILURE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(failure) = failure else { return exit };
    output::error(&format!("the result could not be written to standard output: {failure}"));
    if exit == Exit::Done { Exit::Failed } else { exit }
}
