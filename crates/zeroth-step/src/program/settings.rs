//! What the passes ask of a config, and where in a config it stands.

use zeroth_base::DType;
use zeroth_config::resolve::Resolved;

/// The types a run stores numbers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Parameters and activations.
    pub run: DType,
    /// Gradients on their way between ranks.
    pub communication: DType,
}

/// What the passes ask of a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// `gradient_accumulation_steps`.
    pub accumulation: u64,
    /// `bf16`, `fp16` and `communication_data_type`.
    pub types: Types,
    /// `zero_optimization.stage3_param_persistence_threshold`, in elements.
    pub persistence: u64,
    /// `zero_optimization.reduce_bucket_size`, in elements.
    pub reduce_bucket: u64,
    /// `zero_optimization.stage3_max_live_parameters`, in elements.
    pub max_live: u64,
    /// `zero_optimization.stage3_max_reuse_distance`, in elements.
    pub max_reuse: u64,
    /// `zero_optimization.stage3_prefetch_bucket_size`, in elements.
    pub prefetch: u64,
    /// `zero_optimization.overlap_comm`.
    pub overlap: bool,
}

impl Settings {
    /// The settings that a resolved config gives: every value is there, by its file, a flag or its default.
    pub fn from_config(config: &Resolved) -> Self {
        let zero = |key: &str| config.whole(&format!("zero_optimization.{key}")).unwrap_or(0);
        let run = match (config.is_on("fp16.enabled"), config.is_on("bf16.enabled")) {
            (true, _) => DType::F16,
            (false, true) => DType::Bf16,
            (false, false) => DType::F32,
        };
        let communication = config.text("communication_data_type").and_then(DType::from_name);
        Self {
            stage: zero("stage") as u8,
            accumulation: config.whole("gradient_accumulation_steps").unwrap_or(1),
            types: Types { run, communication: communication.unwrap_or(run) },
            persistence: zero("stage3_param_persistence_threshold"),
            reduce_bucket: zero("reduce_bucket_size"),
            max_live: zero("stage3_max_live_parameters"),
            max_reuse: zero("stage3_max_reuse_distance"),
            prefetch: zero("stage3_prefetch_bucket_size"),
            overlap: config.is_on("zero_optimization.overlap_comm"),
        }
    }
}
