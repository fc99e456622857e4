//! Checks which config a command names.

use std::path::{Component, Path};

use super::compare::Comparison;
use super::script::Trainer;
use crate::check::Severity;
use crate::preset::Preset;

impl Comparison<'_> {
    /// Checks that the config named by the command is this file.
    pub(super) fn named_config(&mut self) {
        let file = self.file_name;
        let mut agrees = false;
        for (flag, named) in &self.command.script.configs {
            if is_same_config(file, named) {
                agrees = true;
                continue;
            }
            let what = if named.trim_start().starts_with('{') {
                "a config written into the command".to_owned()
            } else if Preset::find(named).is_ok() {
                format!("the preset `{named}`")
            } else {
                format!("`{}`", named.chars().take(80).collect::<String>())
            };
            let message = format!("the command trains with {what} ({flag}), not with {file}");
            self.push(
                Severity::Error,
                None,
                message,
                format!("write {flag} {file}, or verify what the command names"),
            );
        }
        if agrees {
            self.compared.push(format!("config {file}"));
        }
        if !self.command.script.configs.is_empty() || self.command.script.settings_file.is_some() {
            return;
        }
        let (what, flag) = match (&self.command.accelerate, self.command.trainer) {
            (Some(accelerate), _) if accelerate.config_file.is_some() => return,
            (Some(_), _) => ("accelerate makes a config of its own", "--deepspeed_config_file"),
            (None, Trainer::Zeroth) => ("zeroth takes the preset `zero2`", "--deepspeed"),
            (None, Trainer::HuggingFace | Trainer::Swift) => ("it trains without DeepSpeed", "--deepspeed"),
            // A custom script may open the file itself.
            (None, Trainer::Own) => return,
        };
        let message = format!("the command names no config: {what}, and {file} is not read");
        self.push(Severity::Warning, None, message, format!("add {flag} {file}"));
    }
}

/// Whether two names refer to the same file: equal, the same file on disk, or one path is a suffix of the other.
fn is_same_config(file: &str, named: &str) -> bool {
    fn parts(path: &str) -> Vec<Component<'_>> {
        Path::new(path).components().filter(|part| !matches!(part, Component::CurDir)).collect()
    }
    if file == named {
        return true;
    }
    let (a, b) = (parts(file), parts(named));
    if let (Ok(a), Ok(b)) = (Path::new(file).canonicalize(), Path::new(named).canonicalize()) {
        return a == b;
    }
    !a.is_empty() && !b.is_empty() && (a.ends_with(&b) || b.ends_with(&a))
}
