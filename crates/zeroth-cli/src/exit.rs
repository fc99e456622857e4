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
    /// A rank was killed: told to `zeroth launch` on another host, which may start the job again.
    RankDied = 75,
    /// SIGHUP, after a checkpoint was saved.
    HungUp = 129,
    /// SIGINT, after a checkpoint was saved.
    Interrupted = 130,
    /// SIGUSR1 with --signal-exit, after a checkpoint was saved.
    User1 = 138,
    /// SIGUSR2 with --signal-exit, after a checkpoint was saved.
    User2 = 140,
    /// SIGTERM, after a checkpoint was saved.
    Terminated = 143,
    /// SIGXCPU, after a checkpoint was saved.
    CpuTime = 152,
}

impl Exit {
    /// The outcome for an exit code reported by another rank.
    pub(crate) fn of_code(code: &str) -> Self {
        let known = [Self::Done, Self::Failed, Self::DoesNotFit, Self::Problems];
        known.into_iter().find(|exit| (*exit as u8).to_string() == code).unwrap_or(Self::Wrong)
    }

    /// The outcome that a process ended with by this exit code, if it is one of a command.
    pub(crate) fn of_process(code: i32) -> Option<Self> {
        let all = [
            Self::Done,
            Self::Failed,
            Self::Wrong,
            Self::DoesNotFit,
            Self::Problems,
            Self::RankDied,
            Self::HungUp,
            Self::Interrupted,
            Self::User1,
            Self::User2,
            Self::Terminated,
            Self::CpuTime,
        ];
        all.into_iter().find(|exit| *exit as i32 == code)
    }

    /// Whether a signal has ended the run, after a save.
    pub(crate) const fn is_stop(self) -> bool {
        match self {
            Self::HungUp
            | Self::Interrupted
            | Self::User1
            | Self::User2
            | Self::Terminated
            | Self::CpuTime => true,
            Self::Done | Self::Failed | Self::Wrong | Self::DoesNotFit | Self::Problems | Self::RankDied => {
                false
            }
        }
    }

    /// The outcome of a run that was stopped by a signal and has saved.
    pub(crate) const fn after(signal: StopSignal) -> Self {
        match signal {
            StopSignal::Interrupt => Self::Interrupted,
            StopSignal::Terminate => Self::Terminated,
            StopSignal::HangUp => Self::HungUp,
            StopSignal::User1 => Self::User1,
            StopSignal::User2 => Self::User2,
            StopSignal::CpuTime => Self::CpuTime,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
