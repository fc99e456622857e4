//! export.json in a model's folder: which checkpoint's weights it holds, and in which files.
//!
//! It goes before anything of a model is replaced, and comes when all of it is there: a model with it is whole.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use zeroth_base::{grouped, publish};

use crate::checkpoint::Checkpoint;
use crate::export::{ExportError, failed};

/// The file.
pub(crate) const RECORD: &str = "export.json";
/// Bytes of one: those of a model of a thousand files have about 60 kB.
const LARGEST: u64 = 16 << 20;

/// The state that a model is exported from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExportSource {
    /// Steps that were made.
    pub(crate) step: u64,
    /// [`Checkpoint::identity`] of the checkpoint with that state; none where it was not saved.
    pub(crate) checkpoint: Option<String>,
}

impl ExportSource {
    /// The state of a checkpoint.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Self {
        Self { step: checkpoint.manifest().step, checkpoint: Some(checkpoint.identity().to_owned()) }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    step: u64,
    checkpoint: Option<String>,
    /// Bytes of the files that hold weights.
    weights: BTreeMap<String, u64>,
    /// The other files: users may edit them.
    files: Vec<String>,
}

/// Takes the record of an earlier export away.
pub(crate) fn remove(folder: &Path) -> Result<(), ExportError> {
    let path = folder.join(RECORD);
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        removed => removed.map_err(failed(&path))?,
    }
    zeroth_base::sync_folder(folder).map_err(failed(folder))
}

/// Writes the record of an export that is whole.
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
    let record = Record {
        step: source.step,
        checkpoint: source.checkpoint.clone(),
        weights: lengths,
        files: files.to_vec(),
    };
    let path = folder.join(RECORD);
    let text = serde_json::to_string_pretty(&record).expect("texts and numbers always have a JSON");
    publish(&path, format!("{text}\n").as_bytes()).map_err(|error| failed(&path)(error.source))
}

/// Whether a folder holds the model of a checkpoint, all its files with it. What is missing else, in words.
pub fn check_export(model: &Path, checkpoint: &Checkpoint) -> Result<(), String> {
    if fs::symlink_metadata(model).is_err() {
        return Err(format!("{} is not there", model.display()));
    }
    let Some(record) = read(&model.join(RECORD)) else {
        return Err(format!("{} is not known to be of a checkpoint, or not whole", model.display()));
    };
    let step = checkpoint.manifest().step;
    if record.step != step {
        return Err(format!("{} is of step {}, not of step {step}", model.display(), record.step));
    }
    if record.checkpoint.as_deref() != Some(checkpoint.identity()) {
        let folder = checkpoint.folder().display();
        return Err(format!("{} is of another state after {step} steps than {folder}", model.display()));
    }
    let weights = record.weights.iter().map(|(name, bytes)| (name, Some(*bytes)));
    for (name, expected) in weights.chain(record.files.iter().map(|name| (name, None))) {
        let path = model.join(name);
        let found = fs::metadata(&path).ok().filter(fs::Metadata::is_file).map(|found| found.len());
        match (found, expected) {
            (None, _) => return Err(format!("{} is missing", path.display())),
            (Some(found), Some(expected)) if found != expected => {
                let (found, expected) = (grouped(found), grouped(expected));
                return Err(format!("{} has {found} bytes and had {expected}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether an export of ours wrote the model in a folder.
pub(crate) fn is_exported(folder: &Path) -> bool {
    read(&folder.join(RECORD)).is_some()
}

/// A record; none where it is missing or no export wrote it.
fn read(path: &Path) -> Option<Record> {
    let mut text = String::new();
    File::open(path).ok()?.take(LARGEST).read_to_string(&mut text).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
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
    fn a_record_that_no_export_wrote_is_none() {
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
        // It goes before the files that it names.
        fs::write(&path, good).unwrap();
        remove(folder.path()).unwrap();
        remove(folder.path()).unwrap();
        assert!(!path.exists());
    }
}
