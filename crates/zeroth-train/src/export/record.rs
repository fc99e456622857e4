//! export.json in a model folder: the checkpoint its weights come from, and the files it consists of.
//!
//! It is removed before an export replaces any file, and written after all files are complete: a model with an
//! export.json is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use zeroth_base::{grouped, publish};

use super::error::{ExportError, failed};
use crate::checkpoint::{BaseEntry, Checkpoint};

/// The file name.
pub(crate) use zeroth_model::EXPORT_RECORD as RECORD;
/// Maximum size in bytes. A model of a thousand files needs about 60 kB.
const LARGEST: u64 = 16 << 20;

/// The state that a model is exported from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExportSource {
    /// Completed steps.
    pub(crate) step: u64,
    /// [`Checkpoint::identity`] of the checkpoint with that state; `None` if it was not saved.
    pub(crate) checkpoint: Option<String>,
    /// The end of the run that exports it, if its last step was not saved.
    pub(crate) end: Option<RunEnd>,
    /// The base of adapters.
    pub(crate) base: Option<BaseEntry>,
}

/// How a run ended that exported its model and did not save its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEnd {
    /// Steps it ran.
    pub steps: u64,
    /// Whether early stopping ended it.
    pub early: bool,
}

impl ExportSource {
    /// The state of a checkpoint.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Self {
        let (identity, manifest) = (checkpoint.identity().to_owned(), checkpoint.manifest());
        let base = manifest.lora.as_ref().map(|lora| lora.base.clone());
        Self { step: manifest.step, checkpoint: Some(identity), end: None, base }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct ExportRecord {
    step: u64,
    checkpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<RunEnd>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<BaseEntry>,
    /// Sizes of the weight files.
    weights: BTreeMap<String, u64>,
    /// The other files, which users may edit.
    files: Vec<String>,
}

/// Removes the record of an earlier export.
pub(crate) fn remove(folder: &Path) -> Result<(), ExportError> {
    let path = folder.join(RECORD);
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        removed => removed.map_err(failed(&path))?,
    }
    zeroth_base::sync_folder(folder).map_err(failed(folder))
}

/// Writes the record of a complete export.
pub(crate) fn write(
    folder: &Path,
    source: &ExportSource,
    weights: &[impl AsRef<Path>],
    files: &[String],
) -> Result<(), ExportError> {
    let mut lengths = BTreeMap::new();
    for path in weights.iter().map(AsRef::as_ref) {
        let length = fs::metadata(path).map_err(failed(path))?.len();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        lengths.insert(name.to_owned(), length);
    }
    let record = ExportRecord {
        step: source.step,
        checkpoint: source.checkpoint.clone(),
        end: source.end,
        base: source.base.clone(),
        weights: lengths,
        files: files.to_vec(),
    };
    let path = folder.join(RECORD);
    let text = serde_json::to_string_pretty(&record).expect("strings and numbers always serialise");
    publish(&path, format!("{text}\n").as_bytes()).map_err(|error| failed(&path)(error.source))
}

/// Checks that a folder holds the complete model of a checkpoint; the error describes what is missing.
pub fn check_export(model: &Path, checkpoint: &Checkpoint) -> Result<(), String> {
    if fs::symlink_metadata(model).is_err() {
        return Err(format!("{} does not exist", model.display()));
    }
    let Some(record) = read(&model.join(RECORD)) else {
        return Err(format!(
            "{} has no valid {RECORD}: it is incomplete, or was not exported by zeroth",
            model.display()
        ));
    };
    let step = checkpoint.manifest().step;
    if record.step != step {
        return Err(format!("{} was exported at step {}, not at step {step}", model.display(), record.step));
    }
    if record.checkpoint.as_deref() != Some(checkpoint.identity()) {
        let folder = checkpoint.folder().display();
        return Err(format!(
            "{} was exported from another state at step {step} than {folder}",
            model.display()
        ));
    }
    check_files(model, &record)
}

/// The end of a run that did not save its last step, by the complete model that it exported.
pub fn completed_run(model: &Path) -> Option<RunEnd> {
    let record = read(&model.join(RECORD))?;
    check_files(model, &record).ok()?;
    record.end
}

/// The base of a complete adapter that zeroth exported.
pub(crate) fn recorded_base(adapter: &Path) -> Option<BaseEntry> {
    let record = read(&adapter.join(RECORD))?;
    check_files(adapter, &record).ok()?;
    record.base
}

/// The step whose weights a complete exported model has.
pub fn exported_step(model: &Path) -> Option<u64> {
    let record = read(&model.join(RECORD))?;
    check_files(model, &record).ok()?;
    Some(record.step)
}

/// Checks that all files of a record exist, weights with their sizes.
fn check_files(model: &Path, record: &ExportRecord) -> Result<(), String> {
    let weights = record.weights.iter().map(|(name, bytes)| (name, Some(*bytes)));
    for (name, expected) in weights.chain(record.files.iter().map(|name| (name, None))) {
        let path = model.join(name);
        let found = fs::metadata(&path).ok().filter(fs::Metadata::is_file).map(|found| found.len());
        match (found, expected) {
            (None, _) => return Err(format!("{} is missing", path.display())),
            (Some(found), Some(expected)) if found != expected => {
                let (found, expected) = (grouped(found), grouped(expected));
                return Err(format!("{} has {found} bytes, expected {expected}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The names of all files that an export wrote to a folder; none without a record.
pub(crate) fn recorded_files(folder: &Path) -> BTreeSet<String> {
    let record = read(&folder.join(RECORD));
    record.map(|record| record.weights.into_keys().chain(record.files).collect()).unwrap_or_default()
}

/// Whether a folder's model was written by an export.
pub(crate) fn is_exported(folder: &Path) -> bool {
    read(&folder.join(RECORD)).is_some()
}

/// Reads a record; `None` if it is missing or invalid.
fn read(path: &Path) -> Option<ExportRecord> {
    let mut text = String::new();
    File::open(path).ok()?.take(LARGEST).read_to_string(&mut text).ok()?;
    let record: ExportRecord = serde_json::from_str(&text).ok()?;
    let is_name = |name: &String| {
        let mut parts = Path::new(name).components();
        matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
    };
    record.weights.keys().chain(&record.files).all(is_name).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_records_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(RECORD);
        assert!(read(&path).is_none());
        let good = r#"{"step": 3, "checkpoint": null, "weights": {"model.safetensors": 4}, "files": ["config.json"]}"#;
        fs::write(&path, good).unwrap();
        assert_eq!(read(&path).unwrap().step, 3);
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"step": -3, "checkpoint": null, "weights": {}, "files": []}"#,
            r#"{"step": 3, "checkpoint": null, "weights": {"../model.safetensors": 4}, "files": []}"#,
            r#"{"step": 3, "checkpoint": null, "weights": {}, "files": ["/etc/passwd"]}"#,
        ] {
            fs::write(&path, wrong).unwrap();
            assert!(read(&path).is_none(), "{wrong}");
        }
        // Removal is idempotent.
        fs::write(&path, good).unwrap();
        remove(folder.path()).unwrap();
        remove(folder.path()).unwrap();
        assert!(!path.exists());
    }
}
