//! How a command ends, and the exit codes that scripts rely on.

use std::process::ExitCode;

use crate::signals::Ended;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done = 0,
    /// The run failed.
    Failed = 1,
    /// What was given is wrong: flags, config, model folder.
    Wrong = 2,
    /// It does not fit the memory given.
    DoesNotFit = 3,
    /// A check found problems.
    Problems = 4,
    /// Its terminal was closed (SIGHUP), after a good save.
    HungUp = 129,
    /// Interrupted (SIGINT) after a good save.
    Interrupted = 130,
    /// Told to end (SIGTERM) after a good save.
    Terminated = 143,
}

impl Exit {
    /// The end with a code that another rank tells.
    pub(crate) fn of_code(code: &str) -> Self {
        let known = [Self::Done, Self::Failed, Self::DoesNotFit, Self::Problems];
        known.into_iter().find(|exit| (*exit as u8).to_string() == code).unwrap_or(Self::Wrong)
    }

    /// The end of a run that was asked to stop, and has saved.
    pub(crate) const fn after(asked: Ended) -> Self {
        match asked {
            Ended::Interrupt => Self::Interrupted,
            Ended::Terminate => Self::Terminated,
            Ended::HangUp => Self::HungUp,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
