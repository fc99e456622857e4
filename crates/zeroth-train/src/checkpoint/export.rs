//! Exports a checkpoint as a Hugging Face folder, streamed: the model is never held in memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::DType;
use zeroth_engine::State;
use zeroth_model::{ModelConfig, NewTensor, WeightWriter, WrittenWeights, adapter_config_json, table};

use super::enclosing::{enclosing_checkpoint, is_same_folder};
use super::lora_entry::LoraEntry;
use super::reader::Checkpoint;
use crate::ModelFiles;
use crate::export::stream;
use crate::export_error::{ExportError, failed};
use crate::export_record::ExportSource;
use crate::model_files::CONFIG;
use crate::run_files::MARKERS;
use crate::staged_files::StagedFiles;

/// Handling of a non-empty destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Refuse it.
    New,
    /// Replace the model in it; other files stay.
    Overwrite,
}

/// Writes a checkpoint's weights to `to` as `dtype`, split into files of at most `shard_bytes`, with the model's
/// config and tokenizer files; adapters go into one file, with adapter_config.json. The checkpoint must have been
/// verified.
pub fn export(
    checkpoint: &Checkpoint,
    to: &Path,
    destination: Destination,
    dtype: DType,
    shard_bytes: u64,
) -> Result<WrittenWeights, ExportError> {
    export_from(checkpoint, to, destination, dtype, shard_bytes, &ExportSource::of(checkpoint))
}

/// As [`export`], with the source to record.
pub(crate) fn export_from(
    checkpoint: &Checkpoint,
    to: &Path,
    destination: Destination,
    dtype: DType,
    shard_bytes: u64,
    source: &ExportSource,
) -> Result<WrittenWeights, ExportError> {
    let around = enclosing_checkpoint(to).or_else(|| {
        let own = [checkpoint.folder(), &checkpoint.model()].iter().any(|own| is_same_folder(to, own));
        own.then(|| checkpoint.folder().to_owned())
    });
    if let Some(around) = around {
        return Err(ExportError::InsideCheckpoint { folder: to.to_owned(), checkpoint: around });
    }
    refuse_taken(to, destination)?;
    fs::create_dir_all(to).map_err(failed(to))?;
    let files = ModelFiles::read(&checkpoint.model())?;
    let parameters = &checkpoint.manifest().model.parameters;
    let mut tensors: Vec<NewTensor> = parameters
        .iter()
        .map(|entry| NewTensor { name: entry.name.clone(), shape: entry.shape.clone(), dtype })
        .collect();
    let (beside, mut writer) = match &checkpoint.manifest().lora {
        Some(lora) => {
            // As PEFT sorts them.
            tensors.sort_by(|one, other| one.name.cmp(&other.name));
            let config = adapter_config(checkpoint, lora, &files)?;
            (
                StagedFiles::of_adapter(&files, to, &config)?,
                WeightWriter::create_adapter(to, tensors.clone())?,
            )
        }
        None => (
            StagedFiles::of_model(&files, to, dtype)?,
            WeightWriter::create(to, tensors.clone(), shard_bytes)?,
        ),
    };
    for tensor in &tensors {
        stream(tensor, Some(&mut writer), &mut |range, elements| {
            Ok(checkpoint.read_f32(State::Weights, &tensor.name, range, elements)?)
        })?;
    }
    beside.publish(writer, source)
}

/// The adapter_config.json of a checkpoint's adapters.
fn adapter_config(
    checkpoint: &Checkpoint,
    lora: &LoraEntry,
    files: &ModelFiles,
) -> Result<String, ExportError> {
    let path = checkpoint.model().join(CONFIG);
    let map = files.config().map_err(failed(&path))?;
    let model = ModelConfig::from_map(&map, &path.display().to_string());
    let model = model.map_err(|error| failed(&path)(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    Ok(adapter_config_json(&lora.lora(), &table(&model), &lora.base.name))
}

/// Refuses a run folder and, unless it is to be overwritten, a folder that is not empty.
pub(crate) fn refuse_taken(to: &Path, destination: Destination) -> Result<(), ExportError> {
    let Ok(entries) = fs::read_dir(to) else { return Ok(()) };
    let names: Vec<PathBuf> = entries.flatten().map(|entry| PathBuf::from(entry.file_name())).collect();
    let is_run = names.iter().any(|name| MARKERS.iter().any(|mark| name == Path::new(mark)));
    if is_run {
        return Err(ExportError::HoldsARun { folder: to.to_owned() });
    }
    if !names.is_empty() && destination == Destination::New {
        return Err(ExportError::NotEmpty { folder: to.to_owned() });
    }
    Ok(())
}
