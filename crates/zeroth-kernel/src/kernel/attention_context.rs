//! Operands of attention: its sequences, biases and dropout.

use super::Span;

/// What attention reads besides q, k and v.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionContext {
    /// The sequences of q. u32: the number of entries, then the first row of each sequence and the end of the last (cu_seqlens).
    pub starts: Span,
    /// The sequences of k and v in cross attention, as many as of q; `None` where they are those of q.
    pub kv_starts: Option<Span>,
    /// Biases added to the scaled scores, f32 `[heads, 2 · max_distance + 1]`: that of key j for query i is at j - i, limited to
    /// ±`max_distance`, plus `max_distance`. `None` without [`AttentionDims::max_distance`](crate::AttentionDims::max_distance).
    pub bias: Option<Span>,
    /// Dropout of the softmax weights.
    pub dropout: Option<AttentionDropout>,
}

impl AttentionContext {
    /// Attention within these sequences, without biases and dropout.
    pub const fn new(starts: Span) -> Self {
        Self { starts, kv_starts: None, bias: None, dropout: None }
    }
}

/// Dropout of softmax weights: a weight is zeroed or divided by 1 - probability.
///
/// The weight of key j of its sequence, for head h and a query with [`RowKey`](super::RowKey) `key`, is dropped where 16
/// random bits are below round(probability · 65,536). With `row` = Philox4x32 of counter (epoch, op, sample low, sample high)
/// and key `seed`, as in `Dropout`, the bits are in word (j % 32) / 8 of Philox4x32 with counter (4 · (j / 32) + (j % 8) / 2,
/// position, `row[2]`, `row[3]` ^ h) and key (`row[0]`, `row[1]`): the low half where j is even, else the high half.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// The probability that a weight is zeroed.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// The number of this op among the model's dropouts.
    pub op: u32,
    /// One [`RowKey`](super::RowKey) per row of q.
    pub keys: Span,
}

impl AttentionDropout {
    /// A weight is dropped where its 16 random bits are below this.
    pub fn threshold(probability: f32) -> u32 {
        (f64::from(probability) * 65_536.0).round() as u32
    }
}

/// Where the gradient of position biases goes: f32 `[heads, 2 · max_distance + 1]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BiasGrad {
    /// The destination.
    pub to: Span,
    /// Whether it is added to what is there: the gradient of the layers after.
    pub add: bool,
}
