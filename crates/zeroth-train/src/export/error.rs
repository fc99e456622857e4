//! Export errors.

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::{ExclusiveFolderError, LockError, format_bytes, grouped};
use zeroth_engine::RunError;
use zeroth_model::{LoraError, ModelError, WeightsError};

use crate::checkpoint::{CheckpointError, ModelFilesError};

/// An error exporting a model.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum ExportError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(
        "the model was not written: `{name}` is not finite (element {} is {value}); train with a lower --learning-rate, or \
         export an earlier checkpoint", grouped(*element)
    )]
    NotFinite { name: String, element: u64, value: f32 },
    #[error(
        "the model was not written: the checkpoint of step {step}, the best one (--load-best-model-at-end), is gone. The last \
         step was saved: `zeroth checkpoint export` writes its model, or that of another checkpoint"
    )]
    NoBest { step: u64 },
    #[error("the model was not written: rank 0 failed")]
    OtherRank,
    #[error(
        "`{name}` holds {value}, beyond fp16's maximum of 65504: export the model in bf16 or fp32 (--dtype bf16)"
    )]
    OutOfRange { name: String, value: f32 },
    #[error("{} is not empty: give another folder, or replace the model in it with --overwrite", folder.display())]
    NotEmpty { folder: PathBuf },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(
        "{} is inside the checkpoint {}, and a model written there would invalidate its checksums: give a folder outside of it",
        folder.display(), checkpoint.display()
    )]
    InsideCheckpoint { folder: PathBuf, checkpoint: PathBuf },
    #[error("{} is a run folder, whose config.json would be overwritten: give another folder", folder.display())]
    HoldsARun { folder: PathBuf },
    #[error(
        "{} holds {found}, which no export of zeroth wrote: adapters beside a model would be loaded with it; give another folder",
        folder.display()
    )]
    HoldsAModel { folder: PathBuf, found: String },
    #[error(
        "{} is in the folder of the {what}, {}, which is only read: give a folder outside of it", folder.display(), input.display()
    )]
    InsideInput { folder: PathBuf, what: &'static str, input: PathBuf },
    #[error(
        "a merged model needs {} in {}, but the disk has {}: nothing was written; give a folder on a larger disk, or a smaller          --dtype", format_bytes(*needed), folder.display(), format_bytes(*free)
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    #[error("{} has no weights (*.safetensors), and adapters are merged into the weights of their base", folder.display())]
    NoBase { folder: PathBuf },
    #[error(
        "nothing was written: the adapters were trained over {saved}, and {} has other weights; give that base with --model, or --allow-other-base to merge \
         them into this one",
        given.display()
    )]
    AnotherBase { saved: String, given: PathBuf },
    #[error("{} is a checkpoint of full training and has no adapters to merge: leave out --merge", checkpoint.display())]
    NoAdapters { checkpoint: PathBuf },
    #[error(transparent)]
    Base(#[from] ModelError),
    #[error("the adapters do not fit the base model: {0}")]
    Adapters(#[from] LoraError),
    #[error(transparent)]
    ModelFiles(#[from] ModelFilesError),
    #[error("cannot write {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl From<ExclusiveFolderError> for ExportError {
    fn from(error: ExclusiveFolderError) -> Self {
        match error {
            ExclusiveFolderError::NotEmpty { folder } => Self::NotEmpty { folder },
            ExclusiveFolderError::Lock(error) => Self::Lock(error),
            ExclusiveFolderError::Io { folder, source, .. } => Self::Io { path: folder, source },
        }
    }
}

/// Maps an I/O error of a write to `path`.
pub(crate) fn failed(path: &Path) -> impl FnOnce(io::Error) -> ExportError + '_ {
    move |source| ExportError::Io { path: path.to_owned(), source }
}
