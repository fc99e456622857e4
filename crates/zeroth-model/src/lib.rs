//! The architectures: a Hugging Face model folder's `config.json` becomes a [`ModelConfig`] with a
//! [`Layer`] for each block, and that becomes a [`ParameterTable`]: every parameter with its name on disk, its shape and
//! the unit it belongs to.
//!
//! The table is shapes only: no weights, no device. The planner counts with these tables and the engine loads with
//! them, so both speak of the same model. Names and shapes are those of the safetensors files, but for the experts of a
//! block: here they are fused as in transformers 5, and a parameter's parts say where each expert's matrices are on disk.
//!
//! Weights are touched in two places: [`WeightFiles`] and [`WeightWriter`] read and write them by ranges, and
//! [`fill_new`] makes new ones. None of them holds a model in memory, and none knows what a rank is.

mod architecture;
mod auto;
mod builtin;
mod config;
mod config_json;
mod decoder;
mod distill;
mod error;
mod family;
mod fields;
mod folder;
mod forward;
mod function;
mod init;
mod layer;
mod limits;
mod load;
mod lora;
mod new_folder;
mod objective;
mod peft;
mod rope;
mod rotary;
mod safetensors;
mod t5;
mod table;

pub use auto::hidden_size_for_auto;
pub use builtin::builtin_names;
pub use config::{ModelConfig, TargetTokens};
pub use config_json::UnwritableConfig;
pub use distill::{Distilled, TEACHER_PREFIX, TeacherForward};
pub use error::{FieldError, ModelError, ModelOfRun, Needs};
pub use family::Family;
pub use folder::{HubCache, NamedConfig, locate, named_config, read_config};
pub use forward::{BatchTokens, ForwardError, forward, forward_training};
pub use function::ModelFunction;
pub use init::{INITIALIZER_RANGE, NewValues, fill_adapter, fill_new};
pub use layer::{
    AttentionModule, Branch, ExpertsModule, FeedForwardModule, Layer, LinearModule, NormModule, Positions,
    Sublayer,
};
pub use limits::MAX_PARAMETERS;
pub use load::table;
pub use lora::{
    Lora, LoraError, LoraInit, LoraTargets, adapted_module, adapts_experts, add_adapters, lora_table,
};
pub use new_folder::{EXPORT_RECORD, ExpertSizes, ModelSizes, NewFolder, NewFolderError, new_folder};
pub use objective::Objective;
pub use peft::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, AdapterConfig, AdapterError, AdapterProblem,
    adapter_config_json, adapter_parameters, is_adapter_folder, to_stored_layout,
};
pub use rope::{Rope, RopeScaling};
pub use safetensors::{
    DEFAULT_SHARD_BYTES, HeaderError, NewTensor, TensorEntry, WeightFiles, WeightProblem, WeightWarning,
    WeightWriter, WeightsError, WrittenWeights, f32_to_stored, has_weights, is_weight_file, read_header,
    stored_to_f32, write_header,
};
pub use table::{
    AdaptedParameter, AdapterScales, ExpertRouting, Parameter, ParameterKind, ParameterRole, ParameterTable,
    ParameterUnit, StoredPart, UnitName,
};
