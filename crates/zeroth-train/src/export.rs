//! A trained model as a Hugging Face folder, streamed parameter by parameter: no rank ever holds the model.
//!
//! The end of a run streams from the ranks, `checkpoint export` from files; both write the same folder.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::f16;
use zeroth_base::{DType, grouped};
use zeroth_engine::{Engine, RunError, State};
use zeroth_model::{DEFAULT_SHARD_BYTES, NewTensor, WeightWriter, WeightsError};

use crate::Job;
use crate::checkpoint::CheckpointError;
use crate::export_record::ExportSource;
use crate::finite::first_not_finite;
use crate::meeting::tell_all;
use crate::model_files::ModelFilesError;
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
    /// A weight that is no number.
    #[error(
        "the model was not written: `{name}` is not finite (element {} is {value}); train with a lower --learning-rate, or \
         export an earlier checkpoint", grouped(*element)
    )]
    NotFinite {
        /// The parameter.
        name: String,
        /// The first element that is not.
        element: u64,
        /// What it is.
        value: f32,
    },
    /// Rank 0, which writes the model, could not; it says why.
    #[error("the model was not written: rank 0 failed")]
    OtherRank,
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
    #[error(transparent)]
    ModelFiles(#[from] ModelFilesError),
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
    let dtype = if job.settings.types.compute == DType::F32 { DType::F32 } else { DType::Bf16 };
    let tensors: Vec<NewTensor> = job.table.iter().map(|parameter| NewTensor::of(parameter, dtype)).collect();
    let create = || {
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
        let beside = StagedFiles::of_model(&job.files, folder, dtype)?;
        Ok((beside, WeightWriter::create(folder, tensors.clone(), DEFAULT_SHARD_BYTES)?))
    };
    let created = (engine.rank() == 0).then(create).transpose();
    let (beside, mut writer) = agreed(engine, source.step, created)?.unzip();
    let params = engine.params();
    for tensor in &tensors {
        let Some(param) = names.iter().position(|name| *name == tensor.name).map(|place| params[place])
        else {
            continue;
        };
        let streamed = stream(tensor, writer.as_mut(), &mut |range, elements| {
            Ok(engine.gather(State::Weights, param, range, elements)?)
        });
        agreed(engine, source.step, streamed)?;
    }
    let published = beside.zip(writer).map(|(beside, writer)| beside.publish(writer, source));
    agreed(engine, source.step, published.transpose())?;
    Ok(())
}

/// What a rank has, where rank 0 has not failed: it alone writes, and the others must not wait for one that gave up.
fn agreed<T>(engine: &Engine<'_>, step: u64, own: Result<T, ExportError>) -> Result<T, ExportError> {
    // Ranks have lost each other: there is nobody to tell.
    if let Err(ExportError::Run(_)) = own {
        return own;
    }
    let told = tell_all(engine, step, "export", &u64::from(own.is_ok()))?;
    if told[0] == 0 && own.is_ok() { Err(ExportError::OtherRank) } else { own }
}

/// Fetches a parameter piece by piece, and writes it where there is a writer: only rank 0 has one. Where it cannot, the rest is
/// fetched all the same, because other ranks take part.
pub(crate) fn stream(
    tensor: &NewTensor,
    mut writer: Option<&mut WeightWriter>,
    fetch: Fetch<'_>,
) -> Result<(), ExportError> {
    let total: u64 = tensor.shape.iter().product();
    let mut elements = vec![0.0f32; PIECE.min(total) as usize];
    let mut written = Ok(());
    for first in (0..total).step_by(PIECE as usize) {
        let range = first..(first + PIECE).min(total);
        let piece = &mut elements[..(range.end - range.start) as usize];
        fetch(range, piece)?;
        if let Some(writer) = writer.as_deref_mut().filter(|_| written.is_ok()) {
            written = write(tensor, writer, first, piece);
        }
    }
    written
}

/// Writes elements of a parameter, of which `first` is the first, where all of them can be.
fn write(
    tensor: &NewTensor,
    writer: &mut WeightWriter,
    first: u64,
    piece: &[f32],
) -> Result<(), ExportError> {
    if let Some(place) = first_not_finite(piece) {
        let (name, value) = (tensor.name.clone(), piece[place]);
        return Err(ExportError::NotFinite { name, element: first + place as u64, value });
    }
    let is_lost = |value: &&f32| f16::from_f32(**value).is_infinite();
    if let Some(value) = piece.iter().filter(|_| tensor.dtype == DType::F16).find(is_lost) {
        return Err(ExportError::OutOfRange { name: tensor.name.clone(), value: *value });
    }
    Ok(writer.append_f32(&tensor.name, piece)?)
}

pub(crate) fn failed(path: &Path) -> impl FnOnce(io::Error) -> ExportError + '_ {
    move |source| ExportError::Io { path: path.to_owned(), source }
}
