//! Rotary positions: `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

use serde_json::{Map, Value};

use crate::error::FieldError;
use crate::fields::Fields;
use crate::limits::MAX_POSITIONS;

/// How fast queries and keys turn with their position.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// How the frequencies are stretched to longer sequences.
    pub scaling: RopeScaling,
}

/// A way to stretch rotary frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All frequencies are divided.
    Linear {
        /// Every frequency is divided by this.
        factor: f64,
    },
    /// The base grows with the sequence beyond the model's longest.
    Dynamic {
        /// How much longer sequences may become.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high ones stay, those between are blended.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Turns within the original length below which a frequency is low.
        low_freq_factor: f64,
        /// Turns within the original length above which a frequency is high.
        high_freq_factor: f64,
        /// The longest sequence before stretching.
        original_max_positions: u64,
    },
    /// YaRN: as llama 3, blended by dimension, and cos and sin are scaled.
    Yarn {
        /// What low frequencies are divided by.
        factor: f64,
        /// The longest sequence before stretching.
        original_max_positions: u64,
        /// The scale of cos and sin; derived from the factor and the two `mscale`s where absent.
        attention_factor: Option<f64>,
        /// Turns above which a dimension stays.
        beta_fast: f64,
        /// Turns below which a dimension is divided.
        beta_slow: f64,
        /// Numerator of the derived scale.
        mscale: Option<f64>,
        /// Denominator of the derived scale.
        mscale_all_dim: Option<f64>,
        /// Whether the blended range is widened to whole dimensions.
        truncate: bool,
    },
}

#[derive(Clone, Copy)]
enum Kind {
    Default,
    Linear,
    Dynamic,
    Llama3,
    Yarn,
}

const KINDS: [(&str, Kind); 5] = [
    ("default", Kind::Default),
    ("linear", Kind::Linear),
    ("dynamic", Kind::Dynamic),
    ("llama3", Kind::Llama3),
    ("yarn", Kind::Yarn),
];

/// `default_theta` is the base where a config gives none.
pub(crate) fn read(config: &Fields<'_>, max_positions: u64, default_theta: f64) -> Result<Rope, FieldError> {
    // transformers 5 takes the older name where both are filled.
    let empty = Map::new();
    let filled = |map: &&Map<String, Value>| !map.is_empty();
    let rope = match config.object("rope_scaling")?.filter(filled) {
        Some(map) => Fields::inside(map, "rope_scaling."),
        None => match config.object("rope_parameters")?.filter(filled) {
            Some(map) => Fields::inside(map, "rope_parameters."),
            None => Fields::inside(&empty, "rope_parameters."),
        },
    };
    refuse_what_no_family_has(config, &rope)?;

    let theta = match rope.positive("rope_theta")? {
        Some(theta) => theta,
        None => config.positive("rope_theta")?.unwrap_or(default_theta),
    };
    // `type` is the name the field had until transformers 4.43.
    let type_field = if rope.text("rope_type")?.is_some() { "rope_type" } else { "type" };
    let original = || match config.size_in("original_max_position_embeddings", 1, MAX_POSITIONS)?.value() {
        Some(positions) => Ok(positions),
        None => rope.size_or("original_max_position_embeddings", MAX_POSITIONS, max_positions),
    };
    let scaling = match rope.word(type_field, &KINDS, "default")? {
        Kind::Default => RopeScaling::Default,
        Kind::Linear => RopeScaling::Linear { factor: rope.required_positive("factor")? },
        Kind::Dynamic => RopeScaling::Dynamic { factor: rope.required_positive("factor")? },
        Kind::Llama3 => RopeScaling::Llama3 {
            factor: rope.required_positive("factor")?,
            low_freq_factor: rope.required_positive("low_freq_factor")?,
            high_freq_factor: rope.required_positive("high_freq_factor")?,
            original_max_positions: original()?,
        },
        Kind::Yarn => {
            let original_max_positions = original()?;
            let stretched = max_positions as f64 / original_max_positions as f64;
            // A beta of zero counts as absent in transformers.
            let beta = |field, default| match rope.number(field) {
                Ok(beta) => Ok(beta.filter(|beta| *beta != 0.0).unwrap_or(default)),
                Err(error) => Err(error),
            };
            RopeScaling::Yarn {
                factor: rope.positive("factor")?.unwrap_or(stretched),
                original_max_positions,
                attention_factor: rope.number("attention_factor")?,
                beta_fast: beta("beta_fast", 32.0)?,
                beta_slow: beta("beta_slow", 1.0)?,
                mscale: rope.number("mscale")?,
                mscale_all_dim: rope.number("mscale_all_dim")?,
                truncate: rope.flag("truncate")?.unwrap_or(true),
            }
        }
    };
    Ok(Rope { theta, scaling })
}

/// Partly rotated heads and different ropes for different blocks exist, but in none of our families.
fn refuse_what_no_family_has(config: &Fields<'_>, rope: &Fields<'_>) -> Result<(), FieldError> {
    for fields in [rope, config] {
        let field = "partial_rotary_factor";
        if let Some(factor) = fields.number(field)?
            && (factor - 1.0).abs() > f64::EPSILON
        {
            let (field, found) = (fields.path(field), factor.to_string());
            let why = "only heads that are rotated whole are supported".to_owned();
            return Err(FieldError::Unsupported { field, found, why });
        }
    }
    for layer_type in ["full_attention", "sliding_attention"] {
        if rope.object(layer_type)?.is_some() {
            let field = rope.path(layer_type);
            let why = "only one rope for all blocks is supported".to_owned();
            return Err(FieldError::Unsupported { field, found: "an object".to_owned(), why });
        }
    }
    Ok(())
}
