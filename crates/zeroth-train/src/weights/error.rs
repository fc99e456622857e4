//! Errors of a LoRA run's weights.

use zeroth_model::{AdapterError, WeightsError};

use super::adapter_base::OtherBase;

/// A LoRA run that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum LoraWeightsError {
    /// The base has no weights.
    #[error(
        "{folder} has no weights (*.safetensors), and adapters are trained beside the weights of a base: give a folder with \
         weights; --random-weights draws them from the seed, for measuring"
    )]
    NoBase {
        /// The folder.
        folder: String,
    },
    /// The base cannot be read.
    #[error(transparent)]
    Base(#[from] WeightsError),
    /// The adapter cannot be read.
    #[error("--adapter: {0}")]
    Adapter(#[from] AdapterError),
    /// The adapter was trained over another base.
    #[error("--adapter: {0}")]
    OtherBase(#[from] OtherBase),
}
