//! The inputs of resolving, and the ways it fails.

use super::batch::BatchError;
use super::flags::Flags;
use super::groups::GroupError;
use super::mismatch::{self, Mismatch};
use crate::file_values::FileValues;

/// The inputs of resolving.
#[derive(Debug, Clone, Copy)]
pub struct ResolveRequest<'a> {
    /// The values of the config file, after its check.
    pub file: &'a FileValues,
    /// The flags of the command line.
    pub flags: &'a Flags,
    /// Ranks of the run.
    pub ranks: u64,
    /// The model, where one is given.
    pub model: Option<ModelFacts>,
    /// Optimizer steps of the run, where the data is known; --max-steps wins.
    pub steps: Option<u64>,
}

/// The sizes of a model that `"auto"` rules read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFacts {
    /// `hidden_size` by Hugging Face's order of looking.
    pub hidden_size: Option<u64>,
    /// The number of blocks.
    pub blocks: Option<u64>,
}

/// Why a config cannot be resolved.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ResolveError {
    #[error("{}", mismatch::listing(.0))]
    Mismatch(Vec<Mismatch>),
    #[error(transparent)]
    Batch(#[from] BatchError),
    #[error(transparent)]
    Groups(#[from] GroupError),
    #[error(
        "The model's config file has neither `hidden_size` nor `hidden_sizes` entry, therefore it's not possible to \
         automatically fill out the following `auto` entries in the DeepSpeed config file: {keys:?}. You can fix \
         that by replacing `auto` values for these keys with an integer value of your choice{}.",
        if *no_model { ", or by naming the model with --model" } else { "" }
    )]
    HiddenSize {
        /// The keys that are "auto" and need a hidden size.
        keys: Vec<&'static str>,
        no_model: bool,
    },
}
