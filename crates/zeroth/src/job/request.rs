//! What a user asks for, as plain data.

use std::path::PathBuf;

use zeroth_base::DType;
use zeroth_config::resolve::Flags;

use super::data::DataRequest;
use super::lora::LoraRequest;
use super::machine::DeviceKind;
use super::strategies::StrategyRequest;
use super::teacher::DistillRequest;

/// The job that is asked for. `None` leaves a value to the checkpoint, the machine or its default.
#[derive(Debug, Clone)]
pub struct JobRequest {
    /// A Hugging Face folder, or a name in the local Hugging Face cache.
    pub model: String,
    /// A preset, a DeepSpeed JSON file, or JSON text.
    pub deepspeed: String,
    /// Values that were typed beside the config.
    pub flags: Flags,
    /// Whether the precision is that of the model's config.json.
    pub precision_of_model: bool,
    /// The rows.
    pub data: DataRequest,
    /// Epochs, unless the flags have a number of steps.
    pub epochs: Option<f64>,
    /// Whether samples are reshuffled every epoch.
    pub shuffle: bool,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Seed of the order of the samples, if it is another.
    pub data_seed: Option<u64>,
    /// When it evaluates, saves and logs.
    pub strategies: StrategyRequest,
    /// The adapters; `None` trains all parameters.
    pub lora: Option<LoraRequest>,
    /// What it distils from.
    pub distillation: Option<DistillRequest>,
    /// Whether frozen weights that a folder lacks are drawn from the seed.
    pub random_weights: bool,
    /// Steps that may be skipped for gradients that are infinite or NaN.
    pub max_skipped_steps: u64,
    /// The dtype of the trained model.
    pub save_dtype: Option<DType>,
    /// The run folder.
    pub output: PathBuf,
    /// `auto`, or the checkpoint or run to resume from.
    pub resume: Option<String>,
    /// The run's name.
    pub run_name: Option<String>,
    /// The devices to train on.
    pub device: Option<DeviceKind>,
    /// Ranks on this machine.
    pub ranks: Option<u64>,
    /// CPU threads of a rank.
    pub threads_per_rank: Option<u64>,
    /// Memory budget of one device.
    pub device_memory: Option<u64>,
    /// Memory budget of this machine, for all ranks.
    pub host_memory: Option<u64>,
}

impl JobRequest {
    /// Trains all parameters of a model on these files, with the defaults of `zeroth train`.
    pub fn new(model: impl Into<String>, data: Vec<PathBuf>, output: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            deepspeed: "zero2".to_owned(),
            flags: Flags::default(),
            precision_of_model: false,
            data: DataRequest::new(data),
            epochs: None,
            shuffle: true,
            seed: 42,
            data_seed: None,
            strategies: StrategyRequest::default(),
            lora: None,
            distillation: None,
            random_weights: false,
            max_skipped_steps: 0,
            save_dtype: None,
            output: output.into(),
            resume: None,
            run_name: None,
            device: None,
            ranks: None,
            threads_per_rank: None,
            device_memory: None,
            host_memory: None,
        }
    }
}
