//! Errors of devices.

/// An error of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An arena could not be allocated.
    #[error("{device}: {bytes} bytes of {tier} memory were asked for and not given: {reason}")]
    Memory {
        /// The device.
        device: String,
        /// Which arena.
        tier: &'static str,
        /// Bytes requested.
        bytes: u64,
        /// The system's error.
        reason: String,
    },
    /// A thread could not be started.
    #[error(
        "cpu: thread {number} of {threads} could not be started: {reason}; use fewer with --threads-per-rank, or raise the \
         limit on processes (ulimit -u, pids.max of the control group)"
    )]
    Threads {
        /// Its number; the calling thread is number 0.
        number: usize,
        /// Threads requested.
        threads: usize,
        /// The system's error.
        reason: String,
    },
    /// `ZEROTH_CPU` names an ISA that this machine lacks.
    #[error("{0}")]
    Isa(String),
    /// A span outside its arena, or overlapping operands of which one is written.
    #[error("{what}: {problem}")]
    Operands {
        /// The kernel or copy.
        what: &'static str,
        /// The problem.
        problem: String,
    },
    /// A library call failed.
    #[error("{device}: {call} failed: {reason}")]
    Call {
        /// The device.
        device: String,
        /// The call.
        call: String,
        /// Its error.
        reason: String,
    },
}
