//! Requests from outside a run, and how ranks agree on them between steps.

use bytemuck::{Pod, Zeroable};

/// A request to a running job, polled after every step. The strongest request of all ranks wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum ControlRequest {
    /// No request.
    #[default]
    Continue,
    /// Record a timeline of the next step.
    Trace,
    /// Save a checkpoint.
    Save,
    /// Save a checkpoint and stop after SIGUSR1: every rank exits with its code, whichever rank received the signal.
    User1,
    /// The same after SIGUSR2.
    User2,
    /// The same after SIGINT, or as a launcher asked.
    Stop,
    /// The same after SIGHUP.
    HangUp,
    /// The same after SIGXCPU, the warning before the limit of CPU time.
    CpuTime,
    /// The same after SIGTERM.
    Terminate,
}

impl ControlRequest {
    const ALL: [Self; 9] = [
        Self::Continue,
        Self::Trace,
        Self::Save,
        Self::User1,
        Self::User2,
        Self::Stop,
        Self::HangUp,
        Self::CpuTime,
        Self::Terminate,
    ];

    /// Whether the run ends with it.
    pub fn stops(self) -> bool {
        self > Self::Save
    }
}

/// A rank's status after a step, as exchanged between ranks.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct StepStatus {
    request: u8,
    /// Non-zero if this rank has no shard still being synced to disk.
    pub(crate) is_synced: u8,
}

impl StepStatus {
    pub(crate) fn new(request: ControlRequest, is_synced: bool) -> Self {
        Self { request: request as u8, is_synced: is_synced.into() }
    }

    pub(crate) fn request(self) -> ControlRequest {
        let known = ControlRequest::ALL.get(usize::from(self.request));
        known.copied().unwrap_or(ControlRequest::Terminate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_their_exchange_and_a_stop_wins_over_a_save() {
        for (place, request) in ControlRequest::ALL.into_iter().enumerate() {
            assert_eq!(StepStatus::new(request, true).request(), request);
            assert_eq!(request.stops(), place > 2, "{request:?}");
        }
        assert!(ControlRequest::ALL.is_sorted());
    }
}
