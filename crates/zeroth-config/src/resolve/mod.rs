//! Resolving: what a file and a command line become together, value by value, with the origin of each.
//!
//! A key absent from the file counts as `"auto"`: the flag that was typed, else the file, else the default. Only a
//! flag that was typed can contradict the file. Everything is settled before any weight is touched.

mod batch;
mod fill;
mod flags;
mod mismatch;

use std::fmt;

use serde_json::{Map, Value};

use crate::file_values::FileValues;
use crate::read::Location;
use crate::schema::Key;

pub use batch::{Batch, BatchError, triangulate};
pub use flags::{Flags, Precision};
pub use mismatch::Mismatch;

/// What resolving needs to know.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The checked file.
    pub file: &'a FileValues,
    /// What was typed.
    pub flags: &'a Flags,
    /// Ranks of the run.
    pub ranks: u64,
    /// The model, where one is given.
    pub model: Option<ModelFacts>,
    /// Optimizer steps of the run, where the data is known; --max-steps wins.
    pub steps: Option<u64>,
}

/// What the rules ask of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFacts {
    /// `hidden_size` by Hugging Face's order of looking.
    pub hidden_size: Option<u64>,
    /// The number of blocks.
    pub blocks: Option<u64>,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The file, at this place.
    File(Location),
    /// This flag.
    Flag(&'static str),
    /// A rule; the text says which.
    Auto(String),
    /// The key's default.
    Default,
}

impl Origin {
    /// The word in origin.json.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Flag(_) => "command line",
            Self::Auto(_) => "auto",
            Self::Default => "default",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(location) => write!(f, "file, {location}"),
            Self::Flag(flag) => write!(f, "command line, {flag}"),
            Self::Auto(rule) => write!(f, "auto, {rule}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One settled value.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Its key.
    pub key: &'static Key,
    /// The value.
    pub value: Value,
    /// Where it comes from.
    pub origin: Origin,
}

/// A config with every value settled.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The values, in the order of the table.
    pub settings: Vec<Setting>,
    /// What is worth saying on the way.
    pub notes: Vec<String>,
}

/// Why a config cannot be resolved.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ResolveError {
    /// The file and typed flags contradict each other, all contradictions at once.
    #[error("{}", mismatch::listing(.0))]
    Mismatch(Vec<Mismatch>),
    /// The batch sizes do not go together.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// "auto" needs a model's hidden size. The first sentences are Hugging Face's.
    #[error(
        "The model's config file has neither `hidden_size` nor `hidden_sizes` entry, therefore it's not possible to \
         automatically fill out the following `auto` entries in the DeepSpeed config file: {keys:?}. You can fix \
         that by replacing `auto` values for these keys with an integer value of your choice{}.",
        if *no_model { ", or by naming the model with --model" } else { "" }
    )]
    HiddenSize {
        /// The keys.
        keys: Vec<&'static str>,
        /// Whether no model was named at all.
        no_model: bool,
    },
}

/// Settles every value.
pub fn resolve(request: &Request<'_>) -> Result<Resolved, ResolveError> {
    fill::Filler::new(request).fill()
}

impl Resolved {
    /// The setting of a canonical path.
    pub fn get(&self, path: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.key.path == path)
    }

    /// A whole number.
    pub fn whole(&self, path: &str) -> Option<u64> {
        self.get(path).and_then(|setting| setting.value.as_u64())
    }

    /// A text.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.get(path).and_then(|setting| setting.value.as_str())
    }

    /// A truth value; false where the key has none.
    pub fn is_on(&self, path: &str) -> bool {
        self.get(path).is_some_and(|setting| setting.value == Value::Bool(true))
    }

    /// The config as DeepSpeed writes it: nested objects, defaults included.
    pub fn to_json(&self) -> Value {
        let mut root = Map::new();
        for setting in &self.settings {
            let mut section = &mut root;
            let mut parts = setting.key.path.split('.').peekable();
            while let Some(part) = parts.next() {
                if parts.peek().is_none() {
                    section.insert(part.to_owned(), setting.value.clone());
                    break;
                }
                let slot = section.entry(part).or_insert_with(|| Value::Object(Map::new()));
                let Value::Object(inner) = slot else { break };
                section = inner;
            }
        }
        Value::Object(root)
    }
}
