//! One disagreement between a command and a file.

use serde_json::{Value, json};

use crate::check::Severity;
use crate::read::Location;

/// One disagreement.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// An error: the run stops or trains something else. A warning: it may.
    pub severity: Severity,
    /// The key of the file, by its canonical path.
    pub key: Option<&'static str>,
    /// Its location in the file.
    pub location: Option<Location>,
    /// What the file says and what the command says.
    pub message: String,
    /// The remedy.
    pub fix: String,
}

impl Finding {
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
