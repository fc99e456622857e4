//! Options for preparing data.

use std::num::NonZeroU64;

use super::SkipRule;

/// Handling of rows longer than `--max-length`, with ms-swift's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Truncation {
    /// Drop and count them.
    #[default]
    Drop,
    /// Truncate the beginning.
    Left,
    /// Truncate the end.
    Right,
}

/// Options for preparing data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrepareOptions {
    /// `--max-length`: maximum tokens per sample, and per pack.
    pub max_length: u64,
    /// Handling of longer rows.
    pub truncation: Truncation,
    /// `--max-train-samples`: stop once this many are kept.
    pub max_samples: Option<NonZeroU64>,
    /// `--packing`: join samples into packs.
    pub packing: bool,
}

impl PrepareOptions {
    /// The rows that need no tokens, of those whose text has more bytes than `beyond`: they are dropped in any case.
    pub(super) fn skips(&self, beyond: usize) -> Option<SkipRule> {
        let is_dropped = self.truncation == Truncation::Drop;
        is_dropped.then_some(SkipRule { tokens: self.max_length, bytes: beyond })
    }
}
