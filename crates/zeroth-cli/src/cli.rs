//! The commands and their flags. Help texts are written for someone who knows DeepSpeed and not us.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use zeroth::base::{DType, parse_bytes, parse_count};
use zeroth::model::Family;

use crate::bench_args::BenchArgs;
use crate::commands::render_templates;
use crate::generate_flags::GenerateArgs;
pub(crate) use crate::train_args::{DataCommand, PreviewArgs, ReadingArgs, TrainArgs, TruncationArg};
use crate::train_flags::TrainFlags;

/// ZeRO training of transformer language models in one binary: plans memory before it starts, reads DeepSpeed's JSON
/// and Hugging Face folders, needs no Python.
#[derive(Debug, Parser)]
#[command(
    name = "zeroth",
    version,
    args_override_self = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Example: zeroth plan --params 8B --ranks 5 --device-memory 44GB\n\n\
                  Exit codes: 0 done; 1 the run failed; 2 what was given is wrong; 3 it does not fit the memory given; \
                  4 a check found problems."
)]
pub(crate) struct Cli {
    /// Tables for people, or one JSON object for programs
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, value_name = "FORM")]
    pub(crate) format: Format,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The form of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables and sentences.
    Text,
    /// One JSON object on standard output.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model: from a folder and a data file to a trained folder
    Train(Box<TrainArgs>),
    /// How much memory a job needs, where it fits, and what to change where it does not
    Plan(Box<PlanArgs>),
    /// Understand, check, resolve and write DeepSpeed configs
    #[command(subcommand)]
    Config(ConfigCommand),
    /// What a run has saved: look at it, check every byte, make a model folder of it
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Look at data before training on it
    #[command(subcommand)]
    Data(DataCommand),
    /// Text from a model folder: what a trained model says
    Generate(Box<GenerateArgs>),
    /// A new model folder from a family and sizes: config.json and weights from a seed
    Init(Box<InitArgs>),
    /// How near this machine comes to its limits: kernels, optimizer, collectives, disk, whole step
    Bench(Box<BenchArgs>),
    /// What this machine offers, and what its environment variables do here
    #[command(after_help = "Example: zeroth doctor --format json")]
    Doctor,
    /// Chat templates from standard input: the process that renders them, with bounds on its memory and time
    #[command(name = render_templates::COMMAND, hide = true)]
    RenderTemplates,
    /// Completions for a shell
    #[command(
        after_help = "Example: zeroth completions bash > ~/.local/share/bash-completion/completions/zeroth"
    )]
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: Shell,
    },
}

