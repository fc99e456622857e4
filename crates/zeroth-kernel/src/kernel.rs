//! The kernel list: every op that a device computes, over spans of its arenas.
//!
//! A [`Kernel`] carries its dimensions. Values that change between micro-batches or steps (tokens, sequence starts, the
//! learning rate, whether an update is applied) are read from device memory, so that a launch is built once and enqueued any
//! number of times.

mod access;
mod attention_context;
mod distillation;
pub mod operands;

use zeroth_base::DType;

use crate::Tier;

pub use access::Access;
pub use attention_context::{AttentionContext, AttentionDropout, BiasGrad};
pub use distillation::{DivergenceSpec, TeacherSpans};
pub use operands::Kernel;

/// A byte range of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// The arena.
    pub tier: Tier,
    /// Offset of the first byte.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Span {
    /// A range of the device arena.
    pub const fn device(at: u64, bytes: u64) -> Self {
        Self { tier: Tier::Device, at, bytes }
    }

    /// Offset of the first byte after the range.
    pub const fn end(self) -> u64 {
        self.at + self.bytes
    }

    /// The range of `count` elements of `size` bytes from element `first` on.
    ///
    /// # Panics
    /// When it is not within this range.
    #[must_use]
    pub fn part(self, first: u64, count: u64, size: u64) -> Self {
        let part = Self { tier: self.tier, at: self.at + first * size, bytes: count * size };
        assert!(part.end() <= self.end(), "{part:?} is not within {self:?}");
        part
    }

    /// Whether two ranges share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.tier as u8 == other.tier as u8 && self.at < other.end() && other.at < self.end()
    }
}

/// The identity of a row's token, from which dropout masks follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct RowKey {
    /// The sample in the dataset.
    pub sample: u64,
    /// The token's position in the sample.
    pub position: u32,
    /// The epoch.
    pub epoch: u32,
}

/// The cache rows of a token's sequence up to the token itself, whose keys and values are in row `end - 1`: what it attends
/// to, before a sliding window. Empty for padding, which is not stored and gives zeros.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct CacheRange {
    /// The row of the sequence's first token.
    pub first: u32,
    /// One past the row of this token.
    pub end: u32,
}

/// A kernel with its storage dtype and scratch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The op and its operands.
    pub kernel: Kernel,
    /// The dtype of activations, their gradients and compute weights.
    pub dtype: DType,
    /// Scratch of at least [`Device::scratch_bytes`](crate::Device::scratch_bytes); its contents do not matter.
    pub scratch: Span,
}

/// How a weight gradient is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradStore {
    /// Added to the buffer, in f32.
    Add,
    /// Written in f32, with the bits of an addition to zero.
    Write,
    /// Written and rounded to the launch's dtype or f32.
    Round {
        /// The dtype of the buffer.
        to: DType,
        /// Set to 1 where a result is infinite or NaN.
        found_inf: Span,
    },
}

/// What an auxiliary loss knows of the routing: `[2, experts]` f32, the tokens of each expert and the sum of its probabilities over
/// the rows that are no padding, both summed over layers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Balance {
    /// The sums of the layers before; absent at the first.
    pub before: Option<Span>,
    /// Those with this layer.
    pub after: Span,
}

/// Where and how the head stores the gradient of its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLossDw {
    /// The gradient `[vocab, hidden]`.
    pub to: Span,
    /// How it is stored. [`GradStore::Round`] needs [`crate::HeadLossDims::is_one_slice`], or [`crate::HeadLossDims::is_one_distill_slice`].
    pub store: GradStore,
    /// The rows of the micro-batch's own tokens, which are left to an `EmbeddingBackward` that completes, rounds and checks
    /// them.
    pub tied_rows: Option<TiedRowsOut>,
}

/// Rows of a tied table's gradient that the head leaves in f32, because the embedding still adds to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedRowsOut {
    /// Token ids of the micro-batch, as in `EmbeddingBackward`.
    pub ids: Span,
    /// `[rows, hidden]` in f32: the head's gradient of every token's row.
    pub rows: Span,
}

/// The rows of [`TiedRowsOut`], which the embedding completes and rounds into the table's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedRowsIn {
    /// See [`TiedRowsOut::rows`].
    pub rows: Span,
    /// Set to 1 where a result is infinite or NaN.
    pub found_inf: Span,
}

/// Stochastic rounding of bf16 moments. The random bits of an element follow from the seed, the applied step and its index,
/// whatever rank holds it: Philox4x32 with key `seed` and counter (step, flat, index low, index high). The high half of word n
/// is for moment n of [`crate::Moment::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounding {
    /// The run's seed.
    pub seed: u64,
    /// The flat buffer.
    pub flat: u32,
    /// The index in the flat buffer of the first element.
    pub first: u64,
}
