//! The rayon thread pool for data, checksums and weight initialisation.

use std::sync::OnceLock;

use rayon::ThreadPoolBuilder;
use zeroth_base::counted;

/// The thread pool could not be started.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot start {} for data loading and checksums: {reason}; set RAYON_NUM_THREADS lower, or raise the limit on processes \
     (ulimit -u, pids.max of the control group)",
    counted(*threads as u64, "thread")
)]
pub struct ThreadsError {
    threads: usize,
    reason: String,
}

/// Starts the global thread pool, once per process. rayon would also start it on first use, but panics if threads
/// cannot be created.
pub fn start_threads() -> Result<(), ThreadsError> {
    // rayon tries only once per process, and afterwards only reports that it has tried.
    static STARTED: OnceLock<Result<(), ThreadsError>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            let threads = std::env::var("RAYON_NUM_THREADS").ok().and_then(|threads| threads.parse().ok());
            let threads = threads
                .filter(|threads| *threads > 0)
                .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
                .unwrap_or(1);
            let built = ThreadPoolBuilder::new().num_threads(threads).build_global();
            built.map_err(|error| ThreadsError { threads, reason: error.to_string() })
        })
        .clone()
}
