//! Which of the known families a `config.json` belongs to.

use std::fmt;

use serde_json::Value;
use zeroth_base::nearest;

use crate::ModelError;
use crate::fields::Fields;

/// A family of models: configs that are read alike and have the same parameter names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 1 to 3.
    Llama,
    /// Mistral 7B and its relatives: llama with an attention window.
    Mistral,
    /// Qwen2 and Qwen2.5: llama with biases on q, k and v.
    Qwen2,
    /// Qwen3, dense: llama with norms on q and k.
    Qwen3,
    /// Qwen3 with a mixture of experts.
    Qwen3Moe,
    /// T5, T5 v1.1 and Flan-T5: encoder and decoder.
    T5,
    /// mT5: T5 v1.1 with a large vocabulary and other defaults.
    Mt5,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 7] =
        [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Qwen3Moe, Self::T5, Self::Mt5];

    /// The `model_type` of its configs.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::T5 => "t5",
            Self::Mt5 => "mt5",
        }
    }

    /// The class of its language models, as `architectures` names it.
    pub const fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::T5 => "T5ForConditionalGeneration",
            Self::Mt5 => "MT5ForConditionalGeneration",
        }
    }

    /// Whether an encoder reads what a decoder continues.
    pub const fn is_encoder_decoder(self) -> bool {
        matches!(self, Self::T5 | Self::Mt5)
    }

    /// The `model_type`s of all families, for messages.
    pub(crate) fn known() -> String {
        Self::ALL.map(Self::model_type).join(", ")
    }

    /// The family that `model_type` names, or `architectures` where an old file has no `model_type`.
    pub(crate) fn of(fields: &Fields<'_>, origin: &str) -> Result<Self, ModelError> {
        let in_field = |source| ModelError::Field { origin: origin.to_owned(), source };
        let model_type = fields.text("model_type").map_err(in_field)?;
        let classes =
            fields.list("architectures", "a list of class names", Value::as_str).map_err(in_field)?;
        let classes = classes.unwrap_or_default();
        let family = match model_type {
            Some(name) => Self::ALL.into_iter().find(|family| family.model_type() == name),
            None => Self::ALL.into_iter().find(|family| family.makes(&classes)),
        };
        let Some(family) = family else {
            return Err(Self::unknown(model_type, &classes, origin));
        };
        if !classes.is_empty() && !family.makes(&classes) {
            return Err(ModelError::UnknownArchitecture {
                origin: origin.to_owned(),
                family,
                found: classes.join(", "),
                known: family.architecture(),
            });
        }
        Ok(family)
    }

    /// Whether one of the classes is this family's language model.
    fn makes(self, classes: &[&str]) -> bool {
        classes.contains(&self.architecture())
            // The name T5's class had when the first checkpoints were published.
            || (self == Self::T5 && classes.contains(&"T5WithLMHeadModel"))
    }

    fn unknown(model_type: Option<&str>, classes: &[&str], origin: &str) -> ModelError {
        let near = match (model_type, classes) {
            (Some(name), _) => nearest(name, Self::ALL.map(Self::model_type)),
            // Only the stem tells families apart: most classes end alike.
            (None, [class, ..]) => {
                let stem = class.split_once("For").map_or(*class, |(stem, _)| stem);
                nearest(stem, Self::ALL.map(Self::model_type))
            }
            (None, []) => None,
        };
        let found = match (model_type, classes) {
            (Some(name), []) => format!("model_type `{name}`"),
            (Some(name), _) => format!("model_type `{name}` (architectures: {})", classes.join(", ")),
            (None, []) => "a config without `model_type` and `architectures`".to_owned(),
            (None, _) => format!("`{}` in `architectures`", classes.join(", ")),
        };
        ModelError::UnknownFamily { origin: origin.to_owned(), found, near }
    }
}

impl fmt::Display for Family {
    /// Its `model_type`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}
