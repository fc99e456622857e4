//! Errors of devices.

/// An error of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what their fields are")]
pub enum DeviceError {
    #[error("{device}: {bytes} bytes of {tier} memory were asked for and not given: {reason}")]
    Memory { device: String, tier: &'static str, bytes: u64, reason: String },
    #[error(
        "cpu: thread {number} of {threads} could not be started: {reason}; use fewer with --threads-per-rank, or raise the \
         limit on processes (ulimit -u, pids.max of the control group)"
    )]
    Threads {
        /// Its number; the calling thread is number 0.
        number: usize,
        threads: usize,
        reason: String,
    },
    #[error("{0}")]
    Isa(String),
    #[error("{what}: {problem}")]
    Operands { what: &'static str, problem: String },
    #[error("{device}: {call} failed: {reason}")]
    Call { device: String, call: String, reason: String },
}
