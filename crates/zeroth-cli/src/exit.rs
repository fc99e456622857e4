//! How a command ends, and the exit codes that scripts rely on.

use std::process::ExitCode;

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
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
