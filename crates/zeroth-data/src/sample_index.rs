//! The sample index: everything about samples but their tokens.

use std::num::NonZeroU64;

use super::Totals;
use super::pack::Packs;

/// A complete sample index.
#[derive(Debug)]
pub(super) struct SampleIndex {
    /// Prefix sums of sample lengths; of pairs, of their sources.
    pub(super) starts: Vec<u64>,
    /// Prefix sums of target lengths; `None` if labels are as many as tokens.
    pub(super) target_starts: Option<Vec<u64>>,
    pub(super) trained: Vec<u32>,
    pub(super) packs: Packs,
    pub(super) count: NonZeroU64,
    pub(super) totals: Totals,
    pub(super) hash: u64,
}

impl SampleIndex {
    /// Prefix sums of the numbers of labels.
    pub(super) fn label_starts(&self) -> &[u64] {
        self.target_starts.as_ref().unwrap_or(&self.starts)
    }
}
