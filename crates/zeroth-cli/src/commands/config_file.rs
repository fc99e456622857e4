//! Loads the config argument of a command: a preset, a file, JSON text or base64.

use std::path::Path;

use zeroth::base::nearest;
use zeroth::config::check::{Report, Severity, check};
use zeroth::config::preset::{PRESETS, Preset};
use zeroth::config::read::{Document, ReadError, ReadErrorKind, Source, parse};
use zeroth::config::snippet;

/// Refuses to write over files, unless that is asked for.
pub(super) fn refuse_existing<'a>(
    paths: impl IntoIterator<Item = &'a Path>,
    overwrite: bool,
) -> anyhow::Result<()> {
    let exists = |path: &&Path| std::fs::symlink_metadata(path).is_ok();
    let found: Vec<String> =
        paths.into_iter().filter(exists).map(|path| path.display().to_string()).collect();
    anyhow::ensure!(
        overwrite || found.is_empty(),
        "{} {} there already, and nothing was written: choose another --output, or replace {} with --overwrite",
        found.join(", "),
        if found.len() == 1 { "is" } else { "are" },
        if found.len() == 1 { "it" } else { "them" }
    );
    Ok(())
}

/// A config without errors.
pub(super) struct Checked {
    pub(super) document: Document,
    pub(super) report: Report,
}

/// The source that the argument names. A preset takes precedence over a file of the same name.
pub(super) fn source(argument: &str) -> Result<Source, ReadError> {
    match Preset::find(argument) {
        Ok(preset) => Ok(preset.source()),
        Err(_) => Source::from_argument(argument),
    }
}

/// Whether the error concerns the argument rather than the file's contents.
pub(super) fn is_about_argument(error: &ReadError) -> bool {
    matches!(error.kind, ReadErrorKind::NotFound | ReadErrorKind::Io | ReadErrorKind::TooLarge)
}

/// Formats a read error, with the preset that was likely meant.
pub(super) fn read_error_text(argument: &str, error: &ReadError) -> String {
    let text = snippet::of_read_error(error);
    let near = nearest(argument, PRESETS.iter().map(|preset| preset.name));
    match near.filter(|_| error.kind == ReadErrorKind::NotFound) {
        Some(near) => format!("{}\n  did you mean the preset `{near}`?\n", text.trim_end()),
        None => text,
    }
}

/// Reads and checks a config; reports all errors at once.
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

/// Checks a config that has been read.
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
