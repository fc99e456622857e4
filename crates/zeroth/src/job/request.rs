//! What a user asks for, as plain data.

use std::path::PathBuf;

use zeroth_base::DType;
use zeroth_config::resolve::Flags;
use zeroth_data::Truncation;
use zeroth_machine::DeviceKind;

use super::lora::LoraRequest;
use super::pairs::PairRequest;
use super::strategies::StrategyRequest;
use super::teacher::DistillRequest;

/// The job that is asked for. `None` leaves a value to the checkpoint, the machine or its default.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct JobRequest {
    /// A Hugging Face folder, or a name in the local Hugging Face cache.
    pub model: String,
    /// A preset, a DeepSpeed JSON file, or JSON text.
    pub deepspeed: String,
    /// Values that were given besides the config.
    pub flags: Flags,
    /// Whether the precision is that of the model's config.json.
    pub precision_of_model: bool,
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
    pub output: PathBuf,
    /// `auto`, or the checkpoint or run to resume from.
    pub resume: Option<String>,
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

/// The rows of a run.
#[derive(Debug, Clone)]
pub struct DataRequest {
    /// Files, folders or patterns.
    pub paths: Vec<PathBuf>,
    /// Those of the evaluation; none where the run does not evaluate.
    pub evaluation_paths: Vec<PathBuf>,
    /// The share of the samples that is evaluated on instead.
    pub split_ratio: Option<f64>,
    /// How rows are tokenised.
    pub reading: ReadingRequest,
    /// Whether rows are packed into sequences.
    pub packing: bool,
    /// Only the first rows, up to this number.
    pub max_samples: Option<u64>,
    /// Samples per micro-batch of a rank in evaluations; those of training if not given.
    pub evaluation_micro_batch: Option<u64>,
}

impl DataRequest {
    /// The rows of these files, shorter than the model's maximum length, at most 2,048 tokens.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            evaluation_paths: Vec::new(),
            split_ratio: None,
            reading: ReadingRequest::default(),
            packing: false,
            max_samples: None,
            evaluation_micro_batch: None,
        }
    }
}

/// How rows are tokenised.
#[derive(Debug, Clone, Default)]
pub struct ReadingRequest {
    /// Other names of columns, as in `question=query`.
    pub columns: Vec<String>,
    /// The system message of conversations that have none, or a .txt file with it.
    pub system: Option<String>,
    /// Maximum tokens of a row.
    pub max_length: Option<u64>,
    /// Handling of longer rows.
    pub truncation: Truncation,
    /// Sources and targets of an encoder-decoder.
    pub pairs: PairRequest,
    /// The command of this program that runs [`zeroth_data::render_templates`]; `None` renders chat templates in this
    /// process.
    pub template_command: Option<&'static str>,
}
