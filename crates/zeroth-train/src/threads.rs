//! The threads that rows, checksums and new weights are shared by.

use std::sync::OnceLock;

use rayon::ThreadPoolBuilder;

/// Threads that the system does not give.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot start {threads} threads to read data and compute checksums: {reason}; use fewer with RAYON_NUM_THREADS, or raise \
     the limit on processes (ulimit -u, pids.max of the control group)"
)]
pub struct ThreadsError {
    threads: usize,
    reason: String,
}

/// Starts them, once a process. They start by themselves, too, where they are first needed; but then a system that gives
/// none is a panic.
pub fn start_threads() -> Result<(), ThreadsError> {
    // rayon tries once in the life of a process, and afterwards only says that it has tried.
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
