//! Names of the files in a run folder.

use std::fs;
use std::path::Path;

/// Files at the top of a run folder.
pub(crate) const FILES: &[&str] =
    &["config.json", "origin.json", "plan.json", "metrics.jsonl", "metrics.csv", "loss.svg", STATUS, EVENTS];
/// What the run is doing; rewritten every second.
pub(crate) const STATUS: &str = "status.json";
/// What happened, one line each.
pub(crate) const EVENTS: &str = "events.jsonl";
/// Folders at the top of a run folder.
pub(crate) const FOLDERS: &[&str] = &["checkpoints", "model", "logs", "tensorboard"];
/// Files that users create to request something of a run.
pub(crate) const REQUESTS: &[&str] = &["save-now", "trace-now"];
/// Marker files, which only zeroth writes.
pub(crate) const MARKERS: &[&str] = &["origin.json", "metrics.jsonl"];
/// Names that others use too: a `config.json` without a marker file belongs to a model and must not be overwritten.
pub(crate) const AMBIGUOUS: &[&str] = &["config.json", "plan.json", "loss.svg", "model", STATUS, EVENTS];

/// `rank-0.log`, the timeline of a step, or a rank's part of a trace.
pub(crate) fn is_log_name(name: &str) -> bool {
    let number = |first, last| name.strip_prefix(first).and_then(|rest| rest.strip_suffix(last));
    let known = [("rank-", ".log"), ("trace-", ".part"), ("step-", ".trace.json")];
    known.into_iter().any(|(first, last)| number(first, last).is_some_and(is_digits))
}

/// `events.out.tfevents.SECONDS.HOST.PROCESS.0`.
pub(crate) fn is_event_file_name(name: &str) -> bool {
    let parts = name.strip_prefix("events.out.tfevents.").and_then(|rest| rest.strip_suffix(".0"));
    let parts = parts.and_then(|parts| Some((parts.split_once('.')?.0, parts.rsplit_once('.')?.1)));
    parts.is_some_and(|(seconds, process)| is_digits(seconds) && is_digits(process))
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a path exists; symlinks are not followed.
pub(crate) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}
