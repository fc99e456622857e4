//! The config that a command names: a preset, a file, JSON text or base64.

use zeroth::base::nearest;
use zeroth::config::check::{Report, Severity, check};
use zeroth::config::preset::{PRESETS, Preset};
use zeroth::config::read::{Document, ReadError, ReadErrorKind, Source, parse};
use zeroth::config::snippet;

/// A config that was read and has no errors.
pub(super) struct Checked {
    pub(super) document: Document,
    pub(super) report: Report,
}

/// The text that the argument names. A preset's name comes before a file of that name.
pub(super) fn source(argument: &str) -> Result<Source, ReadError> {
    match Preset::find(argument) {
        Ok(preset) => Ok(preset.source()),
        Err(_) => Source::from_argument(argument),
    }
}

/// Whether the error is about the argument rather than about what the file says.
pub(super) fn is_about_argument(error: &ReadError) -> bool {
    matches!(error.kind, ReadErrorKind::NotFound | ReadErrorKind::Io | ReadErrorKind::TooLarge)
}

/// An error of reading, as people see it, with the preset that was likely meant.
pub(super) fn read_error_text(argument: &str, error: &ReadError) -> String {
    let text = snippet::of_read_error(error);
    let near = nearest(argument, PRESETS.iter().map(|preset| preset.name));
    match near.filter(|_| error.kind == ReadErrorKind::NotFound) {
        Some(near) => format!("{}\n  did you mean the preset `{near}`?\n", text.trim_end()),
        None => text,
    }
}

/// Reads and checks a config; one with errors is refused with all of them.
pub(super) fn load(argument: &str) -> anyhow::Result<Checked> {
    checked(argument, read(argument)?)
}

/// Reads a config.
pub(super) fn read(argument: &str) -> anyhow::Result<Source> {
    source(argument).map_err(|error| unreadable(argument, &error))
}

fn unreadable(argument: &str, error: &ReadError) -> anyhow::Error {
    anyhow::anyhow!("{}", read_error_text(argument, error).trim_end().to_owned())
}

/// Checks a config that was read.
pub(super) fn checked(argument: &str, source: Source) -> anyhow::Result<Checked> {
    let document = parse(source).map_err(|error| unreadable(argument, &error))?;
    let report = check(&document);
    let errors: Vec<String> = report
        .at_least(Severity::Error)
        .map(|verdict| snippet::of_verdict("error", &document.source, verdict))
        .collect();
    if !errors.is_empty() {
        anyhow::bail!("{}", errors.join("\n"));
    }
    Ok(Checked { document, report })
}
