//! The signals that stop a run, and their exit codes.

/// The signal that stopped a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopSignal {
    /// Ctrl-C, or a request from zeroth's launcher.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGHUP: the terminal was closed.
    HangUp,
    /// SIGUSR1 with --signal-exit: a cluster manager's warning.
    User1,
    /// SIGUSR2, likewise.
    User2,
    /// SIGXCPU: the soft limit of CPU time is reached.
    CpuTime,
}

impl StopSignal {
    /// The exit code: 128 plus the signal number.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
            Self::HangUp => 129,
            Self::User1 => 138,
            Self::User2 => 140,
            Self::CpuTime => 152,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::HangUp => "SIGHUP",
            Self::User1 => "SIGUSR1",
            Self::User2 => "SIGUSR2",
            Self::CpuTime => "SIGXCPU",
        }
    }
}
