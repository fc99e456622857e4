//! The commands and their flags. Help texts assume knowledge of DeepSpeed, not of zeroth.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use zeroth::base::{parse_bytes, parse_count};
use zeroth::model::Family;

use crate::bench_args::BenchArgs;
use crate::commands::render_templates;
use crate::generate_flags::GenerateArgs;
use crate::host_args::HostArgs;
use crate::kd_args::{DistillCommand, PlanTeacherArgs};
use crate::launch_args::LaunchArgs;
use crate::lora_args::LoraArgs;
use crate::monitor_args::MonitorArgs;
use crate::pair_args::PairLengthArgs;
pub(crate) use crate::train_args::{DataCommand, RowLengthArgs, TrainArgs};
use crate::train_flags::TrainFlags;
use crate::value_args::{DTypeArg, budget, number, parameters, whole, whole_as};
pub(crate) use crate::value_args::{DeviceArg, TrainTypeArg};

/// ZeRO training of transformer language models in one binary: plans memory before it starts, reads DeepSpeed configs
/// and Hugging Face folders, needs no Python.
#[derive(Debug, Parser)]
#[command(
    name = "zeroth",
    version,
    args_override_self = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Example: zeroth plan --params 8B --ranks 5 --device-memory 44GB\n\n\
                  Exit codes: 0 success; 1 the run failed; 2 invalid input; 3 does not fit in memory; \
                  4 a check found problems."
)]
pub(crate) struct Cli {
    /// Output format: tables, or one JSON object
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, value_name = "FORM")]
    pub(crate) format: Format,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables and text
    Text,
    /// One JSON object on standard output
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model
    Train(Box<TrainArgs>),
    /// Train on several hosts, by DeepSpeed's hostfile
    Launch(Box<LaunchArgs>),
    /// Plan memory: what a job needs, which presets fit, and what to change if none does
    Plan(Box<PlanArgs>),
    /// Check, explain, resolve and generate DeepSpeed configs
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Inspect, verify and export checkpoints
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Inspect training data
    #[command(subcommand)]
    Data(DataCommand),
    /// Cache what a teacher predicts, for distillation without it
    #[command(subcommand)]
    Distill(DistillCommand),
    /// Generate text with a model
    Generate(Box<GenerateArgs>),
    /// Create a model folder with random weights
    Init(Box<InitArgs>),
    /// Benchmark kernels, optimizer, collectives, disk and training steps against the machine's limits
    Bench(Box<BenchArgs>),
    /// Watch runs: curves, memory, ranks and events, live in the terminal or in a browser
    Monitor(MonitorArgs),
    /// Show hardware, libraries, a kernel self-test, and the effect of environment variables
    #[command(after_help = "Example: zeroth doctor --format json")]
    Doctor,
    /// Render chat templates from standard input, with limits on memory and time
    #[command(name = render_templates::COMMAND, hide = true)]
    RenderTemplates,
    /// Generate shell completions
    #[command(
        after_help = "Example: zeroth completions bash > ~/.local/share/bash-completion/completions/zeroth"
    )]
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: Shell,
    },
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth plan --params 8B --ranks 5 --device-memory 44GB\n  \
                  zeroth plan --model Qwen/Qwen3-8B --ranks 5 --device-memory 44GB --per-device-train-batch-size 1\n  \
                  zeroth plan --params 8B --ranks 5 --states plain   (2+2+8 bytes per parameter, no fp32 master weights)\n  \
                  zeroth plan --model Qwen/Qwen3-32B --hosts 16 --ranks-per-host 8 --card H100   (bytes between hosts, hpZ)\n\n\
                  Sizes: 44GB is 44·10^9 bytes, 44GiB is 44·2^30. Exit 3 when nothing fits."
)]
pub(crate) struct PlanArgs {
    /// Hugging Face folder, its config.json, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR", required_unless_present = "params")]
    pub(crate) model: Option<String>,
    /// Number of parameters instead of a model: an estimate without activations and buffers
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = parameters, conflicts_with = "model")]
    pub(crate) params: Option<u64>,
    /// Number of ranks, one device each [default: as a run: with a GPU the number found, else 1]
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N",
          value_parser = whole(1..=1_000_000))]
    pub(crate) ranks: Option<u64>,
    #[command(flatten)]
    pub(crate) on_hosts: HostArgs,
    /// Memory budget of one device [default: that of --card, or what the GPUs of this machine have free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) device_memory: Option<u64>,
    /// CPU threads per rank [default: CPUs / ranks]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024))]
    pub(crate) threads_per_rank: Option<u64>,
    /// Device to train on, which decides buffers and gathers [default: cuda with --card or where a GPU is found, else cpu]
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) device: Option<DeviceArg>,
    /// GPU model (A100-80GB, RTX 4090, V100-32GB), for its memory and supported dtypes
    #[arg(long, value_name = "NAME", conflicts_with = "device_memory")]
    pub(crate) card: Option<String>,
    /// Memory budget of one host
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) host_memory: Option<u64>,
    /// Plan one preset or DeepSpeed JSON file instead of all presets
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) deepspeed: Option<String>,
    /// Estimate states in closed form with these bytes per parameter [default: master with --params]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) states: Option<StatesArg>,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    #[command(flatten)]
    pub(crate) teacher: PlanTeacherArgs,
    /// With --params: parameters of the largest layer, which stage 3 gathers at once [default: a typical transformer block]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = parse_count, conflicts_with = "model")]
    pub(crate) largest_layer: Option<u64>,
    #[command(flatten)]
    pub(crate) rows: RowLengthArgs,
    #[command(flatten)]
    pub(crate) lengths: PairLengthArgs,
    /// With --deepspeed: print the step program that a run compiles, or write it to FILE, and stop
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", requires = "deepspeed",
          requires = "model")]
    pub(crate) dump_program: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// The bytes counted per parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StatesArg {
    /// 2 + 2 + 12: with fp32 master weights, as in the ZeRO paper
    Master,
    /// 2 + 2 + 8: without master weights
    Plain,
    /// As zeroth runs: 14 bytes with one rank and no accumulation, else 16; 2 more with offload
    Run,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth init --family qwen3 --hidden 512 --layers 8 --heads 8 --kv-heads 4 \
                  --intermediate-size 1536 --vocab-size 32000 --tied --output my-model\n\n\
                  Weights are drawn from a normal distribution with standard deviation 0.02 (of t5 and mt5: those of \
                  transformers, by width), norms are 1, biases 0. The same seed gives the same bits on every machine."
)]
pub(crate) struct InitArgs {
    /// Architecture
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) family: NewFamilyArg,
    /// Hidden size
    #[arg(long, alias = "hidden-size", value_name = "N", value_parser = whole(0..))]
    pub(crate) hidden: u64,
    /// Number of transformer blocks; of t5 and mt5, of encoder and decoder each
    #[arg(long, alias = "num-hidden-layers", value_name = "N", value_parser = whole(0..))]
    pub(crate) layers: u64,
    /// Number of attention heads
    #[arg(long, alias = "num-attention-heads", value_name = "N", value_parser = whole(0..))]
    pub(crate) heads: u64,
    /// Number of key/value heads [default: as many as heads]
    #[arg(long, alias = "num-key-value-heads", value_name = "N", value_parser = whole(0..))]
    pub(crate) kv_heads: Option<u64>,
    /// Head dimension [default: hidden / heads]
    #[arg(long, value_name = "N", value_parser = whole(0..))]
    pub(crate) head_dim: Option<u64>,
    /// Hidden size of the feed-forward layer
    #[arg(long, value_name = "N", value_parser = whole(0..))]
    pub(crate) intermediate_size: u64,
    /// Vocabulary size
    #[arg(long, value_name = "N", value_parser = whole(0..))]
    pub(crate) vocab_size: u64,
    /// Tie the output projection to the embedding
    #[arg(long, alias = "tie-word-embeddings", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false")]
    pub(crate) tied: bool,
    /// Maximum sequence length [default: the architecture's]
    #[arg(long, alias = "max-position-embeddings", value_name = "N", value_parser = whole(0..))]
    pub(crate) max_positions: Option<u64>,
    /// Number of experts of a block, for mixtures of experts
    #[arg(long, alias = "num-local-experts", value_name = "N", value_parser = whole(0..), requires = "num_experts_per_tok")]
    pub(crate) num_experts: Option<u64>,
    /// Number of experts of a token
    #[arg(long, value_name = "N", value_parser = whole(0..), requires = "num_experts")]
    pub(crate) num_experts_per_tok: Option<u64>,
    /// Hidden size of an expert [default: --intermediate-size]
    #[arg(long, value_name = "N", value_parser = whole(0..), requires = "num_experts")]
    pub(crate) moe_intermediate_size: Option<u64>,
    /// Base of the rotary frequencies [default: the architecture's, 10000 or 1000000 (mixtral)]
    #[arg(long, value_name = "X", value_parser = number, allow_hyphen_values = true)]
    pub(crate) rope_theta: Option<f64>,
    /// Dtype of the stored weights
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = DTypeArg::Bf16)]
    pub(crate) dtype: DTypeArg,
    /// Random seed
    #[arg(long, value_name = "N", value_parser = whole(0..), default_value_t = 42)]
    pub(crate) seed: u64,
    /// Maximum size of a weight file
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes, default_value = "5GB")]
    pub(crate) max_shard_size: u64,
    /// Output folder
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Replace an existing model or adapter in the folder; other files are kept
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite_output_dir: bool,
}

