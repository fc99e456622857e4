//! Tiles and tasks of attention, for every instruction set.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::bias_grad::SequenceDiagonals;
use super::context::{ContextSlices, Sequence};
use super::segments::Segment;
use crate::gemm::MatrixView;
use crate::isa::{Isa, each_isa};
use crate::{math, rows};
use zeroth_kernel::{AttentionDims, Element};

/// How far a score may exceed the running maximum, as an exponent of 2, before the maximum is raised and the accumulators are
/// rescaled.
pub(super) const RESCALE_THRESHOLD: f32 = 8.0;

/// Head `head` of the rows from `row` on.
pub(super) fn head_view<'a, T>(
    dims: &AttentionDims,
    data: &'a [T],
    row_stride: usize,
    row: usize,
    head: usize,
) -> MatrixView<'a, T> {
    MatrixView::row_major(&data[row * row_stride + head * dims.head_dim..], row_stride)
}

/// Row strides of the operands, in elements.
#[derive(Clone, Copy)]
pub(super) struct RowStrides {
    /// Of q, out and their gradients.
    pub(super) q: usize,
    /// Of k, v and their gradients.
    pub(super) kv: usize,
}

impl RowStrides {
    /// The strides of the dimensions; checks the lengths of `q` and `k`.
    #[track_caller]
    pub(super) fn new(dims: &AttentionDims, q: usize, k: usize) -> Self {
        rows::check_rows("q", q, [dims.rows, dims.q_width()], dims.q_stride);
        rows::check_rows("k", k, [dims.kv_rows, dims.kv_width()], dims.kv_stride);
        Self { q: dims.q_stride, kv: dims.kv_stride }
    }
}

/// Tiles of `size` rows, aligned to `origin`, that cover `range`; the first may start before it.
pub(super) fn aligned_tiles(
    origin: usize,
    range: Range<usize>,
    size: usize,
) -> impl Iterator<Item = Range<usize>> {
    let first = origin + (range.start - origin) / size * size;
    (first..range.end).step_by(size).map(move |start| start..range.end.min(start + size))
}

/// Inputs and outputs of forward that backward reads.
#[derive(Clone, Copy)]
pub struct AttentionSaved<'a, T> {
    /// [rows, heads · head_dim].
    pub q: &'a [T],
    /// [rows, kv_heads · head_dim].
    pub k: &'a [T],
    /// [rows, kv_heads · head_dim].
    pub v: &'a [T],
    /// [rows, heads · head_dim].
    pub out: &'a [T],
    /// [heads, rows].
    pub lse: &'a [f32],
}

/// A tile of scores: rows of q and of k of one sequence.
pub(super) struct ScoreTile<'a> {
    pub(super) sequence: &'a Sequence,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl ScoreTile<'_> {
    /// The keys visible to a query, relative to the tile.
    #[inline(always)]
    pub(super) fn visible_keys(&self, dims: &AttentionDims, query: usize) -> Range<usize> {
        let first = self.first_key();
        let Range { start, end } = dims.visible_keys(self.position(query), self.sequence.keys.len());
        let to = end.clamp(first, first + self.keys.len());
        start.clamp(first, to) - first..to - first
    }

    /// The position of a row of q in the sequence.
    #[inline(always)]
    pub(super) fn position(&self, query: usize) -> usize {
        query - self.sequence.queries.start
    }

    /// The position of the tile's first key in the sequence.
    #[inline(always)]
    pub(super) fn first_key(&self) -> usize {
        self.keys.start - self.sequence.keys.start
    }
}

/// The gradient of one kv head of one sequence.
pub(super) struct BackwardTask<'a, T> {
    pub(super) isa: Isa,
    pub(super) dims: &'a AttentionDims,
    pub(super) strides: RowStrides,
    pub(super) context: &'a ContextSlices<'a>,
    pub(super) saved: AttentionSaved<'a, T>,
    pub(super) dout: &'a [T],
    /// dq of all heads that share the kv head, dk and dv.
    pub(super) grads: [Segment<'a, T>; 3],
    /// Sums of score gradients along diagonals, where the gradient of biases is computed.
    pub(super) diagonals: Option<SequenceDiagonals<'a>>,
}

impl<T: Element> BackwardTask<'_, T> {
    /// Rows of the sequence.
    pub(super) fn sequence(&self) -> Sequence {
        Sequence { queries: self.grads[0].rows(), keys: self.grads[1].rows() }
    }

    pub(super) fn kv_head(&self) -> usize {
        self.grads[1].band()
    }

    /// The q heads that share the kv head.
    pub(super) fn heads(&self) -> Range<usize> {
        self.kv_head() * self.dims.group()..(self.kv_head() + 1) * self.dims.group()
    }

    /// Gives zeros: no query has a key.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn clear(&mut self) {
        self.grads.iter_mut().for_each(Segment::clear);
        self.diagonals.iter_mut().for_each(SequenceDiagonals::clear);
    }

    /// Row statistics of one head: the saved lse in base 2, and delta = sum(dout · out).
    pub(super) fn row_stats(&self, head: usize, lse: &mut [f32], delta: &mut [f32]) {
        let (dims, rows) = (self.dims, self.grads[0].rows());
        let saved = &self.saved.lse[head * dims.rows..][rows.clone()];
        for (lse, saved) in lse.iter_mut().zip(saved) {
            *lse = saved * LOG2_E;
        }
        if rows.is_empty() {
            return;
        }
        let row_stride = self.strides.q;
        let offset = rows.start * row_stride + head * dims.head_dim;
        let (out, dout) = (&self.saved.out[offset..], &self.dout[offset..]);
        row_dots(self.isa, out, dout, row_stride, dims.head_dim, &mut delta[..rows.len()]);
    }
}

each_isa! {
    /// sums[i] = dot product of rows i of a and b, `width` elements each, `stride` apart.
    fn row_dots<T>(a: &[T], b: &[T], stride: usize, width: usize, sums: &mut [f32]) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.chunks(stride).zip(b.chunks(stride))) {
            *sum = math::sum_of_two([&a[..width], &b[..width]], |a, b| a * b);
        }
    }
}

each_isa! {
    /// Multiplies by a factor and rounds.
    pub(super) fn scale_and_round<T>(sums: &[f32], factor: f32, out: &mut [T]) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(sum * factor);
        }
    }
}
