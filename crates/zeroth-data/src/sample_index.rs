//! The sample index: everything about samples but their tokens.

use std::num::NonZeroU64;

use super::Totals;
use super::pack::Packs;

/// A complete sample index.
#[derive(Debug)]
pub(super) struct SampleIndex {
    pub(super) starts: Vec<u64>,
    pub(super) trained: Vec<u32>,
    pub(super) packs: Packs,
    pub(super) count: NonZeroU64,
    pub(super) totals: Totals,
    pub(super) hash: u64,
}
