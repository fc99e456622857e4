//! The families of models, and which of them a `config.json` belongs to.

use std::fmt;

use serde_json::Value;
use zeroth_base::nearest;

use crate::ModelError;
use crate::architecture::{Architecture, FamilyStacks, Mixture};
use crate::fields::Fields;

/// Declares the families: each is a variant of [`Family`] and a file of `family/` with its `ARCHITECTURE`.
macro_rules! families {
    ($( $(#[$doc:meta])* $family:ident = $file:ident ),* $(,)?) => {
        $( mod $file; )*

        /// A family of models: configs that are read alike and have the same parameter names.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Family {
            $( $(#[$doc])* $family ),*
        }

        impl Family {
            /// All families.
            pub const ALL: &'static [Self] = &[$( Self::$family ),*];

            /// What sets the family apart.
            pub(crate) const fn architecture(self) -> &'static Architecture {
                match self {
                    $( Self::$family => &$file::ARCHITECTURE ),*
                }
            }
        }
    };
}

families! {
    /// Llama 1 to 3.
    Llama = llama,
    /// Mistral 7B and its relatives: llama with an attention window.
    Mistral = mistral,
    /// Ministral 8B: mistral with an attention window in some layers.
    Ministral = ministral,
    /// Qwen2 and Qwen2.5: llama with biases on q, k and v.
    Qwen2 = qwen2,
    /// Qwen3, dense: llama with norms on q and k.
    Qwen3 = qwen3,
    /// Qwen3 with a mixture of experts.
    Qwen3Moe = qwen3_moe,
    /// Mixtral: mistral with a mixture of experts.
    Mixtral = mixtral,
    /// T5, T5 v1.1 and Flan-T5: encoder and decoder.
    T5 = t5,
    /// mT5: T5 v1.1 with a large vocabulary and other defaults.
    Mt5 = mt5,
}

/// Families with experts that others train and that are not built here yet.
const NOT_YET: [&str; 3] = ["gpt_oss", "deepseek_v2", "deepseek_v3"];

impl Family {
    /// The `model_type` of its configs.
    pub const fn model_type(self) -> &'static str {
        self.architecture().model_type
    }

    /// The class of its language models, as `architectures` names it.
    pub const fn class(self) -> &'static str {
        self.architecture().classes[0]
    }

    /// Whether an encoder reads what a decoder continues.
    pub const fn is_encoder_decoder(self) -> bool {
        matches!(self.architecture().stack, FamilyStacks::EncoderDecoder(_))
    }

    /// The mixture of experts of its models, where they may have one.
    pub(crate) const fn mixture(self) -> Option<Mixture> {
        match &self.architecture().stack {
            FamilyStacks::Decoder(decoder) => decoder.mixture,
            FamilyStacks::EncoderDecoder(_) => None,
        }
    }

    fn model_types() -> impl Iterator<Item = &'static str> + Clone {
        Self::ALL.iter().map(|family| family.model_type())
    }

    /// The family that `model_type` names, or `architectures` where an old file has no `model_type`.
    pub(crate) fn of(fields: &Fields<'_>, origin: &str) -> Result<Self, ModelError> {
        let in_field = |source| ModelError::Field { origin: origin.to_owned(), source };
        let model_type = fields.text("model_type").map_err(in_field)?;
        let classes =
            fields.list("architectures", "a list of class names", Value::as_str).map_err(in_field)?;
        let classes = classes.unwrap_or_default();
        let is_of = |family: &&Self| match model_type {
            Some(name) => family.model_type() == name,
            None => family.makes(&classes),
        };
        let Some(family) = Self::ALL.iter().find(is_of).copied() else {
            if let Some(found) = model_type.and_then(|name| NOT_YET.into_iter().find(|known| *known == name))
            {
                let known = Self::model_types().collect::<Vec<_>>().join(", ");
                return Err(ModelError::FamilyNotYet { origin: origin.to_owned(), found, known });
            }
            return Err(Self::unknown(model_type, &classes, origin));
        };
        if !classes.is_empty() && !family.makes(&classes) {
            return Err(ModelError::UnknownArchitecture {
                origin: origin.to_owned(),
                family: family.model_type(),
                found: classes.join(", "),
                known: family.class(),
            });
        }
        Ok(family)
    }

    /// Whether one of the classes is this family's language model.
    fn makes(self, classes: &[&str]) -> bool {
        classes.iter().any(|class| self.architecture().classes.contains(class))
    }

    fn unknown(model_type: Option<&str>, classes: &[&str], origin: &str) -> ModelError {
        let near = match (model_type, classes) {
            (Some(name), _) => nearest(name, Self::model_types()),
            // Only the stem tells families apart: most classes end alike.
            (None, [class, ..]) => {
                let stem = class.split_once("For").map_or(*class, |(stem, _)| stem);
                nearest(stem, Self::model_types())
            }
            (None, []) => None,
        };
        let found = match (model_type, classes) {
            (Some(name), []) => format!("model_type `{name}`"),
            (Some(name), _) => format!("model_type `{name}` (architectures: {})", classes.join(", ")),
            (None, []) => "a config without `model_type` and `architectures`".to_owned(),
            (None, _) => format!("`{}` in `architectures`", classes.join(", ")),
        };
        let known = Self::model_types().collect::<Vec<_>>().join(", ");
        ModelError::UnknownFamily { origin: origin.to_owned(), found, known, near }
    }
}

impl fmt::Display for Family {
    /// Its `model_type`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}
