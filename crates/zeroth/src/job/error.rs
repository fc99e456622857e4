//! Why a job cannot be resolved.

use zeroth_config::checked::ConfigError;
use zeroth_config::resolve::ResolveError;
use zeroth_model::ModelError;
use zeroth_train::checkpoint::CheckpointError;
use zeroth_train::{ResumeError, RunLengthError, ScheduleError};

use super::data_error::DataRequestError;
use super::handoff::InputsError;
use super::lora::LoraRequestError;
use super::plan::PlanRequestError;
use super::resume::ResumeRequestError;
use super::teacher::DistillRequestError;

/// A request that makes no job. The message says what to change.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum JobError {
    #[error(transparent)]
    Inputs(#[from] InputsError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Lora(#[from] LoraRequestError),
    #[error(transparent)]
    Distillation(#[from] DistillRequestError),
    #[error(transparent)]
    Plan(#[from] PlanRequestError),
    #[error(transparent)]
    Data(Box<DataRequestError>),
    #[error(transparent)]
    Resume(Box<ResumeRequestError>),
    #[error(transparent)]
    RunLength(#[from] RunLengthError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(
        "--device cuda needs a GPU, but none was found: `zeroth doctor` shows what was probed; --device cpu trains \
         on the CPU"
    )]
    NoGpu,
    #[error("the train batch is empty")]
    EmptyBatch,
    #[error("the config uses features that are not yet built:\n{}", .0.join("\n"))]
    UnsupportedKeys(Vec<String>),
}

impl From<DataRequestError> for JobError {
    fn from(error: DataRequestError) -> Self {
        Self::Data(Box::new(error))
    }
}

impl From<ResumeRequestError> for JobError {
    fn from(error: ResumeRequestError) -> Self {
        Self::Resume(Box::new(error))
    }
}

impl From<ResumeError> for JobError {
    fn from(error: ResumeError) -> Self {
        ResumeRequestError::from(error).into()
    }
}

impl From<CheckpointError> for JobError {
    fn from(error: CheckpointError) -> Self {
        ResumeRequestError::from(error).into()
    }
}
