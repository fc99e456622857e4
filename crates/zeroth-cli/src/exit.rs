//! Exit codes, which scripts rely on.

use std::process::ExitCode;

use crate::stop_signal::StopSignal;

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Success.
    Done = 0,
    /// The run failed.
    Failed = 1,
    /// Invalid input: flags, config, model folder, data.
    Wrong = 2,
    /// It does not fit in memory.
    DoesNotFit = 3,
    /// A check found problems.
    Problems = 4,
    /// SIGHUP, after a checkpoint was saved.
    HungUp = 129,
    /// SIGINT, after a checkpoint was saved.
    Interrupted = 130,
    /// SIGTERM, after a checkpoint was saved.
    Terminated = 143,
}

impl Exit {
    /// The outcome for an exit code reported by another rank.
    pub(crate) fn of_code(code: &str) -> Self {
        let known = [Self::Done, Self::Failed, Self::DoesNotFit, Self::Problems];
        known.into_iter().find(|exit| (*exit as u8).to_string() == code).unwrap_or(Self::Wrong)
    }

    /// The outcome of a run that was stopped by a signal and has saved.
    pub(crate) const fn after(signal: StopSignal) -> Self {
        match signal {
            StopSignal::Interrupt => Self::Interrupted,
            StopSignal::Terminate => Self::Terminated,
            StopSignal::HangUp => Self::HungUp,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