/// An architecture for new models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NewFamilyArg {
    /// Llama 1 to 3
    Llama,
    /// Mistral, without sliding-window attention
    Mistral,
    /// Qwen2: biases on q, k and v
    Qwen2,
    /// Qwen3: norms on q and k
    Qwen3,
    /// Qwen3 with a mixture of experts in every block
    #[value(name = "qwen3_moe", alias = "qwen3-moe")]
    Qwen3Moe,
    /// Mixtral, without sliding-window attention
    Mixtral,
    /// T5 with a tied output projection (relu), else T5 v1.1 (gated GELU)
    T5,
    /// mT5
    #[value(name = "mt5")]
    Mt5,
}

impl From<NewFamilyArg> for Family {
    fn from(family: NewFamilyArg) -> Self {
        match family {
            NewFamilyArg::Llama => Self::Llama,
            NewFamilyArg::Mistral => Self::Mistral,
            NewFamilyArg::Qwen2 => Self::Qwen2,
            NewFamilyArg::Qwen3 => Self::Qwen3,
            NewFamilyArg::Qwen3Moe => Self::Qwen3Moe,
            NewFamilyArg::Mixtral => Self::Mixtral,
            NewFamilyArg::T5 => Self::T5,
            NewFamilyArg::Mt5 => Self::Mt5,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Show a checkpoint's contents, or a run's checkpoints
    #[command(after_help = "Example: zeroth checkpoint inspect run/checkpoints/step-500\n\n\
                            Reads manifest and headers, no weights. Exit code 4 if something is missing or damaged.")]
    Inspect {
        /// A step-N folder, or a run folder
        dir: PathBuf,
    },
    /// Verify the checksums of a checkpoint, of all checkpoints of a run, or of a teacher cache
    #[command(
        after_help = "Example: zeroth checkpoint verify run\n\nExit code 4 if a file is damaged. In the \
                            folder itself, `sha256sum --check SHA256SUMS` does the same."
    )]
    Verify {
        /// A step-N folder, a run folder, or a folder of `distill cache`
        dir: PathBuf,
    },
    /// Export a checkpoint, or a run's newest valid one, as a Hugging Face folder; merge adapters into their base
    Export(CheckpointExportArgs),
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth checkpoint export run/checkpoints/step-500 --output my-model --dtype bf16\n  \
                  zeroth checkpoint export run/model --merge --output my-model\n\n\
                  Weights are streamed, so memory use does not grow with the model. --merge computes W + scale · B·A in fp32 \
                  and rounds once, to the dtype of the base. Exit code 4 if the checkpoint is damaged."
)]
pub(crate) struct CheckpointExportArgs {
    /// A step-N folder, or a run folder; with --merge also the folder of an adapter that zeroth or PEFT wrote
    pub(crate) dir: PathBuf,
    /// Merge LoRA adapters into the weights of their base
    #[arg(long, alias = "merge-lora", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value = "false")]
    pub(crate) merge: bool,
    /// With --merge: the base, a folder or a name in the local Hugging Face cache [default: the base that the adapters name]
    #[arg(long, aliases = ["model-name-or-path", "base-model"], value_name = "DIR")]
    pub(crate) model: Option<String>,
    /// With --merge: merge adapters that were trained over another base
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) allow_other_base: bool,
    /// Output folder
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Dtype of the weights [default: that of the run, fp32 for adapters; with --merge that of the base]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) dtype: Option<DTypeArg>,
    /// Maximum size of a weight file
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes, default_value = "5GB")]
    pub(crate) max_shard_size: u64,
    /// Replace an existing model or adapter in the folder; other files are kept
    #[arg(long, alias = "overwrite-output-dir", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Generate a ZeRO config; values not given are chosen by the available memory
    New(Box<NewArgs>),
    /// Generate three configs: for a small GPU, for several large ones, and for long rows
    Tiers(TiersArgs),
    /// List the presets, show one, or write one
    Presets(PresetsArgs),
    /// Check every key of a config
    Check(CheckArgs),
    /// Resolve a config with a model, ranks and flags; shows every value with its origin
    Resolve(Box<ResolveArgs>),
    /// Explain a key: its effect, default, unit, which pass reads it, and what to set it to
    #[command(after_help = "Example: zeroth config explain stage3_max_reuse_distance")]
    Explain {
        /// Key name or full path
        key: String,
    },
    /// Check that a training command agrees with a config: batch sizes, precision, accumulation, clipping
    Verify(VerifyArgs),
    /// Print the JSON Schema of configs, for editors
    #[command(after_help = "Example: zeroth config schema > deepspeed.schema.json")]
    Schema,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth config new --micro-batch-size 2 --gradient-accumulation 8\n  \
                  zeroth config new --offload --world-size 4 --stage3-prefetch-bucket-size auto -o ds.json"
)]
pub(crate) struct NewArgs {
    /// Micro-batch size per rank [default: by available memory]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) micro_batch_size: Option<u64>,
    /// Gradient accumulation steps [default: 1, or by available memory]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) gradient_accumulation: Option<u64>,
    /// ZeRO stage
    #[arg(long, value_name = "STAGE", default_value_t = 3, value_parser = whole_as::<u8>(0..=3))]
    pub(crate) stage: u8,
    /// Offload parameters to host memory [default: no, or by available memory]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) offload: Option<bool>,
    #[command(flatten)]
    pub(crate) precision: PrecisionArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// zero_optimization.sub_group_size
    #[arg(long, value_name = "N|auto")]
    pub(crate) sub_group_size: Option<String>,
    /// zero_optimization.reduce_bucket_size
    #[arg(long, value_name = "N|auto")]
    pub(crate) reduce_bucket_size: Option<String>,
    /// zero_optimization.stage3_prefetch_bucket_size
    #[arg(long, value_name = "N|auto")]
    pub(crate) stage3_prefetch_bucket_size: Option<String>,
    /// zero_optimization.stage3_param_persistence_threshold
    #[arg(long, value_name = "N|auto")]
    pub(crate) stage3_param_persistence_threshold: Option<String>,
    /// zero_optimization.stage3_max_live_parameters
    #[arg(long, value_name = "N|auto")]
    pub(crate) stage3_max_live_parameters: Option<String>,
    /// zero_optimization.stage3_max_reuse_distance
    #[arg(long, value_name = "N|auto")]
    pub(crate) stage3_max_reuse_distance: Option<String>,
    /// zero_optimization.stage3_gather_16bit_weights_on_model_save
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) stage3_gather_16bit_weights_on_model_save: Option<bool>,
    /// Output file
    #[arg(short, long, value_name = "FILE", default_value = "ds_zero3.json")]
    pub(crate) output: PathBuf,
    /// Replace a file that exists already
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite: bool,
}

