//! The architectures: a Hugging Face model folder's `config.json` becomes a [`ModelConfig`], and that becomes a
//! [`ParameterTable`]: every parameter with its name on disk, its shape and the unit it belongs to.
//!
//! Shapes only: no weights, no device. The planner counts with these tables and the engine loads with them, so both
//! speak of the same model. Names and shapes are those of the safetensors files. In memory transformers 5 keeps the
//! experts of a block fused; on disk each expert has its own matrices, and so they have here.

mod auto;
mod config;
mod decoder;
mod error;
mod family;
mod fields;
mod folder;
mod lora;
mod rope;
mod t5;
mod table;

pub use auto::hidden_size_for_auto;
pub use config::{Activation, Experts, ModelConfig, Positions};
pub use error::{FieldError, ModelError};
pub use family::Family;
pub use folder::{HubCache, locate, read_config};
pub use lora::{Lora, LoraError, LoraTargets, lora_table};
pub use rope::{Rope, RopeScaling};
pub use table::{Parameter, ParameterKind, ParameterTable, Routing, Unit, UnitName, table};
