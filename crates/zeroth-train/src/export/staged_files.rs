//! Stages a model's config and tokenizer files under hidden names, then renames them into place.
//!
//! The destination may be the source folder, through any symlink: nothing is overwritten before everything has been
//! read, and a rename replaces a name without touching the file behind other links.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zeroth_base::{
    DType, ExclusiveFolder, create_unfinished, publish_unfinished, remove_unfinished, sync_folder,
    unfinished_path, while_publishing,
};
use zeroth_model::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightWriter, WrittenWeights, is_weight_file};

use super::error::{ExportError, failed};
use super::record::{self, ExportSource, RECORD};
use crate::checkpoint::{CONFIG, GENERATION_CONFIG, ModelFiles};

/// Complete, synced files under hidden names. Removed on drop unless [`StagedFiles::publish`] succeeded.
#[derive(Debug)]
pub(crate) struct StagedFiles {
    names: Vec<String>,
    folder: ExclusiveFolder,
}

impl StagedFiles {
    /// Stages the snapshotted tokenizer files, and config.json with the dtype of the exported weights.
    pub(crate) fn of_model(
        from: &ModelFiles,
        to: ExclusiveFolder,
        dtype: DType,
    ) -> Result<Self, ExportError> {
        let config = to.path().join(CONFIG);
        let mut staged = Self { folder: to, names: Vec::new() };
        for (name, mut source) in from.iter().filter(|(name, _)| *name != CONFIG) {
            staged.add(name, |file| io::copy(&mut source, file).map(drop))?;
        }
        let text = from.config().and_then(|map| with_dtype(map, dtype)).map_err(failed(&config))?;
        // Renamed last: an incomplete folder is not taken for a model.
        staged.add(CONFIG, |file| file.write_all(text.as_bytes()))?;
        Ok(staged)
    }

    /// Stages the snapshotted tokenizer files, and adapter_config.json.
    pub(crate) fn of_adapter(
        from: &ModelFiles,
        to: ExclusiveFolder,
        config: &str,
    ) -> Result<Self, ExportError> {
        refuse_model_of_others(to.path())?;
        let mut staged = Self { folder: to, names: Vec::new() };
        // The base's own files: beside them, a folder would be taken for a whole model.
        let is_of_base = |name: &str| name == CONFIG || name == GENERATION_CONFIG;
        for (name, mut source) in from.iter().filter(|(name, _)| !is_of_base(name)) {
            staged.add(name, |file| io::copy(&mut source, file).map(drop))?;
        }
        // Renamed last: an incomplete folder is not taken for an adapter.
        staged.add(ADAPTER_CONFIG, |file| file.write_all(config.as_bytes()))?;
        Ok(staged)
    }

    fn add(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<(), ExportError> {
        let target = self.folder.path().join(name);
        // Check early: a rename onto a folder would fail only at the end.
        if fs::symlink_metadata(&target).is_ok_and(|found| found.is_dir()) {
            let source = io::Error::new(io::ErrorKind::IsADirectory, "a folder of that name exists");
            return Err(ExportError::Io { path: target, source });
        }
        let path = self.hidden(name);
        // Registered before it exists, so that drop removes a half-written file.
        self.names.push(name.to_owned());
        let written = create_unfinished(&path).and_then(|mut file| {
            write(&mut file)?;
            file.sync_all()
        });
        written.map_err(failed(&target))
    }

    /// Renames the weights and files into place, then writes the export record. What an earlier export wrote beside them is
    /// removed, and so is an adapter beside a model: transformers would load both, one on top of the other.
    pub(crate) fn publish(
        self,
        weights: WeightWriter,
        source: &ExportSource,
    ) -> Result<WrittenWeights, ExportError> {
        let _publishing = while_publishing();
        let names: Vec<String> =
            weights.names().map(str::to_owned).chain(self.names.iter().cloned()).collect();
        let names = names.iter().map(String::as_str).chain([RECORD]);
        let list = self.folder.announce(names).map_err(failed(self.folder.path()))?;
        let written = self.replace(weights, source);
        if let (Err(_), Some(list)) = (&written, list) {
            list.undo();
        }
        written
    }

    fn replace(&self, weights: WeightWriter, source: &ExportSource) -> Result<WrittenWeights, ExportError> {
        let folder = self.folder.path();
        // Before the record, which a stopped export would no longer have.
        for name in self.obsolete(&weights) {
            let path = folder.join(name);
            fs::remove_file(&path).map_err(failed(&path))?;
        }
        record::remove(folder)?;
        let written = weights.finish()?;
        for name in &self.names {
            let path = folder.join(name);
            publish_unfinished(&self.hidden(name), &path).map_err(failed(&path))?;
        }
        sync_folder(folder).map_err(failed(folder))?;
        record::write(folder, source, &written.files, &self.names)?;
        Ok(written)
    }

    /// Files in the folder that belong to what is replaced, and are not replaced themselves.
    fn obsolete(&self, weights: &WeightWriter) -> Vec<String> {
        let is_model = self.names.iter().any(|name| name == CONFIG);
        let mut earlier = record::recorded_files(self.folder.path());
        if is_model {
            // The writer of a model's weights removes earlier ones once the new ones are in place.
            earlier.retain(|name| !is_weight_file(name));
            earlier.extend([ADAPTER_CONFIG, ADAPTER_WEIGHTS].map(str::to_owned));
        }
        let is_new =
            |name: &str| self.names.iter().any(|new| new == name) || weights.names().any(|new| new == name);
        let is_file = |name: &str| {
            fs::symlink_metadata(self.folder.path().join(name)).is_ok_and(|found| !found.is_dir())
        };
        earlier.into_iter().filter(|name| !is_new(name) && is_file(name)).collect()
    }

    fn hidden(&self, name: &str) -> PathBuf {
        unfinished_path(self.folder.path(), name)
    }
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        for name in &self.names {
            remove_unfinished(&self.hidden(name));
        }
    }
}

/// Refuses to put adapters beside the model of somebody else, which may be their base: it would be loaded with them, and it
/// is not removed.
fn refuse_model_of_others(folder: &Path) -> Result<(), ExportError> {
    let recorded = record::recorded_files(folder);
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let of_others =
        names.filter(|name| (name == CONFIG || is_weight_file(name)) && !recorded.contains(name)).min();
    match of_others {
        Some(found) => Err(ExportError::HoldsAModel { folder: folder.to_owned(), found }),
        None => Ok(()),
    }
}

fn with_dtype(mut config: Map<String, Value>, dtype: DType) -> io::Result<String> {
    let name = match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
    };
    // transformers 4 reads the first, 5 the second: a config has one of them, or both.
    let given: Vec<&str> =
        ["torch_dtype", "dtype"].into_iter().filter(|key| config.contains_key(*key)).collect();
    for key in if given.is_empty() { vec!["dtype"] } else { given } {
        config.insert(key.to_owned(), name.into());
    }
    Ok(format!("{}\n", serde_json::to_string_pretty(&config)?))
}
