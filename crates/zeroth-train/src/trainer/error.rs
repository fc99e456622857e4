//! Training errors.

use zeroth_data::DataError;
use zeroth_engine::RunError;
use zeroth_model::WeightsError;

use crate::distill::{TeacherCacheError, TeacherError};
use crate::export::ExportError;
use crate::resume::{ResumeError, SaveError};
use crate::weights::LoraWeightsError;

/// An error that ends a rank's training.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum TrainError {
    #[error(transparent)]
    Run(Box<RunError>),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Lora(Box<LoraWeightsError>),
    #[error(transparent)]
    Teacher(Box<TeacherError>),
    #[error(transparent)]
    TeacherCache(Box<TeacherCacheError>),
    #[error(transparent)]
    Resume(Box<ResumeError>),
    #[error("{0}")]
    Save(#[source] Box<SaveError>),
    #[error(transparent)]
    Export(Box<ExportError>),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(
        "step {step}: {what} not finite at a loss scale of {scale}, the minimum set by fp16.min_loss_scale; train in \
         bf16, or with a lower learning rate"
    )]
    AtMinScale { step: u64, what: String, scale: f64 },
    #[error(
        "step {step}: {what} not finite (loss {loss}); the update was not applied, and the weights are those after step \
         {}. Samples of the step, numbered from 0 in file order: {samples}. Try a lower learning rate, inspect these \
         samples, or tolerate N such steps with --max-skipped-steps N", step - 1
    )]
    NotFinite {
        step: u64,
        what: String,
        loss: f64,
        /// The samples of the affected rank, or of all ranks if it is unknown.
        samples: String,
    },
}

impl From<RunError> for TrainError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl From<LoraWeightsError> for TrainError {
    fn from(error: LoraWeightsError) -> Self {
        Self::Lora(Box::new(error))
    }
}

impl From<TeacherError> for TrainError {
    fn from(error: TeacherError) -> Self {
        Self::Teacher(Box::new(error))
    }
}

impl From<TeacherCacheError> for TrainError {
    fn from(error: TeacherCacheError) -> Self {
        Self::TeacherCache(Box::new(error))
    }
}

impl From<ResumeError> for TrainError {
    fn from(error: ResumeError) -> Self {
        Self::Resume(Box::new(error))
    }
}

impl From<SaveError> for TrainError {
    fn from(error: SaveError) -> Self {
        Self::Save(Box::new(error))
    }
}

impl From<ExportError> for TrainError {
    fn from(error: ExportError) -> Self {
        Self::Export(Box::new(error))
    }
}
