//! Reads a `config.json` into a [`ModelConfig`], and makes its parameter table.

use std::path::Path;

use serde_json::{Map, Value};

use crate::architecture::FamilyStacks;
use crate::config::ModelConfig;
use crate::error::{FieldError, ModelError};
use crate::family::Family;
use crate::fields::Fields;
use crate::folder::{NamedConfig, model_folder, parse, read_config};
use crate::layer::Layer;
use crate::limits::MAX_PARAMETERS;
use crate::safetensors::weights_include;
use crate::table::ParameterTable;
use crate::{decoder, t5};

impl ModelConfig {
    /// Reads the `config.json` in a model folder, or at that very path. See [`crate::locate`] for names.
    pub fn from_folder(path: &Path) -> Result<Self, ModelError> {
        let (map, origin) = read_config(path)?;
        let mut config = Self::from_map(&map, &origin)?;
        if config.family.is_encoder_decoder() && config.tied_head {
            config.tied_head = weights_include(&model_folder(path)?, "lm_head.weight") != Some(true);
        }
        Ok(config)
    }

    /// Reads a config found by name: with the weights beside it, as [`Self::from_folder`] does, where it has a folder.
    pub fn from_named(named: &NamedConfig) -> Result<Self, ModelError> {
        match &named.folder {
            Some(folder) => Self::from_folder(folder),
            None => Self::from_map(&named.map, &named.origin),
        }
    }

    /// Reads the text of a `config.json`; `origin` is what messages call it.
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ModelError> {
        Self::from_map(&parse(text.as_bytes(), origin)?, origin)
    }

    /// Reads a `config.json` that is parsed already, as [`read_config`] returns it.
    pub fn from_map(map: &Map<String, Value>, origin: &str) -> Result<Self, ModelError> {
        let fields = Fields::new(map);
        let family = Family::of(&fields, origin)?;
        let config = match &family.architecture().stack {
            FamilyStacks::Decoder(decoder) => decoder::read(family, decoder, &fields),
            FamilyStacks::EncoderDecoder(stacks) => t5::read(family, stacks, &fields),
        };
        config
            .and_then(check_parameters)
            .map_err(|source| ModelError::Field { origin: origin.to_owned(), source })
    }
}

/// The parameter table of a model.
pub fn table(config: &ModelConfig) -> ParameterTable {
    match config.family.architecture().stack {
        FamilyStacks::Decoder(_) => decoder::table(config),
        FamilyStacks::EncoderDecoder(_) => t5::table(config),
    }
}

/// Refuses sizes that are each within limits and together give more parameters than any model has.
fn check_parameters(config: ModelConfig) -> Result<ModelConfig, FieldError> {
    let [hidden, vocab, ffn] = [config.hidden, config.vocab, config.ffn].map(u128::from);
    let of_layer = |layer: &Layer| {
        let attention = layer.attention().map_or(0, |attention| 2 * (attention.q.out + attention.k.out));
        let experts = layer.experts().map_or(0, |experts| experts.count * (3 * experts.width + 1));
        // A decoder's block of an encoder-decoder has two attentions; biases and norms are less than one width of each.
        2 * hidden * (u128::from(attention) + 4) + 3 * ffn * (hidden + 1) + u128::from(experts) * hidden
    };
    let total = 2 * vocab * hidden + config.all_layers().map(of_layer).sum::<u128>();
    if total <= u128::from(MAX_PARAMETERS) {
        return Ok(config);
    }
    let (field, value) = ("number of parameters".to_owned(), format!("about {total}"));
    Err(FieldError::OutOfRange { field, value, least: 1, most: MAX_PARAMETERS })
}
