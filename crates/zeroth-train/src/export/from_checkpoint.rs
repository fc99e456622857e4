//! Exports a checkpoint as a Hugging Face folder, streamed: the model is never held in memory.

use std::io;
use std::path::Path;

use zeroth_base::{DType, ExclusiveFolder};
use zeroth_engine::StateKind;
use zeroth_model::{
    ModelConfig, NewTensor, Parameter, WeightWriter, WrittenWeights, adapter_config_json, adapter_parameters,
    lora_table, table,
};

use super::error::{ExportError, failed};
use super::record::ExportSource;
use super::staged_files::StagedFiles;
use super::stream::stream;
use crate::checkpoint::{CONFIG, Checkpoint, ModelFiles, enclosing_checkpoint, is_same_folder};
use crate::run_folder::{MARKERS, exists, is_of_a_model};

/// Handling of a non-empty destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportDestination {
    /// Refuse it.
    New,
    /// Replace the model in it; other files stay.
    Overwrite,
}

/// Writes a checkpoint's weights to `to` as `dtype`, split into files of at most `shard_bytes`, with the model's
/// config and tokenizer files; adapters go into one file, with adapter_config.json. The checkpoint must have been
/// verified.
pub fn export_checkpoint(
    checkpoint: &Checkpoint,
    to: &Path,
    destination: ExportDestination,
    dtype: DType,
    shard_bytes: u64,
) -> Result<WrittenWeights, ExportError> {
    export_from(checkpoint, to, destination, dtype, shard_bytes, &ExportSource::of(checkpoint))
}

/// As [`export_checkpoint`], with the source to record.
pub(crate) fn export_from(
    checkpoint: &Checkpoint,
    to: &Path,
    destination: ExportDestination,
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
    let folder = open_destination(to, destination)?;
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
                StagedFiles::of_adapter(&files, folder, &config)?,
                WeightWriter::create_adapter(to, tensors.clone())?,
            )
        }
        None => (
            StagedFiles::of_model(&files, folder, dtype)?,
            WeightWriter::create(to, tensors.clone(), shard_bytes)?,
        ),
    };
    for parameter in parameters {
        stream(parameter, dtype, Some(&mut writer), &mut |range, elements| {
            Ok(checkpoint.read_f32(StateKind::Weights, &parameter.name, range, elements)?)
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

/// Opens the folder that a model is written to. Refuses a run folder and, unless it is to be overwritten, a folder that is not
/// empty.
pub(crate) fn open_destination(
    to: &Path,
    destination: ExportDestination,
) -> Result<ExclusiveFolder, ExportError> {
    if MARKERS.iter().any(|mark| exists(&to.join(mark))) {
        return Err(ExportError::HoldsARun { folder: to.to_owned() });
    }
    Ok(ExclusiveFolder::open(to, destination == ExportDestination::Overwrite, is_of_a_model)?)
}
