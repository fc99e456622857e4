//! Compares the DeepSpeed flags of `accelerate launch` with the config file.

use serde_json::Value;
use zeroth_base::DType;

use super::command::Accelerate;
use super::compare::{Comparison, shown};
use crate::check::Severity;
use crate::read::Number;
use crate::view::Switch;

impl Comparison<'_> {
    /// Reports flags that the config file overrides. Only a conflicting `--mixed_precision` is an error.
    pub(super) fn accelerate(&mut self) {
        let Some(Accelerate { mixed_precision, settings, .. }) = &self.command.accelerate else { return };
        if self.command.script.configs.is_empty() {
            return;
        }
        let on = |path: &str| self.view.switch(path) == Switch::On;
        match mixed_precision {
            Some(given @ (DType::Bf16 | DType::F16)) => {
                let other = if *given == DType::Bf16 { DType::F16 } else { DType::Bf16 };
                let path = format!("{other}.enabled");
                if on(&path) {
                    let message = format!(
                        "the file has {path} true, and the command --mixed_precision {given}: accelerate stops \
                         (`--mixed_precision` arg cannot be set to `{given}` when `{other}` is set in the DeepSpeed \
                         config file)"
                    );
                    let fix = format!("write --mixed_precision {other}, or {given}.enabled in the file");
                    self.push(Severity::Error, Some(&path), message, fix);
                }
            }
            Some(DType::F32) => {
                if let Some(path) = ["bf16.enabled", "fp16.enabled"].into_iter().find(|path| on(path)) {
                    let message = format!(
                        "the file has {path} true, and the command --mixed_precision no: the file counts"
                    );
                    let fix = format!("write --mixed_precision {}", path.trim_end_matches(".enabled"));
                    self.push(Severity::Warning, Some(path), message, fix);
                }
            }
            None => {}
        }
        for (flag, path, text) in settings {
            let file = match self.view.given(path) {
                Some(value) => value.clone(),
                None if *path == "zero_optimization.stage" => 0.into(),
                None if path.ends_with(".device") => "none".into(),
                None => continue,
            };
            if same_value(&file, text) {
                continue;
            }
            let message = format!(
                "the file has {path} {}, and the command --{flag} {text}: accelerate reads the file and drops the flag",
                shown(&file)
            );
            self.push(
                Severity::Warning,
                Some(path),
                message,
                format!("remove --{flag}, or write {text} in the file"),
            );
        }
    }
}

fn same_value(file: &Value, text: &str) -> bool {
    match (file.as_f64(), Number::from_text(text)) {
        (Some(file), Some(given)) => file == given.as_f64(),
        _ => file.as_str().is_some_and(|file| file.eq_ignore_ascii_case(text)),
    }
}
