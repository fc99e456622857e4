//! One row of the table of environment variables.

/// One variable, or all that begin alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name; `DS_BUILD_*` stands for all that begin so.
    pub name: &'static str,
    /// What it does where it comes from.
    pub does: &'static str,
    /// What becomes of it here.
    pub verdict: EnvVerdict,
    /// Why, and what to do instead.
    pub message: &'static str,
}

/// What becomes of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnvVerdict {
    /// It does what it says.
    Honoured,
    /// The part that reads it is not built yet.
    NotYet,
    /// It does nothing here, and the message says why.
    NoEffect,
    /// No such variable: not here, and as far as is known not elsewhere.
    Unknown,
}

impl EnvVerdict {
    /// The word in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::NotYet => "not_yet",
            Self::NoEffect => "no_effect",
            Self::Unknown => "unknown",
        }
    }

    /// The words for people.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::NotYet => "not yet",
            Self::NoEffect => "no effect here",
            Self::Unknown => "unknown",
        }
    }
}
