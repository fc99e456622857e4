//! Dimensions of the kernels: one struct per kernel, part of every launch.
//!
//! A row stride is the number of elements from one row of an activation to the next; what lies between is padding, which no
//! kernel reads or writes. An operand has whole rows, the last with its padding: exactly rows · stride elements. `new` makes
//! dimensions without padding.

use std::ops::Range;

use half::bf16;
use zeroth_base::{DType, PositionBuckets};

use crate::Element;

/// Dimensions of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearDims {
    /// Tokens.
    pub rows: usize,
    /// Width of x.
    pub inputs: usize,
    /// Width of y.
    pub outputs: usize,
    /// Row stride of x and dx.
    pub x_stride: usize,
    /// Row stride of y and dy.
    pub y_stride: usize,
}

impl LinearDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { rows, inputs, outputs, x_stride: inputs, y_stride: outputs }
    }
}

/// Dimensions of an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingDims {
    /// Rows of the table.
    pub vocab: usize,
    /// Columns of the table.
    pub width: usize,
    /// Row stride of y and dy; the table has no padding.
    pub row_stride: usize,
}

impl EmbeddingDims {
    /// Dimensions without padding.
    pub const fn new(vocab: usize, width: usize) -> Self {
        Self { vocab, width, row_stride: width }
    }
}

/// Dimensions of an RMSNorm over the last `width` elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormDims {
    /// Vectors that are normalized.
    pub rows: usize,
    /// Elements of a vector.
    pub width: usize,
    /// Row stride of x, y, their sum and their gradients.
    pub row_stride: usize,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Whether a sum with the residual is limited to ±[`MAX_CLAMPED`] before it is rounded: T5 in fp16. Its gradient is passed on
    /// unchanged.
    pub clamp: bool,
}

/// The largest sum that `clamp` of [`RmsNormDims`] leaves: 1,000 below the largest f16, as transformers limits T5's.
pub const MAX_CLAMPED: f32 = 64_504.0;

impl RmsNormDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, width: usize, eps: f32) -> Self {
        Self { rows, width, row_stride: width, eps, clamp: false }
    }

    /// A norm over each head of [rows, heads · head_dim] without padding, as Qwen 3 does with q and k.
    pub const fn per_head(rows: usize, heads: usize, head_dim: usize, eps: f32) -> Self {
        Self::new(rows * heads, head_dim, eps)
    }
}

/// Dimensions of a RoPE of [rows, heads · head_dim].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeDims {
    /// Tokens.
    pub rows: usize,
    /// Heads per token.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Leading elements of a head that are rotated; the others are unchanged.
    pub rotated: usize,
    /// Row stride of x and y.
    pub row_stride: usize,
}

impl RopeDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, heads: usize, head_dim: usize, rotated: usize) -> Self {
        Self { rows, heads, head_dim, rotated, row_stride: heads * head_dim }
    }
}

/// Dimensions of a head norm with RoPE of [rows, heads · head_dim].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNormRopeDims {
    /// Dimensions of the rotation.
    pub rope: RopeDims,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl HeadNormRopeDims {
    /// Dimensions of the norm alone.
    pub const fn norm(self) -> RmsNormDims {
        let RopeDims { rows, heads, head_dim, .. } = self.rope;
        RmsNormDims::per_head(rows, heads, head_dim, self.eps)
    }
}

/// Dimensions of the biases of relative positions: a table `[buckets, heads]`, and one by head and distance
/// `[heads, 2 · max_distance + 1]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PositionBiasDims {
    /// How distances share the rows of the learned table.
    pub buckets: PositionBuckets,
    /// Heads.
    pub heads: usize,
}

/// Dimensions of attention: q is [rows, heads · head_dim], k and v are [kv_rows, kv_heads · head_dim].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDims {
    /// Rows of q, padding included.
    pub rows: usize,
    /// Rows of k and v, padding included: those of q, except in cross attention.
    pub kv_rows: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v; a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Row stride of q and y and of their gradients.
    pub q_stride: usize,
    /// Row stride of k and v and of their gradients.
    pub kv_stride: usize,
    /// Whether a query attends to the keys up to its own only; else to all keys of its sequence.
    pub causal: bool,
    /// Sliding window: keys per query, its own included; `None` attends to the whole prefix. Causal attention only.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
    /// The largest distance in the table of position biases; `None` without biases.
    pub max_distance: Option<usize>,
}

impl AttentionDims {
    /// Dimensions of causal attention without padding and biases.
    pub const fn new(
        rows: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        window: Option<usize>,
        scale: f32,
    ) -> Self {
        let (q_stride, kv_stride) = (heads * head_dim, kv_heads * head_dim);
        Self {
            rows,
            kv_rows: rows,
            heads,
            kv_heads,
            head_dim,
            q_stride,
            kv_stride,
            causal: true,
            window,
            scale,
            max_distance: None,
        }
    }

    /// Elements of a row of q.
    pub const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of k and of v.
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Entries of a head in the table of position biases: one for each distance from `-max_distance` to `max_distance`.
    pub fn distances(&self) -> usize {
        self.max_distance.map_or(0, |most| 2 * most + 1)
    }

    /// Heads of q that share a head of k and v.
    pub const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The factor from a raw score to an exponent of 2.
    pub fn log2_scale(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// The keys, of `keys` in its sequence, that the query at `position` of its sequence attends to.
    pub fn visible_keys(&self, position: usize, keys: usize) -> Range<usize> {
        if !self.causal {
            return 0..keys;
        }
        let end = keys.min(position + 1);
        self.window.map_or(0, |window| end.min((position + 1).saturating_sub(window)))..end
    }

    /// The queries, of `queries` in its sequence, that attend to the key at `position` of its sequence.
    pub fn seeing_queries(&self, position: usize, queries: usize) -> Range<usize> {
        if !self.causal {
            return 0..queries;
        }
        let end = self.window.map_or(queries, |window| queries.min(position.saturating_add(window)));
        position.min(end)..end
    }
}

/// Dimensions of a copy of rows into the cache of keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreRowsDims {
    /// Tokens, padding included.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Rows of the cache.
    pub cached: usize,
    /// Row stride of both.
    pub row_stride: usize,
}

