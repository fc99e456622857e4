//! Flags of encoder-decoder models, with the names of transformers' run_translation.

use std::path::Path;

use clap::Args;
use zeroth::data::{DecoderStart, PairLimits, PairOptions, Pairs};
use zeroth::model::ModelConfig;

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

impl PairLengthArgs {
    /// The limits of an encoder-decoder; `None` for other models, for which these flags are refused.
    pub(crate) fn limits(self, model: &ModelConfig) -> anyhow::Result<Option<PairLimits>> {
        let typed = [
            ("--max-source-length", self.max_source_length.is_some()),
            ("--max-target-length", self.max_target_length.is_some()),
        ];
        if !model.family.is_encoder_decoder() {
            return refuse(model, typed, "--max-length is the maximum length of rows").map(|()| None);
        }
        let usual = PairLimits::default();
        Ok(Some(PairLimits {
            source: self.max_source_length.unwrap_or(usual.source),
            target: self.max_target_length.unwrap_or(usual.target),
        }))
    }
}

impl PairArgs {
    /// The options of an encoder-decoder; `None` for other models, for which these flags are refused.
    pub(crate) fn options(&self, model: &ModelConfig, folder: &Path) -> anyhow::Result<Option<PairOptions>> {
        let typed = [
            ("--source-prefix", self.source_prefix.is_some()),
            ("--source-lang", self.source_lang.is_some()),
            ("--target-lang", self.target_lang.is_some()),
        ];
        if !model.family.is_encoder_decoder() {
            let instead = "--columns source=en,target=de selects the languages of translation rows, and prompts hold their \
                           own prefix";
            refuse(model, typed, instead)?;
        }
        let Some(limits) = self.lengths.limits(model)? else { return Ok(None) };
        let start = DecoderStart::of_folder(folder, model.vocab)?;
        Ok(Some(PairOptions {
            prefix: self.source_prefix.clone().unwrap_or_default(),
            source_lang: self.source_lang.clone(),
            target_lang: self.target_lang.clone(),
            pairs: Pairs { limits, start },
        }))
    }
}

/// Refuses the first typed flag for a model that is not an encoder-decoder.
fn refuse<const N: usize>(
    model: &ModelConfig,
    typed: [(&str, bool); N],
    instead: &str,
) -> anyhow::Result<()> {
    match typed.into_iter().find(|(_, is_typed)| *is_typed) {
        None => Ok(()),
        Some((flag, _)) => anyhow::bail!(
            "{flag} is for encoder-decoder models such as t5, and {} is decoder-only: it reads source and target as one \
             sequence; leave it out ({instead})",
            model.family.model_type()
        ),
    }
}
