//! How rows of an encoder-decoder become a source and a target.

use std::path::Path;

use zeroth_data::{DecoderStart, PairLimits, PairOptions, Pairs};
use zeroth_model::ModelConfig;

use super::data_error::DataRequestError;

/// Sources and targets of an encoder-decoder.
#[derive(Debug, Clone, Default)]
pub struct PairRequest {
    /// Text before every source.
    pub source_prefix: Option<String>,
    /// Language of sources in rows with translations.
    pub source_lang: Option<String>,
    /// Language of targets.
    pub target_lang: Option<String>,
    /// Maximum lengths.
    pub lengths: PairLengths,
}

/// Maximum tokens of sources and targets.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct PairLengths {
    pub source: Option<u64>,
    pub target: Option<u64>,
}

impl PairLengths {
    /// The limits of an encoder-decoder; `None` for other models, for which these lengths are refused.
    pub fn limits(self, model: &ModelConfig) -> Result<Option<PairLimits>, DataRequestError> {
        let typed =
            [("--max-source-length", self.source.is_some()), ("--max-target-length", self.target.is_some())];
        if !model.family.is_encoder_decoder() {
            return refuse(model, typed, "--max-length is the maximum length of rows").map(|()| None);
        }
        let usual = PairLimits::default();
        Ok(Some(PairLimits {
            source: self.source.unwrap_or(usual.source),
            target: self.target.unwrap_or(usual.target),
        }))
    }
}

impl PairRequest {
    /// The options of an encoder-decoder; `None` for other models, for which these values are refused.
    pub fn options(
        &self,
        model: &ModelConfig,
        folder: &Path,
    ) -> Result<Option<PairOptions>, DataRequestError> {
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

/// Refuses the first value given for a model that is not an encoder-decoder.
fn refuse<const N: usize>(
    model: &ModelConfig,
    typed: [(&'static str, bool); N],
    instead: &'static str,
) -> Result<(), DataRequestError> {
    match typed.into_iter().find(|(_, is_typed)| *is_typed) {
        None => Ok(()),
        Some((flag, _)) => {
            let family = model.family.model_type();
            Err(DataRequestError::NotPairs { flag, family, instead })
        }
    }
}
