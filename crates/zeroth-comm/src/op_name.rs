//! Names of collectives, for messages.

use std::fmt;

/// The name of a collective in messages: its step, its operation, and its index in the program.
///
/// All ranks give a collective the same name; a rank that is in a different one is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpName {
    /// The training step, or 0 before the first.
    pub step: u64,
    /// The operation. Other ranks see the first 40 bytes.
    pub name: &'static str,
    /// Its index in the program.
    pub index: u32,
}

impl OpName {
    /// Creates a name.
    pub const fn new(step: u64, name: &'static str, index: u32) -> Self {
        Self { step, name, index }
    }
}

impl fmt::Display for OpName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, op {}#{}", self.step, self.name, self.index)
    }
}

/// The last collective of another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct LastOp {
    pub step: u64,
    /// Its name, up to 40 bytes.
    pub name: String,
    /// Its index in the program.
    pub index: u32,
    /// Whether the rank was still in it.
    pub inside: bool,
}

impl fmt::Display for LastOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.inside { "in" } else { "after" };
        write!(f, "{place} step {}, op {}#{}", self.step, self.name, self.index)
    }
}
