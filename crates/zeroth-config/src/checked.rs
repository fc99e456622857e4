//! The config that a command or a caller names, read and checked: a preset, a file, JSON text or base64.

use zeroth_base::nearest;

use crate::check::{CheckReport, Severity, check};
use crate::preset::{PRESETS, Preset};
use crate::read::{ConfigSource, Document, ReadError, ReadErrorKind, parse};
use crate::snippet;

/// A config without errors.
#[derive(Debug)]
pub struct CheckedConfig {
    /// Its text and values.
    pub document: Document,
    /// The verdicts on its keys.
    pub report: CheckReport,
}

/// A config that cannot be used; the text shows the places in the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ConfigError {
    #[error("{0}")]
    Unreadable(String),
    #[error("{0}")]
    Wrong(String),
}

impl CheckedConfig {
    /// Reads and checks a config; reports all errors at once.
    pub fn load(argument: &str) -> Result<Self, ConfigError> {
        Self::of_source(argument, read_config(argument)?)
    }

    /// Checks a config that `argument` named and that has been read.
    pub fn of_source(argument: &str, source: ConfigSource) -> Result<Self, ConfigError> {
        let document = parse(source).map_err(|error| unreadable(argument, &error))?;
        let report = check(&document);
        let errors: Vec<String> = report
            .at_least(Severity::Error)
            .map(|verdict| snippet::of_verdict("error", &document.source, verdict))
            .collect();
        if !errors.is_empty() {
            return Err(ConfigError::Wrong(errors.join("\n")));
        }
        Ok(Self { document, report })
    }
}

/// Reads a config without checking it.
pub fn read_config(argument: &str) -> Result<ConfigSource, ConfigError> {
    config_source(argument).map_err(|error| unreadable(argument, &error))
}

/// The source that the argument names. A preset takes precedence over a file of the same name.
pub fn config_source(argument: &str) -> Result<ConfigSource, ReadError> {
    match Preset::find(argument) {
        Ok(preset) => Ok(preset.source()),
        Err(_) => ConfigSource::from_argument(argument),
    }
}

/// Formats a read error, with the preset that was likely meant.
pub fn read_error_text(argument: &str, error: &ReadError) -> String {
    let text = snippet::of_read_error(error);
    let near = nearest(argument, PRESETS.iter().map(|preset| preset.name));
    match near.filter(|_| error.kind == ReadErrorKind::NotFound) {
        Some(near) => format!("{}\n  did you mean the preset `{near}`?\n", text.trim_end()),
        None => text,
    }
}

fn unreadable(argument: &str, error: &ReadError) -> ConfigError {
    ConfigError::Unreadable(read_error_text(argument, error).trim_end().to_owned())
}
