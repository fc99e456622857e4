//! A disagreement between a command and a file.

use serde_json::{Value, json};

use crate::check::Severity;
use crate::read::Location;

/// A disagreement between a command and a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Disagreement {
    /// An error if the run stops or trains something else, a warning if it may.
    pub severity: Severity,
    /// The canonical path of the key in the file.
    pub key: Option<&'static str>,
    /// The location of the key in the file.
    pub location: Option<Location>,
    /// What the file says and what the command says.
    pub message: String,
    /// What to change in the file or the command.
    pub fix: String,
}

impl Disagreement {
    pub(super) fn to_json(&self) -> Value {
        json!({
            "severity": if self.severity == Severity::Error { "error" } else { "warning" },
            "key": self.key,
            "line": self.location.map(|location| location.line),
            "column": self.location.map(|location| location.column),
            "message": self.message,
            "fix": self.fix,
        })
    }
}
