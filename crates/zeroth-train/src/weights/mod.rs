//! The weights that a run starts from: a model folder's or new ones, the frozen base of adapters, and their identity.

mod adapter_base;
mod base_hash;
mod error;
mod finite;
mod initial;
mod load_progress;
mod lora;

pub(crate) use adapter_base::sample_of;
pub use adapter_base::{AdapterBaseError, GivenBase, OtherBase, check_adapter_base};
pub(crate) use base_hash::{BaseHash, name_key, overlaps};
pub use error::LoraWeightsError;
pub(crate) use finite::first_not_finite;
pub use initial::InitialWeights;
pub(crate) use load_progress::LoadProgress;
pub(crate) use lora::param_names;
pub use lora::{LoraWeights, check_base};
