//! Exports a trained model as a Hugging Face folder, streamed tensor by tensor: no rank holds the whole model.
//!
//! The end of a run streams from the ranks, `checkpoint export` from files; both write the same folder.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use half::f16;
use zeroth_base::{DType, ExclusiveFolder};
use zeroth_engine::{Engine, StateKind};
use zeroth_graph::ParamId;
use zeroth_model::{
    DEFAULT_SHARD_BYTES, NewTensor, Parameter, ParameterKind, WeightWriter, adapter_config_json,
    adapter_parameters, to_stored_layout,
};

use super::error::ExportError;
use super::record::ExportSource;
use super::staged_files::StagedFiles;
use crate::job::{Job, LoraJob, base_table};
use crate::run_folder::is_of_a_model;
use crate::weights::first_not_finite;

/// Elements gathered at once.
const PIECE: u64 = 1 << 19;
/// Fetches a range of a parameter's elements.
pub(crate) type Fetch<'a> = &'a mut dyn FnMut(Range<u64>, &mut [f32]) -> Result<(), ExportError>;

impl Job {
    /// The dtype of the exported weights: as given, else that of the run; adapters are then f32, from their master weights.
    pub fn export_dtype(&self) -> DType {
        let of_run = if self.lora.is_some() { DType::F32 } else { self.settings.types.compute };
        self.save_dtype.unwrap_or(of_run)
    }
}

/// Writes the model to `folder` on rank 0, or the adapters of a LoRA run; collective over all ranks.
pub(crate) fn export(
    job: &Job,
    engine: &mut Engine<'_>,
    names: &[String],
    folder: &Path,
    source: &ExportSource,
) -> Result<(), ExportError> {
    let dtype = job.export_dtype();
    let parameters: Vec<&Parameter> = match job.lora {
        Some(_) => adapter_parameters(&job.table),
        None => job.table.iter().collect(),
    };
    let tensors: Vec<NewTensor> =
        parameters.iter().flat_map(|parameter| NewTensor::all_of(parameter, dtype)).collect();
    let create = || {
        let to = ExclusiveFolder::open(folder, true, is_of_a_model)?;
        if let Some(LoraJob { lora, base, .. }) = &job.lora {
            let config = adapter_config_json(lora, &base_table(&job.table), base);
            let beside = StagedFiles::of_adapter(&job.files, to, &config)?;
            return Ok((beside, WeightWriter::create_adapter(folder, tensors.clone())?));
        }
        let beside = StagedFiles::of_model(&job.files, to, dtype)?;
        Ok((beside, WeightWriter::create(folder, tensors.clone(), DEFAULT_SHARD_BYTES)?))
    };
    let created = (engine.rank() == 0).then(create).transpose();
    let (beside, mut writer) = propagate_failure(engine, source.step, created)?.unzip();
    let by_name: HashMap<&str, ParamId> = names.iter().map(String::as_str).zip(engine.params()).collect();
    for parameter in parameters {
        let Some(&param) = by_name.get(parameter.name.as_str()) else { continue };
        let streamed = stream(parameter, dtype, writer.as_mut(), &mut |range, elements| {
            Ok(engine.gather(StateKind::Weights, param, range, elements)?)
        });
        propagate_failure(engine, source.step, streamed)?;
    }
    let published = beside.zip(writer).map(|(beside, writer)| beside.publish(writer, source));
    propagate_failure(engine, source.step, published.transpose())?;
    Ok(())
}

/// Propagates failures of rank 0 to all ranks: it alone writes, and the others must not block in the next gather.
pub(crate) fn propagate_failure<T>(
    engine: &Engine<'_>,
    step: u64,
    own: Result<T, ExportError>,
) -> Result<T, ExportError> {
    // The ranks can no longer communicate.
    if let Err(ExportError::Run(_)) = own {
        return own;
    }
    let all = engine.all_gather(step, "export", &u64::from(own.is_ok()))?;
    if all[0] == 0 && own.is_ok() { Err(ExportError::OtherRank) } else { own }
}

/// Fetches a parameter in pieces and writes them if there is a writer (rank 0), into the tensors it is stored as. After a
/// write error, the remaining pieces are still fetched, because fetching is collective.
pub(crate) fn stream(
    parameter: &Parameter,
    dtype: DType,
    mut writer: Option<&mut WeightWriter>,
    fetch: Fetch<'_>,
) -> Result<(), ExportError> {
    let total = parameter.elements();
    let mut elements = vec![0.0f32; PIECE.min(total) as usize];
    // The outer matrices of experts' adapters are stored in another order: they are written once they are whole.
    let is_reordered = parameter.kind == ParameterKind::LoraB && parameter.shape.len() > 2;
    let mut whole = Vec::new();
    let mut written = Ok(());
    for first in (0..total).step_by(PIECE as usize) {
        let range = first..(first + PIECE).min(total);
        let piece = &mut elements[..(range.end - range.start) as usize];
        fetch(range, piece)?;
        if let Some(writer) = writer.as_deref_mut().filter(|_| written.is_ok()) {
            written = check(parameter, dtype, first, piece);
            if is_reordered {
                whole.extend_from_slice(piece);
            } else if written.is_ok() {
                written = writer.append_parameter(parameter, piece).map_err(Into::into);
            }
        }
    }
    match writer.filter(|_| is_reordered && written.is_ok()) {
        Some(writer) => Ok(writer.append_parameter(parameter, &to_stored_layout(parameter, whole))?),
        None => written,
    }
}

/// Checks that elements of a parameter, from element `first` on, are all representable.
fn check(parameter: &Parameter, dtype: DType, first: u64, piece: &[f32]) -> Result<(), ExportError> {
    if let Some(place) = first_not_finite(piece) {
        let (name, value) = (parameter.name.clone(), piece[place]);
        return Err(ExportError::NotFinite { name, element: first + place as u64, value });
    }
    let is_lost = |value: &&f32| f16::from_f32(**value).is_infinite();
    if let Some(value) = piece.iter().filter(|_| dtype == DType::F16).find(is_lost) {
        return Err(ExportError::OutOfRange { name: parameter.name.clone(), value: *value });
    }
    Ok(())
}
