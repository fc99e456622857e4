//! Options for preparing data.

use std::num::NonZeroU64;

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
