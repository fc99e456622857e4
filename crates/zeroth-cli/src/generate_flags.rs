//! The flags of `generate`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use zeroth::train::{BeamSettings, EarlyStopping};

use crate::pair_args::PairArgs;
use crate::value_args::{DeviceArg, number, whole, whole_as};

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth generate --model run/model --prompt \"Weng earns $12 an hour.\"\n  \
                  zeroth generate --model run/model --prompt \"A bird\" --chat false --temperature 0.8 --top-p 0.95 --seed 7\n  \
                  zeroth generate --model run/model --prompt \"A bird\" --do-sample --num-return-sequences 4 --format json\n  \
                  zeroth generate --model run/model --prompt-ids 1,2,3 --max-new-tokens 0 --logits --format json\n  \
                  zeroth generate --model run/model --data held-out.jsonl\n  \
                  zeroth generate --model Qwen/Qwen3-8B --adapter run/model --prompt \"A bird\"\n  \
                  zeroth generate --model t5-small --source-prefix \"translate English to German: \" --prompt \"A bird\" --num-beams 4\n  \
                  zeroth generate --model run/model\n\n\
                  Without a prompt it is a chat: turns are typed at a terminal, or read from standard input line by line. \
                  Text is streamed to standard output without the prompt; --data prints the first rows with their \
                  answers, and the exact match over all. Generation ends at an end-of-text token, after --max-new-tokens, at a text of --stop, or when the model's context is full. Meant for inspecting a model, not for serving."
)]
pub(crate) struct GenerateArgs {
    /// Hugging Face folder with weights, or a name in the local Hugging Face cache
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: String,
    /// Folder of a LoRA adapter that zeroth or PEFT wrote, over --model; it is not merged
    #[arg(long, aliases = ["adapters", "adapter-name-or-path", "lora-model-dir"], value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,
    /// Use an --adapter that was trained over another base
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) allow_other_base: bool,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    #[command(flatten)]
    pub(crate) rows: RowsArgs,
    /// System message before the prompt in a chat, and of rows of --data that have none; or a .txt file with it
    #[arg(long, value_name = "TEXT|FILE", allow_hyphen_values = true, conflicts_with = "prompt_ids")]
    pub(crate) system: Option<String>,
    /// Render the prompt as a user turn with the chat template [default: true if there is a template]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", conflicts_with_all = ["prompt_ids", "data"])]
    pub(crate) chat: Option<bool>,
    /// Maximum number of new tokens [default: 128; 512 per answer of a chat without a prompt; with --data, that of the
    /// longest expected answer]
    #[arg(long, value_name = "N", value_parser = whole(0..))]
    pub(crate) max_new_tokens: Option<u64>,
    /// Without a prompt: maximum tokens of the conversation; its oldest turns are dropped beyond [default: the model's, at
    /// most 4096]
    #[arg(long, value_name = "N", value_parser = whole(2..),
          conflicts_with_all = ["text", "file", "prompt_ids", "data"])]
    pub(crate) max_length: Option<u64>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) beams: BeamArgs,
    #[command(flatten)]
    pub(crate) pairs: PairArgs,
    /// Compute in bf16 [default: the dtype of the weights]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) bf16: Option<bool>,
    /// Compute in fp16
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp16: Option<bool>,
    /// Compute in fp32
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp32: Option<bool>,
    /// Device [default: cuda if a GPU is found]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceArg>,
    /// CPU threads [default: all CPUs]
    #[arg(long, alias = "threads-per-rank", value_name = "N", value_parser = whole(1..=1024))]
    pub(crate) threads: Option<u64>,
    /// With --format json: also output the logits of the token after the prompt
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
          conflicts_with = "data")]
    pub(crate) logits: bool,
}

/// Beam search, with the names of Hugging Face's `generate`.
#[derive(Debug, Args)]
pub(crate) struct BeamArgs {
    /// Encoder-decoder models: beams of a beam search; 1 decodes greedily
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=64))]
    pub(crate) num_beams: u64,
    /// With --num-beams: scores are divided by the length to this power; above 0 favours longer texts [default: 1]
    #[arg(long, value_name = "X", value_parser = number, allow_hyphen_values = true)]
    pub(crate) length_penalty: Option<f64>,
    /// With --num-beams: whether the search ends as soon as there are as many texts as beams (true), when better ones are
    /// unlikely (false), or impossible (never) [default: false]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) early_stopping: Option<EarlyStoppingArg>,
}

/// When a beam search ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EarlyStoppingArg {
    /// As soon as there are as many texts as beams
    True,
    /// When better ones are unlikely
    False,
    /// When better ones are impossible
    Never,
}

