//! Why a job cannot be resolved.

use zeroth_config::checked::ConfigError;
use zeroth_config::resolve::ResolveError;
use zeroth_model::ModelError;
use zeroth_train::checkpoint::CheckpointError;
use zeroth_train::{ResumeError, RunLengthError, ScheduleError};

use super::data_error::DataRequestError;
use super::handoff::InputsError;
use super::lora::LoraRequestError;
use super::resume::ResumeRequestError;
use super::teacher::DistillRequestError;

/// A request that makes no job. The message says what to change.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Inputs cannot be read.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// The config has errors.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Config and flags contradict each other.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The model is not supported.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The adapters cannot be trained.
    #[error(transparent)]
    Lora(#[from] LoraRequestError),
    /// Teacher or cache do not suit.
    #[error(transparent)]
    Distillation(#[from] DistillRequestError),
    /// Data cannot be read.
    #[error(transparent)]
    Data(Box<DataRequestError>),
    /// The checkpoint cannot be resumed from.
    #[error(transparent)]
    Resume(Box<ResumeRequestError>),
    /// No steps, or too many.
    #[error(transparent)]
    RunLength(#[from] RunLengthError),
    /// The schedule is wrong.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// GPUs are asked for.
    #[error(
        "--device cuda needs a GPU, but none was found: `zeroth doctor` shows what was probed; --device cpu trains \
         on the CPU"
    )]
    NoGpu,
    /// A step without samples.
    #[error("the train batch is empty")]
    EmptyBatch,
    /// Keys of the config that affect training.
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
