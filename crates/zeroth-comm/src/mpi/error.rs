//! Errors of MPI outside of collectives.

use crate::error::CommError;

/// MPI cannot be used, or failed before the first collective.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum MpiError {
    #[error(
        "no MPI library can be used{}: {tried}. Install it (Debian: libopenmpi3 for Open MPI, libmpich12 for MPICH), or set \
         ZEROTH_MPI_LIBRARY to its path",
        launcher.map_or_else(String::new, |launcher| format!(", and {launcher} started this process"))
    )]
    NotFound {
        /// The launcher, where its variables name one.
        launcher: Option<&'static str>,
        /// Each name and what was wrong with it.
        tried: String,
    },
    #[error(
        "{library} was opened, but it did not connect to the launcher: {variable} says {expected}, MPI says {found}. Start the \
         ranks with the mpirun of this library (under srun: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH), or set \
         ZEROTH_MPI_LIBRARY to the library of the launcher"
    )]
    World {
        library: String,
        /// What the launcher set.
        variable: &'static str,
        expected: usize,
        found: usize,
    },
    #[error(
        "{library} allows calls from its main thread only (thread level {provided}); install one built with threads"
    )]
    Threads { library: String, provided: i32 },
    #[error("MPI was initialized in this process before; it can be once")]
    Twice,
    #[error("{call} of {library} failed: {reason}")]
    Call { library: String, call: &'static str, reason: String },
    /// The job ended meanwhile.
    #[error(transparent)]
    Ended(#[from] CommError),
}
