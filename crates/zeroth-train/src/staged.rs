//! A model's small files on their way to a folder: all of them under hidden names first, then renamed.
//!
//! The folder may be the one they come from, by whatever link: nothing is written to until all of it has been read, and a
//! rename replaces a name, not the file that other names lead to.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zeroth_base::{DType, sync_folder};
use zeroth_model::{WeightWriter, WrittenWeights};

use crate::ModelFiles;
use crate::export::{CONFIG, ExportError, failed};
use crate::export_record::{self, ExportSource};

/// Files that are whole and synced under hidden names. Dropped before [`StagedFiles::publish`], they are removed.
#[derive(Debug)]
pub(crate) struct StagedFiles {
    folder: PathBuf,
    names: Vec<String>,
}

impl StagedFiles {
    /// The tokenizer's files as they were read, and config.json with the type the weights have now.
    pub(crate) fn of_model(from: &ModelFiles, to: &Path, dtype: DType) -> Result<Self, ExportError> {
        let mut staged = Self { folder: to.to_owned(), names: Vec::new() };
        for (name, mut source) in from.iter().filter(|(name, _)| *name != CONFIG) {
            staged.add(name, |file| io::copy(&mut source, file).map(drop))?;
        }
        let config = to.join(CONFIG);
        let text = from.config().and_then(|map| with_dtype(map, dtype)).map_err(failed(&config))?;
        // Published last: a folder that was not finished is not taken for a model.
        staged.add(CONFIG, |file| file.write_all(text.as_bytes()))?;
        Ok(staged)
    }

    fn add(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<(), ExportError> {
        let target = self.folder.join(name);
        // A rename onto a folder fails only after the work is done: say it first.
        if fs::symlink_metadata(&target).is_ok_and(|found| found.is_dir()) {
            let source = io::Error::new(io::ErrorKind::IsADirectory, "a folder of that name is there");
            return Err(ExportError::Io { path: target, source });
        }
        let path = self.hidden(name);
        // Before it is there: dropping removes what is half written.
        self.names.push(name.to_owned());
        let written = File::create(&path).and_then(|mut file| {
            write(&mut file)?;
            file.sync_all()
        });
        written.map_err(failed(&target))
    }

    /// Gives the weights and the files their names, and then writes down what they are of.
    pub(crate) fn publish(
        self,
        weights: WeightWriter,
        source: &ExportSource,
    ) -> Result<WrittenWeights, ExportError> {
        export_record::remove(&self.folder)?;
        let written = weights.finish()?;
        for name in &self.names {
            let path = self.folder.join(name);
            fs::rename(self.hidden(name), &path).map_err(failed(&path))?;
        }
        sync_folder(&self.folder).map_err(failed(&self.folder))?;
        export_record::write(&self.folder, source, &written.files, &self.names)?;
        Ok(written)
    }

    /// Marked with our process, so that two writers do not share one unfinished file.
    fn hidden(&self, name: &str) -> PathBuf {
        self.folder.join(format!(".{name}.unfinished-{}", std::process::id()))
    }
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        for name in &self.names {
            // Best effort: the error that stopped the writing is the one to tell.
            let _ = fs::remove_file(self.hidden(name));
        }
    }
}

fn with_dtype(mut config: Map<String, Value>, dtype: DType) -> io::Result<String> {
    let key = if config.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
    let name = match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
    };
    config.insert(key.to_owned(), name.into());
    Ok(format!("{}\n", serde_json::to_string_pretty(&config)?))
}
