//! Adapter folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`, read and written.
//!
//! [`AdapterConfig`] is the JSON, typed, with everything refused that would change what the matrices mean;
//! [`Adapter`] is a folder checked against a base model; [`adapter_config_json`] and [`adapter_parameters`] are what a
//! folder is written from.

mod adapter;
mod config;
mod error;
mod layout;
mod write;

pub use adapter::{Adapter, is_adapter_folder};
pub use config::AdapterConfig;
pub use error::{AdapterError, AdapterProblem};
pub use layout::to_stored_layout;
pub use write::{adapter_config_json, adapter_parameters};

/// The file that describes an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The file with an adapter's matrices.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// The same as a Python pickle, which is not read.
const ADAPTER_PICKLE: &str = "adapter_model.bin";