/// Where kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// The processor
    Cpu,
    /// NVIDIA's cards
    Cuda,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth plan --params 8B --ranks 5 --device-memory 44GB\n  \
                  zeroth plan --model Qwen/Qwen3-8B --ranks 5 --device-memory 44GB --per-device-train-batch-size 1\n  \
                  zeroth plan --params 8B --ranks 5 --states plain   (2+2+8 bytes a parameter, no fp32 master copy)\n\n\
                  Sizes: 44GB is 44·10^9 bytes, 44GiB is 44·2^30. Exit 3 when nothing fits."
)]
pub(crate) struct PlanArgs {
    /// Hugging Face folder, its config.json, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR", required_unless_present = "params")]
    pub(crate) model: Option<String>,
    /// A number of parameters instead of a model: an estimate, states in closed form, no activations and no buffers
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = parse_count, conflicts_with = "model")]
    pub(crate) params: Option<u64>,
    /// Ranks of the job, one device each
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) ranks: u64,
    /// Ranks of one host [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) ranks_per_host: Option<u64>,
    /// Memory of one device: rows are held to it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) device_memory: Option<u64>,
    /// A card by name (A100-80GB, RTX 4090, V100-32GB) for its memory and its number formats
    #[arg(long, value_name = "NAME", conflicts_with = "device_memory")]
    pub(crate) card: Option<String>,
    /// Memory of one host: rows are held to it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) host_memory: Option<u64>,
    /// One preset or DeepSpeed JSON file instead of every preset
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) deepspeed: Option<String>,
    /// How bytes a parameter are counted [default: master with --params, run with --model]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) states: Option<StatesArg>,
    /// Train all parameters, or LoRA's
    #[arg(long, value_enum, default_value_t = TrainTypeArg::Full, value_name = "TYPE")]
    pub(crate) train_type: TrainTypeArg,
    /// LoRA's rank [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) lora_rank: Option<u64>,
    /// Linear layers that LoRA adapts [default: all-linear]
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) target_modules: Vec<String>,
    /// Parameters of the largest layer, for --params: what stage 3 gathers at a time [default: a block of the usual shape]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = parse_count, conflicts_with = "model")]
    pub(crate) largest_layer: Option<u64>,
    /// Tokens of the longest row [default: the model's, at most 2048]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_length: Option<u64>,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// How the bytes of a parameter are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StatesArg {
    /// 2 + 2 + 12: with an fp32 master copy, as in the ZeRO paper
    Master,
    /// 2 + 2 + 8: without one
    Plain,
    /// What our own runs hold: 14 bytes with one rank and no accumulation, else 16; 2 more with offload
    Run,
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainTypeArg {
    /// All parameters
    Full,
    /// LoRA's own parameters
    Lora,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth init --family qwen3 --hidden 512 --layers 8 --heads 8 --kv-heads 4 \
                  --intermediate-size 1536 --vocab-size 32000 --tied --output my-model\n\n\
                  Weights are normal numbers of standard deviation 0.02, norms are ones, biases zeros. The same seed gives \
                  the same bits on every machine."
)]
pub(crate) struct InitArgs {
    /// The family it belongs to
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) family: NewFamilyArg,
    /// Width of the model
    #[arg(long, alias = "hidden-size", value_name = "N")]
    pub(crate) hidden: u64,
    /// Blocks
    #[arg(long, alias = "num-hidden-layers", value_name = "N")]
    pub(crate) layers: u64,
    /// Attention heads
    #[arg(long, alias = "num-attention-heads", value_name = "N")]
    pub(crate) heads: u64,
    /// Heads of keys and values [default: as many as heads]
    #[arg(long, alias = "num-key-value-heads", value_name = "N")]
    pub(crate) kv_heads: Option<u64>,
    /// Width of one head [default: hidden / heads]
    #[arg(long, value_name = "N")]
    pub(crate) head_dim: Option<u64>,
    /// Inner width of the feed-forward part
    #[arg(long, value_name = "N")]
    pub(crate) intermediate_size: u64,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N")]
    pub(crate) vocab_size: u64,
    /// The output projection is the embedding
    #[arg(long, alias = "tie-word-embeddings", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false")]
    pub(crate) tied: bool,
    /// The longest sequence it is meant for [default: the family's]
    #[arg(long, alias = "max-position-embeddings", value_name = "N")]
    pub(crate) max_positions: Option<u64>,
    /// The base of rotary frequencies [default: 10000]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) rope_theta: Option<f64>,
    /// The type the weights are stored in
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = DTypeArg::Bf16)]
    pub(crate) dtype: DTypeArg,
    /// Where all random numbers come from
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
    /// The size above which weights are cut into several files
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes, default_value = "5GB")]
    pub(crate) max_shard_size: u64,
    /// The folder to write
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Replace the model in a folder that is not empty; other files stay
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite_output_dir: bool,
}

/// A family that new models can be made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NewFamilyArg {
    /// Llama 1 to 3
    Llama,
    /// Mistral, without its attention window
    Mistral,
    /// Qwen2: biases on q, k and v
    Qwen2,
    /// Qwen3: norms on q and k
    Qwen3,
}

impl From<NewFamilyArg> for Family {
    fn from(family: NewFamilyArg) -> Self {
        match family {
            NewFamilyArg::Llama => Self::Llama,
            NewFamilyArg::Mistral => Self::Mistral,
            NewFamilyArg::Qwen2 => Self::Qwen2,
            NewFamilyArg::Qwen3 => Self::Qwen3,
        }
    }
}

/// The type of stored weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DTypeArg {
    /// 2 bytes, the range of fp32
    Bf16,
    /// 2 bytes, more precise and up to 65,504
    Fp16,
    /// 4 bytes
    Fp32,
}

