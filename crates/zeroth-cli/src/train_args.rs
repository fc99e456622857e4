//! What `train` and `data` take: the model, the data, the run, and how rows become tokens.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use zeroth::base::parse_bytes;

use crate::cli::{DeviceArg, TrainTypeArg};
use crate::train_flags::TrainFlags;

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth train --model my-model --data rows.jsonl --deepspeed zero3 --ranks 2 --output run\n\n\
                  A key that the file leaves open or sets to \"auto\" takes the flag's value, else its default. A flag that was \
                  typed and contradicts the file is refused. The run folder holds metrics.jsonl, plan.json, config.json with the \
                  origin of each value, checkpoints, and the trained model."
)]
pub(crate) struct TrainArgs {
    /// Hugging Face folder, or a name in the local Hugging Face cache; with config.json alone, weights come from --seed
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: String,
    /// JSONL or Parquet: rows of messages, conversations (sharegpt), instruction/output (alpaca), prompt/completion,
    /// question/answer, text, translation, or ready tokens (input_ids, labels; -100 is not trained)
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Rows to measure the loss on
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) eval_data: Vec<PathBuf>,
    /// Steps from one evaluation to the next [default: 500]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) eval_steps: Option<u64>,
    /// zero0, zero1, zero2, zero3 (or with _offload), or a DeepSpeed JSON file
    #[arg(long, value_name = "NAME|FILE", default_value = "zero2")]
    pub(crate) deepspeed: String,
    /// The run's folder
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Ranks on this machine [default: GPUs found, else 1]
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub(crate) ranks: Option<u64>,
    /// Where to compute [default: cuda where a GPU is found]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceArg>,
    /// CPU threads of a rank [default: processors / ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) threads_per_rank: Option<u64>,
    /// Passes over the data, where --max-steps is not given [default: 3]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) num_train_epochs: Option<f64>,
    /// Put rows together into sequences of up to --max-length; attention never crosses from one to the next
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) packing: bool,
    /// Take only the first rows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_train_samples: Option<u64>,
    /// A new order in every epoch, by --seed; false takes rows in the file's order
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true")]
    pub(crate) shuffle: bool,
    /// Where all chance comes from
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
    /// Steps from one line of progress to the next, where there is no terminal; steps_per_print adds lines [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) logging_steps: Option<u64>,
    /// Steps with a gradient that is not finite that may be skipped before the run stops
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) max_skipped_steps: u64,
    /// Memory of one device: recomputation, prefetch and micro-batches that nobody typed are chosen to fit it, and what needs
    /// more is refused before it starts [default: what is free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) device_memory: Option<u64>,
    /// Memory of the machine for all ranks [default: what is free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) host_memory: Option<u64>,
    /// Disk that checkpoints and the model may take [default: what is free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) disk_space: Option<u64>,
    /// Steps from one checkpoint to the next; the last step is always saved, and 0 saves only when asked to [default: 500]
    #[arg(long, value_name = "N")]
    pub(crate) save_steps: Option<u64>,
    /// Checkpoints that are kept, the newest ones [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) save_total_limit: Option<u64>,
    /// Go on from the newest good checkpoint of --output (auto), or from one: at any number of ranks and any stage
    #[arg(long, alias = "resume-from-checkpoint", value_name = "auto|DIR", num_args = 0..=1, default_missing_value = "auto")]
    pub(crate) resume: Option<String>,
    /// Start again from the newest good checkpoint when a rank dies, so many times
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) max_restarts: u64,
    /// Where metrics go besides metrics.jsonl: tensorboard, csv
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) report_to: Vec<String>,
    /// Replace a run that the folder holds; other files stay
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) overwrite_output_dir: bool,
    /// Resolve, plan, show the first micro-batch with its trained tokens marked, and stop
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) dry_run: bool,
    /// Print the compiled step program, or write it to FILE, and stop: one line per instruction with opcode, operands, queue
    /// and waits
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(crate) dump_program: Option<PathBuf>,
    /// A timeline of every instruction of every rank, for Perfetto
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// What is trained: all parameters; LoRA's own are not yet
    #[arg(long, value_enum, default_value_t = TrainTypeArg::Full, value_name = "TYPE")]
    pub(crate) train_type: TrainTypeArg,
    /// Accepted: there is nothing else to do
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true")]
    pub(crate) do_train: bool,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Look at rows as a model will see them: trained tokens marked, lengths, rows with problems by number
    Preview(PreviewArgs),
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth data preview --model my-model --data rows.jsonl --rows 2\n\nExit 4 where rows are wrong."
)]
pub(crate) struct PreviewArgs {
    /// Hugging Face folder with a tokenizer, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: String,
    /// JSONL or Parquet
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// How many of the first rows are shown
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) rows: usize,
    /// Take only the first rows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_train_samples: Option<u64>,
}

/// How rows become tokens.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReadingArgs {
    /// Other names of columns, ours first: question=query,answer=reply
    #[arg(long, value_name = "OURS=THEIRS", num_args = 1.., value_delimiter = ',')]
    pub(crate) columns: Vec<String>,
    /// The longest row in tokens [default: the model's longest, at most 2048]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_length: Option<u64>,
    /// What becomes of longer rows: left out and counted, or cut
    #[arg(long, value_enum, value_name = "HOW", default_value_t = TruncationArg::Delete)]
    pub(crate) truncation_strategy: TruncationArg,
}

/// What becomes of rows that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TruncationArg {
    /// Left out and counted
    Delete,
    /// Their beginning is cut off
    Left,
    /// Their end is cut off
    Right,
}
