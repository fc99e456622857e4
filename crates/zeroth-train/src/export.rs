//! A trained model as a Hugging Face folder, streamed parameter by parameter: no rank ever holds the model.
//!
//! The end of a run streams from the ranks, `checkpoint export` from files; both write the same folder.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::f16;
use zeroth_base::DType;
use zeroth_model::{DEFAULT_SHARD_BYTES, NewTensor, WeightWriter, WeightsError};
use zeroth_step::run::{Engine, RunError, State};

use crate::Job;
use crate::checkpoint::CheckpointError;
use crate::export_record::ExportSource;
use crate::staged::StagedFiles;

/// Elements that are gathered at once.
const PIECE: u64 = 1 << 20;
/// The file that makes a folder a model's.
pub(crate) const CONFIG: &str = "config.json";
/// Files of a model's folder that belong to the model and not to its weights, its config.json apart.
pub(crate) const BESIDE: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// A model that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Weights did not come together.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Weights could not be read from a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights could not be written.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A weight that the type asked for does not have.
    #[error("`{name}` holds {value}, and fp16 ends at 65504: write the model in bf16 or fp32 (--dtype bf16)")]
    OutOfRange {
        /// The parameter.
        name: String,
        /// The weight.
        value: f32,
    },
    /// Something is there.
    #[error("{} is not empty: give another folder, or replace the model in it with --overwrite", folder.display())]
    NotEmpty {
        /// The folder.
        folder: PathBuf,
    },
    /// It would change what a checkpoint's checksums are of.
    #[error(
        "{} lies in the checkpoint {}, and a model written there would damage it: give a folder outside of it",
        folder.display(), checkpoint.display()
    )]
    InsideCheckpoint {
        /// The folder.
        folder: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A run is there.
    #[error("{} holds a run, and its config.json would be written over: give another folder", folder.display())]
    HoldsARun {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of the model it comes from could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another file could not.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Gives a range of a parameter's elements.
pub(crate) type Fetch<'a> = &'a mut dyn FnMut(Range<u64>, &mut [f32]) -> Result<(), ExportError>;

/// Writes the model to `folder` on rank 0; all ranks must call it. 16-bit runs give bf16 weights, others f32.
pub(crate) fn export(
    job: &Job,
    engine: &mut Engine<'_>,
    names: &[String],
    folder: &Path,
    source: &ExportSource,
) -> Result<(), ExportError> {
    let dtype = if job.settings.types.run == DType::F32 { DType::F32 } else { DType::Bf16 };
    let tensors: Vec<NewTensor> = job.table.iter().map(|parameter| NewTensor::of(parameter, dtype)).collect();
    let (mut beside, mut writer) = (None, None);
    if engine.rank() == 0 {
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
        beside = Some(StagedFiles::of_model(&job.folder, folder, dtype)?);
        writer = Some(WeightWriter::create(folder, tensors.clone(), DEFAULT_SHARD_BYTES)?);
    }
    let params = engine.params();
    for tensor in &tensors {
        let Some(param) = names.iter().position(|name| *name == tensor.name).map(|place| params[place])
        else {
            continue;
        };
        stream(tensor, writer.as_mut(), &mut |range, elements| {
            Ok(engine.gather(State::Weights, param, range, elements)?)
        })?;
    }
    if let (Some(writer), Some(beside)) = (writer, beside) {
        beside.publish(writer, source)?;
    }
    Ok(())
}

/// Fetches a parameter piece by piece, and writes it where there is a writer: only rank 0 has one.
pub(crate) fn stream(
    tensor: &NewTensor,
    mut writer: Option<&mut WeightWriter>,
    fetch: Fetch<'_>,
) -> Result<(), ExportError> {
    let total: u64 = tensor.shape.iter().product();
    let mut elements = vec![0.0f32; PIECE.min(total) as usize];
    for first in (0..total).step_by(PIECE as usize) {
        let range = first..(first + PIECE).min(total);
        let piece = &mut elements[..(range.end - range.start) as usize];
        fetch(range, piece)?;
        let Some(writer) = writer.as_deref_mut() else { continue };
        let is_lost = |value: &&f32| value.is_finite() && f16::from_f32(**value).is_infinite();
        if let Some(value) = piece.iter().filter(|_| tensor.dtype == DType::F16).find(is_lost) {
            return Err(ExportError::OutOfRange { name: tensor.name.clone(), value: *value });
        }
        writer.append_f32(&tensor.name, piece)?;
    }
    Ok(())
}

pub(crate) fn failed(path: &Path) -> impl FnOnce(io::Error) -> ExportError + '_ {
    move |source| ExportError::Io { path: path.to_owned(), source }
}