impl From<DTypeArg> for DType {
    fn from(dtype: DTypeArg) -> Self {
        match dtype {
            DTypeArg::Bf16 => Self::Bf16,
            DTypeArg::Fp16 => Self::F16,
            DTypeArg::Fp32 => Self::F32,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// What a checkpoint holds, or which checkpoints a run has
    #[command(after_help = "Example: zeroth checkpoint inspect run/checkpoints/step-500\n\n\
                            Reads manifest and headers, no weights. Exit 4 where something is missing or broken.")]
    Inspect {
        /// A folder step-N, or a run's folder
        dir: PathBuf,
    },
    /// Compare every byte with its checksum; of a run, all checkpoints
    #[command(
        after_help = "Example: zeroth checkpoint verify run\n\nExit 4 where a file is not what was saved. In the \
                            folder itself, `sha256sum --check SHA256SUMS` does the same."
    )]
    Verify {
        /// A folder step-N, or a run's folder
        dir: PathBuf,
    },
    /// A Hugging Face folder from a checkpoint, or from a run's newest good one
    Export(CheckpointExportArgs),
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth checkpoint export run/checkpoints/step-500 --output my-model --dtype bf16\n\n\
                  Weights are streamed: memory does not grow with the model. Exit 4 where the checkpoint is damaged."
)]
pub(crate) struct CheckpointExportArgs {
    /// A folder step-N, or a run's folder
    pub(crate) dir: PathBuf,
    /// The folder to write
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// The type of the weights [default: bf16 for a run in 16 bits, else fp32]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) dtype: Option<DTypeArg>,
    /// The size above which weights are cut into several files
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes, default_value = "5GB")]
    pub(crate) max_shard_size: u64,
    /// Replace the model in a folder that is not empty; other files stay
    #[arg(long, alias = "overwrite-output-dir", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Write a ZeRO config from a micro-batch and an accumulation; memory found decides what is not typed
    New(Box<NewArgs>),
    /// Write three configs at once: for a small card, for several large ones, for long rows
    Tiers(TiersArgs),
    /// List the presets, show one, or write one
    Presets(PresetsArgs),
    /// What becomes of every key of a file
    Check(CheckArgs),
    /// What a file becomes with a model, ranks and flags: every value with its origin
    Resolve(Box<ResolveArgs>),
    /// What a key does here, its default, its unit, who reads it, what to set it to
    #[command(after_help = "Example: zeroth config explain stage3_max_reuse_distance")]
    Explain {
        /// The key, by its name or its whole path
        key: String,
    },
    /// Does a training command agree with a file? batch sizes, precision, accumulation, clipping
    Verify(VerifyArgs),
    /// The JSON Schema of a config, for editors
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
    /// Samples one rank computes at a time [default: by the memory found]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) micro_batch_size: Option<u64>,
    /// Micro-batches before the optimizer steps [default: 1, or by the memory found]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) gradient_accumulation: Option<u64>,
    /// The ZeRO stage
    #[arg(long, value_name = "STAGE", default_value_t = 3, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) stage: u8,
    /// Parameters in host memory [default: no, or by the memory found]
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
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "ds_zero3.json")]
    pub(crate) output: PathBuf,
}

/// The precision of a generated config.
#[derive(Debug, Clone, Args)]
pub(crate) struct PrecisionArgs {
    /// bf16, the default
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) bf16: Option<bool>,
    /// fp16 with a loss scale that begins at 2^12, and bf16 off
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp16: Option<bool>,
}

/// The memory a generated config is for.
#[derive(Debug, Clone, Args)]
pub(crate) struct MemoryArgs {
    /// Ranks; they multiply train_batch_size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) world_size: u64,
    /// Memory of one device, instead of what is found
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) device_memory: Option<u64>,
    /// Parameters of the model to choose for
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = parse_count)]
    pub(crate) params: Option<u64>,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config tiers --device-memory 24GB --output-dir configs"
)]
pub(crate) struct TiersArgs {
    #[command(flatten)]
    pub(crate) precision: PrecisionArgs,
    /// Ranks; they multiply train_batch_size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) world_size: u64,
    /// Memory of one device, instead of what is found
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) device_memory: Option<u64>,
    /// The folder for ds_zero3_small.json, ds_zero3_medium.json and ds_zero3_large.json
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) output_dir: PathBuf,
}

#[derive(Debug, Args)]
#[command(args_override_self = true, after_help = "Example: zeroth config presets zero3_offload -o ds.json")]
pub(crate) struct PresetsArgs {
    /// zero0, zero1, zero2, zero2_offload, zero3 or zero3_offload; all of them are listed without
    pub(crate) name: Option<String>,
    /// Write it to this file
    #[arg(short, long, value_name = "FILE", requires = "name")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config check ds_config.json\n\nFILE may also be a preset's name, JSON text, or base64 \
                  of a config. Exit 4 where the file has errors."
)]
pub(crate) struct CheckArgs {
    /// A DeepSpeed config: JSON, with comments or without, or Hjson
    pub(crate) file: String,
    /// Warnings count as errors: keys without effect, deprecated, unknown, not yet
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) strict: bool,
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth config resolve zero3 --model Qwen/Qwen3-8B --ranks 8 --learning-rate 1e-5 --max-steps 1000"
)]
pub(crate) struct ResolveArgs {
    /// A DeepSpeed config, or a preset's name
    pub(crate) file: String,
    /// Hugging Face folder, its config.json, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: Option<String>,
    /// Ranks of the run
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) ranks: u64,
    /// Train all parameters, or LoRA's (another default learning rate)
    #[arg(long, value_enum, default_value_t = TrainTypeArg::Full, value_name = "TYPE")]
    pub(crate) train_type: TrainTypeArg,
    /// Show defaults too
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
                  Understands deepspeed, torchrun, accelerate, swift, mpirun, srun and zeroth. Exit 4 where they disagree."
)]
pub(crate) struct VerifyArgs {
    /// A DeepSpeed config, or a preset's name
    pub(crate) file: String,
    /// The training command
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}
