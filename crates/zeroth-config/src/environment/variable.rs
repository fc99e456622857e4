//! One row of the table of environment variables.

/// One variable, or all that share a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name; `DS_BUILD_*` stands for all that begin so.
    pub name: &'static str,
    /// What it does where it comes from.
    pub does: &'static str,
    /// What becomes of it in a run.
    pub verdict: EnvVerdict,
    /// The reason, and what to do instead.
    pub message: &'static str,
}

/// The effect of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnvVerdict {
    /// It does what it says.
    Honoured,
    /// Not implemented yet.
    Unsupported,
    /// It does nothing; the message says why.
    NoEffect,
    /// No such variable: not here, and as far as is known not elsewhere.
    Unknown,
}

impl EnvVerdict {
    /// The word in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::Unsupported => "not_yet",
            Self::NoEffect => "no_effect",
            Self::Unknown => "unknown",
        }
    }

    /// The words of the human-readable output.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::Unsupported => "not yet",
            Self::NoEffect => "no effect here",
            Self::Unknown => "unknown",
        }
    }
}
