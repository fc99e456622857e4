//! `config verify`: compares a training command with a config file.
//!
//! `words` and `launcher` parse the command line, `command` and `script` interpret it, and `compare`, `batch`,
//! `config_name` and `accelerate` compare it with the file. Contradictions of flags come from
//! [`resolve`](crate::resolve), so `verify` and `train` cannot disagree about them.

mod accelerate;
mod batch;
mod command;
mod compare;
mod config_name;
mod finding;
mod launcher;
mod script;
#[cfg(test)]
mod tests;
mod words;

use serde_json::{Value, json};

use crate::file_values::FileValues;

pub use crate::check::Severity;
pub use command::{LauncherProgram, RankCount};
pub use finding::Disagreement;

/// The result of comparing a command with a file.
#[derive(Debug, Clone)]
pub struct Verification {
    /// The file's name as given.
    pub file: String,
    /// The program that starts the ranks.
    pub launcher: LauncherProgram,
    /// The number of ranks, and where it comes from.
    pub world: RankCount,
    /// Values that were compared and agree, such as `batch 64 = 2 × 8 × 4 ranks`.
    pub compared: Vec<String>,
    /// Disagreements, errors first.
    pub findings: Vec<Disagreement>,
    /// Whether there are no findings.
    pub agrees: bool,
}

/// Compares a training command with a checked file.
///
/// The command may begin with environment assignments, and may be a single string in shell syntax.
pub fn verify(file: &FileValues, file_name: &str, command: &[String]) -> Verification {
    let command = command::TrainingCommand::read(command);
    let (compared, findings) = compare::Comparison::new(file, file_name, &command).run();
    Verification {
        file: file_name.to_owned(),
        launcher: command.launcher,
        world: command.world,
        compared,
        agrees: findings.is_empty(),
        findings,
    }
}

impl Verification {
    /// The values that agree, in one line.
    pub fn summary(&self) -> String {
        if self.compared.is_empty() { "nothing to compare".to_owned() } else { self.compared.join("; ") }
    }

    /// Whether the run would stop or train something else.
    pub fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }

    /// The object that `--format json` prints.
    pub fn to_json(&self) -> Value {
        let findings: Vec<Value> = self.findings.iter().map(Disagreement::to_json).collect();
        json!({
            "file": self.file,
            "agrees": self.agrees,
            "launcher": self.launcher.name(),
            "world_size": self.world.size,
            "compared": self.compared,
            "findings": findings,
        })
    }
}
