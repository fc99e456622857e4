//! Samples of encoder-decoder models: a source for the encoder, and labels for the decoder, each with its own length.

use std::path::Path;

use serde_json::{Map, Value};

use super::folder_file::read_object;
use super::{EncoderError, IGNORED};

/// Maximum lengths of a sample's two sequences, the end-of-text token included. Longer ones are truncated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairLimits {
    /// Tokens of a source (`--max-source-length`).
    pub source: u64,
    /// Tokens of a target (`--max-target-length`).
    pub target: u64,
}

/// The defaults of transformers' run_translation.
impl Default for PairLimits {
    fn default() -> Self {
        Self { source: 1024, target: 128 }
    }
}

/// The tokens that a decoder's inputs have and its labels do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecoderStart {
    /// The input of the first label (`decoder_start_token_id`).
    pub token: i32,
    /// The input that stands for an untrained label (`pad_token_id`).
    pub pad: Option<i32>,
}

/// What an encoder of pairs says about its samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pairs {
    /// Maximum lengths.
    pub limits: PairLimits,
    /// The tokens of decoder inputs.
    pub start: DecoderStart,
}

/// How a row becomes a source and a target, with the names of run_translation's arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairOptions {
    /// A text before every source (`--source-prefix`).
    pub prefix: String,
    /// The language of sources (`--source-lang`).
    pub source_lang: Option<String>,
    /// The language of targets (`--target-lang`).
    pub target_lang: Option<String>,
    /// Maximum lengths, and the tokens of decoder inputs.
    pub pairs: Pairs,
}

impl PairOptions {
    /// No prefix and no languages.
    pub fn new(pairs: Pairs) -> Self {
        Self { prefix: String::new(), source_lang: None, target_lang: None, pairs }
    }
}

impl DecoderStart {
    /// The tokens of a model folder: config.json, then generation_config.json.
    pub fn of_folder(folder: &Path, vocabulary: u64) -> Result<Self, EncoderError> {
        let config = read_object(&folder.join("config.json"))?;
        let generation = read_object(&folder.join("generation_config.json"))?;
        let given = |key: &str| config.get(key).or_else(|| generation.get(key));
        let token = |key: &'static str| -> Result<Option<i32>, EncoderError> {
            let Some(value) = given(key).filter(|value| !value.is_null()) else { return Ok(None) };
            let id = value.as_u64().filter(|id| *id < vocabulary).and_then(|id| i32::try_from(id).ok());
            id.map(Some).ok_or_else(|| EncoderError::DecoderToken {
                folder: folder.to_owned(),
                key,
                found: value.to_string(),
                vocabulary,
            })
        };
        let no_start = || EncoderError::NoDecoderStart { folder: folder.to_owned() };
        Ok(Self { token: token("decoder_start_token_id")?.ok_or_else(no_start)?, pad: pad(&config, token)? })
    }

    /// Appends the decoder's input of each label: the labels shifted right by one.
    pub fn append_inputs(self, labels: &[i32], into: &mut Vec<i32>) {
        let before = |&label: &i32| if label == IGNORED { self.pad.unwrap_or(self.token) } else { label };
        let shifted = labels.iter().take(labels.len().saturating_sub(1)).map(before);
        into.extend(labels.first().map(|_| self.token).into_iter().chain(shifted));
    }

    /// The decoder's inputs of these labels.
    pub fn inputs(self, labels: &[i32]) -> Vec<i32> {
        let mut inputs = Vec::with_capacity(labels.len());
        self.append_inputs(labels, &mut inputs);
        inputs
    }
}

/// The padding token; a config without the key has T5's default.
fn pad(
    config: &Map<String, Value>,
    token: impl Fn(&'static str) -> Result<Option<i32>, EncoderError>,
) -> Result<Option<i32>, EncoderError> {
    let found = token("pad_token_id")?;
    Ok(if config.contains_key("pad_token_id") { found } else { found.or(Some(0)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoder_inputs_are_labels_shifted_right() {
        let start = DecoderStart { token: 9, pad: Some(0) };
        assert_eq!(start.inputs(&[5, 6, 1]), [9, 5, 6]);
        assert_eq!(start.inputs(&[5, -100, 6, 1]), [9, 5, 0, 6]);
        assert_eq!(start.inputs(&[-100]), [9]);
        assert!(start.inputs(&[]).is_empty());
    }

    #[test]
    fn tokens_of_the_decoder_are_those_of_the_configs() {
        let folder = tempfile::tempdir().unwrap();
        let found = |config: &str, generation: &str| {
            std::fs::write(folder.path().join("config.json"), config).unwrap();
            std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
            DecoderStart::of_folder(folder.path(), 10).map_err(|error| error.to_string())
        };
        let start = |token, pad| Ok(DecoderStart { token, pad });
        assert_eq!(found(r#"{"decoder_start_token_id": 3, "pad_token_id": 4}"#, "{}"), start(3, Some(4)));
        assert_eq!(found("{}", r#"{"decoder_start_token_id": 3}"#), start(3, Some(0)));
        assert_eq!(found(r#"{"decoder_start_token_id": 3, "pad_token_id": null}"#, "{}"), start(3, None));
        let error = found(r#"{"pad_token_id": 0}"#, "{}").unwrap_err();
        assert!(error.contains("no decoder_start_token_id"), "{error}");
        let error = found(r#"{"decoder_start_token_id": 10}"#, "{}").unwrap_err();
        assert!(error.contains("decoder_start_token_id is 10") && error.contains("0 to 9"), "{error}");
    }
}
