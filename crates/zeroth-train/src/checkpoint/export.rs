//! Exports a checkpoint as a Hugging Face folder, streamed: the model is never held in memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::DType;
use zeroth_engine::State;
use zeroth_model::{
    ModelConfig, NewTensor, Parameter, WeightWriter, WrittenWeights, adapter_config_json, adapter_parameters,
    lora_table, table,
};

use super::enclosing::{enclosing_checkpoint, is_same_folder};
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
    let lora = checkpoint.manifest().lora.as_ref();
    let base = table(&model_config(checkpoint, &files)?);
    let known = match lora {
        Some(lora) => lora_table(&base, &lora.lora())?,
        None => base.clone(),
    };
    checkpoint.check_model(&checkpoint.manifest().model.model_type, &known)?;
    let parameters: Vec<&Parameter> =
        if lora.is_some() { adapter_parameters(&known) } else { known.iter().collect() };
    let tensors: Vec<NewTensor> =
        parameters.iter().flat_map(|parameter| NewTensor::all_of(parameter, dtype)).collect();
    let (beside, mut writer) = match lora {
        Some(lora) => {
            let config = adapter_config_json(&lora.lora(), &base, &lora.base.name);
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
    for parameter in parameters {
        stream(parameter, dtype, Some(&mut writer), &mut |range, elements| {
            Ok(checkpoint.read_f32(State::Weights, &parameter.name, range, elements)?)
        })?;
    }
    beside.publish(writer, source)
}

/// The config of a checkpoint's model.
fn model_config(checkpoint: &Checkpoint, files: &ModelFiles) -> Result<ModelConfig, ExportError> {
    let path = checkpoint.model().join(CONFIG);
    let map = files.config().map_err(failed(&path))?;
    let model = ModelConfig::from_map(&map, &path.display().to_string());
    model.map_err(|error| failed(&path)(io::Error::new(io::ErrorKind::InvalidData, error)))
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
