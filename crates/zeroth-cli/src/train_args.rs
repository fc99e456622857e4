//! Arguments of `train` and `data`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use zeroth::job::StepCount;

use crate::evaluation_args::{EvaluationArgs, steps, steps_or_zero};
use crate::flags_without_effect::{self, FlagsWithoutEffect};
use crate::host_args::HostArgs;
use crate::kd_args::KdArgs;
use crate::lora_args::LoraArgs;
use crate::pair_args::PairArgs;
use crate::train_flags::TrainFlags;
use crate::trainer_args::TrainerArgs;
use crate::value_args::{DeviceArg, budget, number, whole, whole_as};

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = format!(
        "Example: zeroth train --model my-model --data rows.jsonl --deepspeed zero3 --ranks 2 --output run\n\n\
         A key that is absent from the file or \"auto\" takes the flag's value, else its default. A flag that \
         contradicts the file is refused. The run folder contains metrics.jsonl, plan.json, config.json with the \
         origin of each value, checkpoints, and the trained model.\n\n{}",
        flags_without_effect::help()
    )
)]
pub(crate) struct TrainArgs {
    /// Hugging Face folder, or a name in the local Hugging Face cache; with config.json alone, weights are initialised randomly
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: String,
    /// Files, folders or quoted patterns ("data/*.jsonl") of JSONL, JSON arrays, CSV, TSV or Parquet, also .gz and .zst: rows of messages, conversations (sharegpt), instruction/output (alpaca), prompt/completion,
    /// question/answer, text, translation, or ready tokens (input_ids, labels; -100 is not trained)
    #[arg(long, aliases = ["dataset", "train-file", "data-path"], value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    #[command(flatten)]
    pub(crate) pairs: PairArgs,
    /// Evaluation data, as --data
    #[arg(long, aliases = ["val-dataset", "eval-dataset", "validation-file", "eval-data-path"], value_name = "FILE",
          num_args = 1..)]
    pub(crate) eval_data: Vec<PathBuf>,
    /// Steps between evaluations; below 1, a share of all steps [default: 500]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = steps)]
    pub(crate) eval_steps: Option<StepCount>,
    /// Preset (zero0, zero1, zero2, zero2_offload, zero3, zero3_offload) or DeepSpeed JSON file
    #[arg(long, value_name = "NAME|FILE", default_value = "zero2")]
    pub(crate) deepspeed: String,
    /// Run folder
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Ranks on this machine [default: GPUs found, else 1]
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N",
          value_parser = whole(1..=4096))]
    pub(crate) ranks: Option<u64>,
    /// Device [default: cuda if a GPU is found]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceArg>,
    /// CPU threads per rank [default: CPUs / ranks]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024))]
    pub(crate) threads_per_rank: Option<u64>,
    /// Epochs, unless --max-steps is given [default: 3]
    #[arg(long, value_name = "X", value_parser = number, allow_hyphen_values = true)]
    pub(crate) num_train_epochs: Option<f64>,
    /// Pack rows into sequences of up to --max-length, without attention across rows; pairs up to --max-source-length and
    /// --max-target-length
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) packing: bool,
    /// Use only the first N rows
    #[arg(long, alias = "max-samples", value_name = "N", value_parser = whole(1..))]
    pub(crate) max_train_samples: Option<u64>,
    /// Reshuffle every epoch; false keeps the order of the file
    #[arg(long, alias = "train-dataloader-shuffle", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true")]
    pub(crate) shuffle: bool,
    /// Random seed
    #[arg(long, value_name = "N", value_parser = whole(0..), default_value_t = 42)]
    pub(crate) seed: u64,
    /// Steps between progress lines when not on a terminal; below 1, a share of all steps; steps_per_print adds more
    /// [default: 5]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = steps)]
    pub(crate) logging_steps: Option<StepCount>,
    /// Steps with non-finite gradients to skip before the run stops
    #[arg(long, value_name = "N", value_parser = whole(0..), default_value_t = 0)]
    pub(crate) max_skipped_steps: u64,
    /// Memory budget of one device: recomputation, prefetch and micro-batch size are chosen to fit unless given, and
    /// a run that needs more is refused [default: free memory]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) device_memory: Option<u64>,
    /// Host memory budget for all ranks [default: free memory]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) host_memory: Option<u64>,
    /// Disk budget for checkpoints and the model [default: free space]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = budget)]
    pub(crate) disk_space: Option<u64>,
    /// Steps between checkpoints; below 1, a share of all steps; the last step is always saved, and 0 saves only on
    /// request [default: 500]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = steps_or_zero)]
    pub(crate) save_steps: Option<StepCount>,
    /// Number of newest checkpoints to keep [default: all]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) save_total_limit: Option<u64>,
    /// Resume from the newest valid checkpoint of --output (auto) or from a given one, with any number of ranks and any stage
    #[arg(long, alias = "resume-from-checkpoint", value_name = "auto|DIR", num_args = 0..=1, default_missing_value = "auto")]
    pub(crate) resume: Option<String>,
    /// How often to restart from the newest valid checkpoint when a rank dies
    #[arg(long, value_name = "N", value_parser = whole(0..), default_value_t = 0)]
    pub(crate) max_restarts: u64,
    /// End after the save that SIGUSR1 and SIGUSR2 (warnings of cluster managers) ask for
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) signal_exit: bool,
    /// Where to report metrics besides metrics.jsonl: tensorboard, csv [default: none]
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) report_to: Vec<String>,
    /// Replace an existing run in the folder; other files are kept
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite_output_dir: bool,
    /// Resolve, plan, show the first micro-batch with its trained tokens marked, and exit
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) dry_run: bool,
    /// Print the compiled step program, or write it to FILE, and stop: one line per instruction with opcode, operands, queue
    /// and waits
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(crate) dump_program: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) on_hosts: HostArgs,
    /// Write a timeline of every instruction of every rank, for Perfetto
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Show the run live in the terminal, instead of the progress line; q leaves the view, Ctrl-C reaches the run
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) monitor: bool,
    /// Accepted for compatibility
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true")]
    pub(crate) do_train: bool,
    #[command(flatten)]
    pub(crate) trainer: TrainerArgs,
    #[command(flatten)]
    pub(crate) without_effect: FlagsWithoutEffect,
    #[command(flatten)]
    pub(crate) evaluation: EvaluationArgs,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    #[command(flatten)]
    pub(crate) kd: KdArgs,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Show rows as a model sees them: trained tokens marked, lengths, problems by row number
    Preview(PreviewArgs),
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth data preview --model my-model --data rows.jsonl --rows 2\n\nExit code 4 if rows are invalid."
)]
pub(crate) struct PreviewArgs {
    /// Hugging Face folder with a tokenizer, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: String,
    /// Files, folders or quoted patterns, as --data of `train`
    #[arg(long, aliases = ["dataset", "train-file", "data-path"], value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    #[command(flatten)]
    pub(crate) pairs: PairArgs,
    /// Number of rows to show
    #[arg(long, value_name = "N", value_parser = whole_as::<usize>(0..), default_value_t = 3)]
    pub(crate) rows: usize,
    /// Use only the first N rows
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) max_train_samples: Option<u64>,
}

/// How rows are tokenised.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReadingArgs {
    /// Column mapping, zeroth's name first: question=query,answer=reply
    #[arg(long, value_name = "OURS=THEIRS", num_args = 1.., value_delimiter = ',')]
    pub(crate) columns: Vec<String>,
    /// System message of conversations that have none, or a .txt file with it
    #[arg(long, value_name = "TEXT|FILE", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) rows: RowLengthArgs,
    /// Handling of longer rows
    #[arg(long, value_enum, value_name = "HOW", default_value_t = TruncationArg::Delete)]
    pub(crate) truncation_strategy: TruncationArg,
}

/// The length of rows.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct RowLengthArgs {
    /// Maximum tokens per row [default: the model's, at most 2048]
    #[arg(long, aliases = ["max-seq-length", "max-seq-len", "model-max-length", "cutoff-len"], value_name = "N", value_parser = whole(1..))]
    pub(crate) max_length: Option<u64>,
}

/// Handling of rows that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TruncationArg {
    /// Drop and count them
    Delete,
    /// Truncate the beginning
    Left,
    /// Truncate the end
    Right,
}
