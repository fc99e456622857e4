//! Errors of saving and resuming.

use zeroth_base::counted;
use zeroth_engine::RunError;

use crate::checkpoint::CheckpointError;

/// An error saving a checkpoint.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum SaveError {
    #[error("cannot save step {step}: {source}")]
    Checkpoint { step: u64, source: Box<CheckpointError> },
    #[error("cannot save step {step}: rank {rank} failed")]
    OtherRank { step: u64, rank: usize },
    #[error(transparent)]
    Run(#[from] RunError),
}

/// A checkpoint that cannot be resumed with this command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum ResumeError {
    #[error(
        "the checkpoint was trained with {} per step, which resuming keeps: {} cannot share them \
         evenly; {} can",
        counted(*batch, "sample"), counted(*ranks, "rank"), listed(works)
    )]
    Ranks { batch: u64, ranks: u64, works: Vec<u64> },
    #[error(
        "the checkpoint was trained with {} per step, which resuming keeps: {requested} on {} does not \
         give that; leave batch sizes open, or use one of these for train_micro_batch_size_per_gpu × \
         gradient_accumulation_steps: {}",
        counted(*batch, "sample"), counted(*ranks, "rank"), pairs(works)
    )]
    Batch { batch: u64, ranks: u64, requested: String, works: Vec<(u64, u64)> },
    #[error(
        "{checkpoint} has adapters of another base: they were trained over {saved} (weights {expected}), and --model {given} \
         has other weights ({found}). Give the base that they were trained over, or start a new run over this one with \
         --adapter"
    )]
    Base { checkpoint: String, saved: String, expected: String, given: String, found: String },
    #[error(
        "{checkpoint} is a checkpoint of {}, and this command trains {}: resume with --train-type {}, or start a new run",
        kind(*is_lora), kind(!is_lora), if *is_lora { "lora" } else { "full" }
    )]
    TrainType { checkpoint: String, is_lora: bool },
    #[error(
        "{checkpoint} has other adapters: {}. Resuming keeps them: give the same flags, or start a new run from them with \
         --adapter", differences.join("; ")
    )]
    Adapters {
        checkpoint: String,
        /// What differs, as `--lora-alpha is 16, that of the checkpoint 32`.
        differences: Vec<String>,
    },
    #[error(
        "{checkpoint} was trained with another loss: {}. Resuming keeps it: give the same flags, or export the checkpoint \
         (`zeroth checkpoint export`) and start a new run from that model", differences.join("; ")
    )]
    Distillation {
        checkpoint: String,
        /// What differs, as `--kd-alpha is 0.5, that of the checkpoint 0.3`.
        differences: Vec<String>,
    },
    #[error(
        "{checkpoint} was trained as another model: {}. Resuming keeps the model: restore these fields of its config.json, or \
         export the checkpoint (`zeroth checkpoint export`), change its config.json and start a new run from that model",
        differences.join("; ")
    )]
    Function {
        checkpoint: String,
        /// What differs, as `num_experts_per_tok is 1, that of the checkpoint 2`.
        differences: Vec<String>,
    },
    #[error(
        "the checkpoint was trained on other data: {} then, {now} now{}. Its position in the data is meaningless \
         here. Use the same --data, --columns, --max-length, --packing and --split-dataset-ratio, or export the checkpoint (`zeroth checkpoint \
         export`) and start a new run from that model", counted(*before, "sample"), if before == now { ", with other tokens or labels" } else { "" }
    )]
    Data { before: u64, now: u64 },
}

const fn kind(is_lora: bool) -> &'static str {
    if is_lora { "LoRA" } else { "full training" }
}

/// Maximum number of options listed in a message.
const LISTED: usize = 24;

fn listed(numbers: &[u64]) -> String {
    joined(numbers.iter().map(ToString::to_string).collect())
}

fn pairs(works: &[(u64, u64)]) -> String {
    joined(works.iter().map(|(micro, times)| format!("{micro} × {times}")).collect())
}

fn joined(mut choices: Vec<String>) -> String {
    let more = choices.len().saturating_sub(LISTED);
    choices.truncate(LISTED);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    choices.join(", ") + &rest
}