/// The precision of a generated config.
#[derive(Debug, Clone, Args)]
pub(crate) struct PrecisionArgs {
    /// bf16, the default
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) bf16: Option<bool>,
    /// fp16 with an initial loss scale of 2^12, and bf16 off
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp16: Option<bool>,
}

/// The memory that a config is generated for.
#[derive(Debug, Clone, Args)]
pub(crate) struct MemoryArgs {
    /// Number of ranks; multiplies train_batch_size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=1_000_000))]
    pub(crate) world_size: u64,
    /// Memory of one device [default: detected]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) device_memory: Option<u64>,
    /// Number of model parameters to choose for
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = parameters)]
    pub(crate) params: Option<u64>,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config tiers --device-memory 24GB -o configs"
)]
pub(crate) struct TiersArgs {
    #[command(flatten)]
    pub(crate) precision: PrecisionArgs,
    /// Number of ranks; multiplies train_batch_size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=1_000_000))]
    pub(crate) world_size: u64,
    /// Memory of one device [default: detected]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) device_memory: Option<u64>,
    /// Output folder for ds_zero3_small.json, ds_zero3_medium.json and ds_zero3_large.json
    #[arg(short, long, alias = "output-dir", value_name = "DIR", default_value = ".")]
    pub(crate) output: PathBuf,
    /// Replace files that exist already
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
#[command(args_override_self = true, after_help = "Example: zeroth config presets zero3_offload -o ds.json")]
pub(crate) struct PresetsArgs {
    /// zero0, zero1, zero2, zero2_offload, zero3 or zero3_offload; lists all if omitted
    pub(crate) name: Option<String>,
    /// Write the preset to this file
    #[arg(short, long, value_name = "FILE", requires = "name")]
    pub(crate) output: Option<PathBuf>,
    /// Replace a file that exists already
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config check ds_config.json\n\nFILE may also be a preset's name, JSON text, or base64 \
                  of a config. Exit code 4 if the file has errors."
)]
pub(crate) struct CheckArgs {
    /// DeepSpeed config: JSON, optionally with comments, or Hjson
    pub(crate) file: String,
    /// Treat warnings as errors: keys that are deprecated, unknown, not yet supported or without effect
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) strict: bool,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config resolve zero3 --model Qwen/Qwen3-8B --ranks 8 --learning-rate 1e-5 --max-steps 1000"
)]
pub(crate) struct ResolveArgs {
    /// DeepSpeed config, or a preset
    pub(crate) file: String,
    /// Hugging Face folder, its config.json, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: Option<String>,
    /// Number of ranks
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N", default_value_t = 1,
          value_parser = whole(1..=1_000_000))]
    pub(crate) ranks: u64,
    /// Full fine-tuning or LoRA (which has another default learning rate)
    #[arg(long, value_enum, default_value_t = TrainTypeArg::Full, value_name = "TYPE")]
    pub(crate) train_type: TrainTypeArg,
    /// YAML or JSON file with flags of `train`; those that this command reads count
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Also show default values
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config verify ds.json -- deepspeed --num_gpus=8 train.py --deepspeed ds.json \
                  --per_device_train_batch_size 1 --gradient_accumulation_steps 16 --bf16 True\n\n\
                  Understands deepspeed, torchrun, accelerate, swift, mpirun, srun and zeroth. Exit code 4 if they disagree."
)]
pub(crate) struct VerifyArgs {
    /// DeepSpeed config, or a preset
    pub(crate) file: String,
    /// Training command
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}
