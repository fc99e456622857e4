//! Flags of encoder-decoder models, with the names of transformers' run_translation.

use clap::Args;

use crate::value_args::whole;

/// How rows become a source and a target.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PairArgs {
    /// Encoder-decoder models: text before every source, such as "translate English to German: "
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) source_prefix: Option<String>,
    /// Encoder-decoder models: language of sources in {"translation": {...}} rows
    #[arg(long, value_name = "LANGUAGE")]
    pub(crate) source_lang: Option<String>,
    /// Encoder-decoder models: language of targets
    #[arg(long, value_name = "LANGUAGE")]
    pub(crate) target_lang: Option<String>,
    #[command(flatten)]
    pub(crate) lengths: PairLengthArgs,
}

/// Maximum lengths of sources and targets.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct PairLengthArgs {
    /// Encoder-decoder models: maximum tokens per source, longer ones are truncated [default: 1024]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) max_source_length: Option<u64>,
    /// Encoder-decoder models: maximum tokens per target, longer ones are truncated [default: 128]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) max_target_length: Option<u64>,
}