impl BeamArgs {
    /// The settings of a beam search; refused for models without an encoder.
    pub(crate) fn settings(&self, is_encoder_decoder: bool) -> anyhow::Result<BeamSettings> {
        let Self { num_beams, length_penalty, early_stopping } = *self;
        anyhow::ensure!(
            num_beams == 1 || is_encoder_decoder,
            "--num-beams is not yet built for decoder-only models: leave it out for greedy decoding"
        );
        anyhow::ensure!(
            num_beams > 1 || (length_penalty.is_none() && early_stopping.is_none()),
            "--length-penalty and --early-stopping are for a beam search: give --num-beams 2 or more"
        );
        let length_penalty = length_penalty.unwrap_or(1.0);
        anyhow::ensure!(
            length_penalty.is_finite(),
            "--length-penalty is {length_penalty}: it must be a finite number"
        );
        let early_stopping = match early_stopping {
            Some(EarlyStoppingArg::True) => EarlyStopping::Always,
            Some(EarlyStoppingArg::Never) => EarlyStopping::Never,
            Some(EarlyStoppingArg::False) | None => EarlyStopping::Heuristic,
        };
        Ok(BeamSettings { beams: num_beams as usize, length_penalty, early_stopping })
    }
}

/// How a token is chosen from its logits, and what ends the text.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Sample; false decodes greedily [default: true if --temperature is above 0]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", conflicts_with = "data")]
    pub(crate) do_sample: Option<bool>,
    /// Sampling temperature; 0 decodes greedily [default: 0; 1 with --do-sample]
    #[arg(long, value_name = "X", value_parser = number, allow_hyphen_values = true, conflicts_with = "data")]
    pub(crate) temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0 from all
    #[arg(long, value_name = "N", value_parser = whole(0..), conflicts_with = "data")]
    pub(crate) top_k: Option<u64>,
    /// Nucleus sampling: sample from the smallest set of tokens with this total probability
    #[arg(long, value_name = "X", value_parser = number, allow_hyphen_values = true, conflicts_with = "data")]
    pub(crate) top_p: Option<f64>,
    /// Sample from tokens that are at least this fraction as likely as the most likely one
    #[arg(long, value_name = "X", value_parser = number, allow_hyphen_values = true, conflicts_with = "data")]
    pub(crate) min_p: Option<f64>,
    /// Divides positive logits, and multiplies negative ones, of tokens in the prompt or the text so far
    #[arg(
        long,
        value_name = "X", value_parser = number,
        default_value_t = 1.0,
        allow_hyphen_values = true,
        conflicts_with = "data"
    )]
    pub(crate) repetition_penalty: f64,
    /// Random seed
    #[arg(long, value_name = "N", value_parser = whole(0..), default_value_t = 42, conflicts_with = "data")]
    pub(crate) seed: u64,
    /// Sample this many texts of the prompt; the first is the one without this flag
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=4096), conflicts_with = "data")]
    pub(crate) num_return_sequences: u64,
    /// End the text at any of these texts, which are not printed; one that begins with a hyphen as in --stop=-TEXT
    #[arg(long, aliases = ["stop-strings", "stop-words"], value_name = "TEXT", num_args = 1..,
          value_parser = clap::builder::NonEmptyStringValueParser::new(), conflicts_with = "data")]
    pub(crate) stop: Vec<String>,
}

/// The prompt: at most one of these.
#[derive(Debug, Args)]
#[group(required = false, multiple = false)]
pub(crate) struct PromptArgs {
    /// Prompt text
    #[arg(long = "prompt", value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Option<String>,
    /// File with the prompt, used verbatim
    #[arg(long = "prompt-file", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Token ids of the prompt, such as 1,2,3; needs no tokenizer
    #[arg(long, value_name = "IDS", value_delimiter = ',', allow_hyphen_values = true, value_parser = token_id)]
    pub(crate) prompt_ids: Vec<i32>,
    /// Rows to answer, in any format of `train`: each is prompted up to its answer, and the greedy continuation is compared
    /// with it
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
}

/// Rows of `--data` to answer and show.
#[derive(Debug, Args)]
pub(crate) struct RowsArgs {
    /// With --data: column mapping, zeroth's name first: question=query,answer=reply
    #[arg(long, value_name = "OURS=THEIRS", num_args = 1.., value_delimiter = ',', conflicts_with_all = ["text", "file", "prompt_ids"])]
    pub(crate) columns: Vec<String>,
    /// With --data: answer only the first N rows
    #[arg(long, value_name = "N", value_parser = whole_as::<NonZeroU64>(1..), conflicts_with_all = ["text", "file", "prompt_ids"])]
    pub(crate) max_eval_samples: Option<NonZeroU64>,
    /// With --data: number of rows to show [default: 5]
    #[arg(long, value_name = "N", value_parser = whole_as::<usize>(0..), conflicts_with_all = ["text", "file", "prompt_ids"])]
    pub(crate) rows: Option<usize>,
}

fn token_id(text: &str) -> Result<i32, String> {
    text.trim()
        .parse()
        .map_err(|_| "is not a token: tokens are whole numbers with commas between them".to_owned())
}