impl StoreRowsDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, width: usize, cached: usize) -> Self {
        Self { rows, width, cached, row_stride: width }
    }
}

/// f32 elements of a slice's exponentials: 160 MiB.
const SLICE: usize = 40 << 20;
/// Rows of a slice of f32 exponentials, at most and at least; twice as many for bf16.
const MOST: usize = 512;
const LEAST: usize = 16;

/// Dimensions of the language-model head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLossDims {
    /// Tokens.
    pub rows: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Row stride of x and dx.
    pub row_stride: usize,
}

impl HeadLossDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, hidden: usize, vocab: usize) -> Self {
        Self { rows, hidden, vocab, row_stride: hidden }
    }

    /// Rows of a slice whose exponentials are stored as `E`.
    pub fn slice_rows<E: Element>(self) -> usize {
        let more = size_of::<f32>() / size_of::<E>();
        let fitting = SLICE.checked_div(self.vocab).unwrap_or(MOST).clamp(LEAST, MOST);
        (more * fitting).min(self.rows)
    }

    /// Whether all rows are one slice at this dtype. Then every weight gradient is one sum and can be rounded as it is stored.
    pub fn is_one_slice(self, dtype: DType) -> bool {
        let most = match dtype {
            DType::Bf16 => self.slice_rows::<bf16>(),
            DType::F16 | DType::F32 => self.slice_rows::<f32>(),
        };
        self.rows <= most
    }
}

impl HeadLossDims {
    /// Rows of a slice of a distillation loss, whose logits are f32, with this number of columns of the teacher's.
    pub fn distill_slice_rows(self, teacher: usize) -> usize {
        Self { vocab: self.vocab.max(teacher), ..self }.slice_rows::<f32>()
    }

    /// Whether all rows of a distillation loss are one slice, so that its weight gradient can be rounded as it is stored.
    pub fn is_one_distill_slice(self, teacher: usize) -> bool {
        self.rows <= self.distill_slice_rows(teacher)
    }
}

/// Dimensions of next-token logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitsDims {
    /// Tokens.
    pub rows: usize,
    /// Sequences, one row of logits each.
    pub sequences: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Row stride of x.
    pub row_stride: usize,
}

impl LogitsDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, sequences: usize, hidden: usize, vocab: usize) -> Self {
        Self { rows, sequences, hidden, vocab, row_stride: hidden }
    }

    /// The last row of a sequence; `None` where it is missing, empty or beyond the rows.
    pub fn last_row(self, starts: &[u32], sequence: usize) -> Option<usize> {
        let [begin, end] = [*starts.get(sequence)? as usize, *starts.get(sequence + 1)? as usize];
        (begin < end && end <= self.rows).then(|| end - 1)
    }
}

/// Dimensions of the routing of tokens to experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteDims {
    /// Tokens, padding included.
    pub rows: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts of a token; at most `experts`.
    pub k: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Row stride of the logits and their gradient.
    pub row_stride: usize,
}

impl RouteDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, experts: usize, k: usize, normalized: bool) -> Self {
        Self { rows, experts, k, normalized, row_stride: experts }
    }

    /// Pairs of a token and one of its experts.
    pub const fn slots(self) -> usize {
        self.rows * self.k
    }
}

/// Dimensions of a copy between the rows of tokens and those of their experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRowsDims {
    /// Tokens, padding included.
    pub rows: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Elements of a row.
    pub width: usize,
    /// Row stride of both sides.
    pub row_stride: usize,
}

impl ExpertRowsDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, experts: usize, k: usize, width: usize) -> Self {
        Self { rows, experts, k, width, row_stride: width }
    }

    /// Rows of the experts' side.
    pub const fn slots(self) -> usize {
        self.rows * self.k
    }
}

/// Dimensions of a linear layer with a weight for each expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedLinearDims {
    /// Rows of all experts, those of padding included.
    pub slots: usize,
    /// Experts.
    pub experts: usize,
    /// Width of x.
    pub inputs: usize,
    /// Width of y.
    pub outputs: usize,
    /// Row stride of x and dx.
    pub x_stride: usize,
    /// Row stride of y and dy.
    pub y_stride: usize,
}

impl GroupedLinearDims {
    /// Dimensions without padding.
    pub const fn new(slots: usize, experts: usize, inputs: usize, outputs: usize) -> Self {
        Self { slots, experts, inputs, outputs, x_stride: inputs, y_stride: outputs }
    }
}

/// Dimensions of the gated activation of the experts' rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedRowsDims {
    /// Tokens, padding included.
    pub rows: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Width of y. A row of the gate and up projections has the gate in its first half and up in its second.
    pub width: usize,
    /// Row stride of the gate and up projections and their gradients.
    pub gate_up_stride: usize,
    /// Row stride of y and dy.
    pub y_stride: usize,
}

impl GatedRowsDims {
    /// Dimensions without padding.
    pub const fn new(rows: usize, experts: usize, k: usize, width: usize) -> Self {
        Self { rows, experts, k, width, gate_up_stride: 2 * width, y_stride: width }
    }

    /// Rows of all experts.
    pub const fn slots(self) -> usize {
        self.rows * self.k
    }
}

/// Dimensions of the loss that balances the load of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalanceDims {
    /// Tokens, padding included.
    pub rows: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Layers whose routing it sums over.
    pub layers: usize,
}
