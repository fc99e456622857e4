//! Errors of a LoRA run's weights.

use zeroth_model::{AdapterError, WeightsError};

use super::adapter_base::OtherBase;

/// A LoRA run that cannot be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LoraWeightsError {
    #[error(
        "{folder} has no weights (*.safetensors), and adapters are trained beside the weights of a base: give a folder with \
         weights; --random-weights draws them from the seed, for measuring"
    )]
    NoBase { folder: String },
    #[error(transparent)]
    Base(#[from] WeightsError),
    #[error("--adapter: {0}")]
    Adapter(#[from] AdapterError),
    #[error("--adapter: {0}")]
    OtherBase(#[from] OtherBase),
}
