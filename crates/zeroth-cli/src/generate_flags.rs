//! The flags of `generate`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;

use crate::cli::DeviceArg;

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth generate --model run/model --prompt \"Weng earns $12 an hour.\"\n  \
                  zeroth generate --model run/model --prompt \"A bird\" --chat false --temperature 0.8 --top-p 0.95 --seed 7\n  \
                  zeroth generate --model run/model --prompt-ids 1,2,3 --max-new-tokens 0 --logits --format json\n  \
                  zeroth generate --model run/model --data held-out.jsonl\n\n\
                  Text comes on standard output as it is made, without the prompt; --data prints the first rows with their \
                  answers, and the exact match of all. An answer ends with a token that the folder's files \
                  name as an end, after --max-new-tokens, or where the model's positions end. Every token computes all tokens \
                  before it again: this is to look at a model, not to serve it."
)]
pub(crate) struct GenerateArgs {
    /// Hugging Face folder with weights, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    #[command(flatten)]
    pub(crate) rows: RowsArgs,
    /// What the system says before the prompt, in a chat
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with_all = ["prompt_ids", "data"])]
    pub(crate) system: Option<String>,
    /// Put the prompt into the folder's chat template, as a user's turn [default: true where there is a template]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", conflicts_with_all = ["prompt_ids", "data"])]
    pub(crate) chat: Option<bool>,
    /// The most tokens to make [default: 128; with --data, those of the longest expected answer]
    #[arg(long, value_name = "N")]
    pub(crate) max_new_tokens: Option<u64>,
    /// What logits are divided by before chance decides; 0 takes the most likely token
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_hyphen_values = true,
        conflicts_with = "data"
    )]
    pub(crate) temperature: f64,
    /// Choose among this many of the most likely tokens
    #[arg(long, value_name = "N", conflicts_with = "data")]
    pub(crate) top_k: Option<u64>,
    /// Choose among the fewest tokens that together are this likely
    #[arg(long, value_name = "X", allow_hyphen_values = true, conflicts_with = "data")]
    pub(crate) top_p: Option<f64>,
    /// Where chance comes from: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 42, conflicts_with = "data")]
    pub(crate) seed: u64,
    /// Compute in bf16 [default: the type the weights are stored in]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) bf16: Option<bool>,
    /// Compute in fp16
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp16: Option<bool>,
    /// Compute in fp32
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp32: Option<bool>,
    /// Where to compute [default: cuda where a GPU is found]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceArg>,
    /// CPU threads [default: processors]
    #[arg(long, alias = "threads-per-rank", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) threads: Option<u64>,
    /// With --format json: all logits of the token after the prompt, to compare with other programs
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
          conflicts_with = "data")]
    pub(crate) logits: bool,
}

/// What to go on from: one of them.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PromptArgs {
    /// What to go on from
    #[arg(long = "prompt", value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Option<String>,
    /// A file with it, taken as it is
    #[arg(long = "prompt-file", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Its tokens, such as 1,2,3: no tokenizer is needed
    #[arg(long, value_name = "IDS", value_delimiter = ',', allow_hyphen_values = true, value_parser = token_id)]
    pub(crate) prompt_ids: Vec<i32>,
    /// Rows to answer, in any format that `train` reads: each is prompted up to its answer, and the most likely tokens are
    /// compared with it
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
}

/// Which rows of `--data` are answered and shown.
#[derive(Debug, Args)]
pub(crate) struct RowsArgs {
    /// With --data: other names of columns, ours first: question=query,answer=reply
    #[arg(long, value_name = "OURS=THEIRS", num_args = 1.., value_delimiter = ',', conflicts_with_all = ["text", "file", "prompt_ids"])]
    pub(crate) columns: Vec<String>,
    /// With --data: answer only the first rows
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "file", "prompt_ids"])]
    pub(crate) max_eval_samples: Option<NonZeroU64>,
    /// With --data: how many of the first rows are shown
    #[arg(long, value_name = "N", default_value_t = 5, conflicts_with_all = ["text", "file", "prompt_ids"])]
    pub(crate) rows: usize,
}

fn token_id(text: &str) -> Result<i32, String> {
    text.trim()
        .parse()
        .map_err(|_| "is not a token: tokens are whole numbers with commas between them".to_owned())
}
