//! Attention over packed sequences, causal or not, with grouped-query heads, an optional sliding window, biases by distance,
//! dropout of its weights and online softmax; and its gradient, which recomputes scores from q, k and the saved log-sum-exp.
//!
//! No [sequence, sequence] tensor exists. Tiles of keys start at the first row of a sequence, so a row's result does not
//! depend on the position of its sequence in the batch. Scores, softmax and all sums are f32; results are rounded once. With
//! AMX, softmax weights and score gradients are rounded to bf16 before they are multiplied.
//!
//! Softmax uses base 2: scores are scaled by scale · log2 e, which saves a multiplication per exponential.

#[cfg(target_arch = "x86_64")]
mod amx;
mod bias_grad;
mod blocking;
mod cached;
mod context;
mod dropout;
mod launch;
mod portable;
mod portable_backward;
mod segments;
#[cfg(test)]
mod tests;

use std::f32::consts::LOG2_E;
use std::ops::Range;

use zeroth_kernel::{AttentionDims, Element};

pub use bias_grad::BiasGradOut;
use bias_grad::{Diagonals, SequenceDiagonals, diagonals, sum_sequences};
pub use blocking::{attention_backward_scratch, attention_scratch};
pub use cached::{cached_attention, cached_attention_scratch, store_rows};
pub use context::ContextSlices;
use context::{HeadContext, Sequence};
pub use dropout::WeightDropout;
use segments::{Segment, Segments};

use super::gemm::MatrixView;
use super::isa::{Isa, each_isa};
use super::pool::Pool;
use super::work_partition::{Optional, Partition};
use super::{check_len, check_scratch, math, rows};

/// How far a score may exceed the running maximum, as an exponent of 2, before the maximum is raised and the accumulators are
/// rescaled.
const RESCALE_THRESHOLD: f32 = 8.0;

/// Head `head` of the rows from `row` on.
fn head_view<'a, T>(
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
struct RowStrides {
    /// Of q, out and their gradients.
    q: usize,
    /// Of k, v and their gradients.
    kv: usize,
}

impl RowStrides {
    /// The strides of the dimensions; checks the lengths of `q` and `k`.
    #[track_caller]
    fn new(dims: &AttentionDims, q: usize, k: usize) -> Self {
        rows::check_rows("q", q, [dims.rows, dims.q_width()], dims.q_stride);
        rows::check_rows("k", k, [dims.kv_rows, dims.kv_width()], dims.kv_stride);
        Self { q: dims.q_stride, kv: dims.kv_stride }
    }
}

/// Tiles of `size` rows, aligned to `origin`, that cover `range`; the first may start before it.
fn aligned_tiles(origin: usize, range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let first = origin + (range.start - origin) / size * size;
    (first..range.end).step_by(size).map(move |start| start..range.end.min(start + size))
}

/// out = softmax(scale · q · kᵀ + bias) · v within each sequence, with dropout of the softmax.
///
/// Rows of no sequence are padding and give zeros, and so do queries without a key. `lse` [heads, rows] receives the
/// log-sum-exp of each row, which backward needs.
pub fn attention<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    context.check(dims);
    let strides = RowStrides::new(dims, q.len(), k.len());
    check_len("v", v.len(), dims.kv_rows * strides.kv);
    check_len("out", out.len(), dims.rows * strides.q);
    check_len("lse", lse.len(), dims.heads * dims.rows);
    check_scratch(scratch.len(), attention_scratch(dims, pool.threads()));
    #[cfg(target_arch = "x86_64")]
    if amx::supports::<T>(pool.isa()) {
        amx::forward(pool, dims, strides, context, [q, k, v], out, lse, scratch);
        return;
    }
    portable::forward(pool, dims, strides, context, [q, k, v], out, lse, scratch);
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

/// Computes dq, dk and dv from dout, and the gradient of the biases where it has a destination. Padding rows get zeros.
///
/// A task is one kv head of one sequence: it computes all contributions to its dk and dv, and the dq of the heads that share
/// it.
pub fn attention_backward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    saved: AttentionSaved<T>,
    dout: &[T],
    dq: &mut [T],
    dk: &mut [T],
    dv: &mut [T],
    dbias: Option<BiasGradOut<'_>>,
    scratch: &mut [f32],
) {
    let AttentionDims { rows, kv_rows, kv_heads, head_dim, .. } = *dims;
    context.check(dims);
    let strides = RowStrides::new(dims, saved.q.len(), saved.k.len());
    check_len("v", saved.v.len(), kv_rows * strides.kv);
    check_len("out", saved.out.len(), rows * strides.q);
    check_len("lse", saved.lse.len(), dims.heads * rows);
    check_len("dout", dout.len(), rows * strides.q);
    check_len("dq", dq.len(), rows * strides.q);
    check_len("dk", dk.len(), kv_rows * strides.kv);
    check_len("dv", dv.len(), kv_rows * strides.kv);
    check_scratch(scratch.len(), attention_backward_scratch(dims, pool.threads()));
    let (sums, scratch) = scratch.split_at_mut(diagonals(dims));
    let dq = Segments::new(dq, context.starts, [rows, kv_heads, dims.group() * head_dim], strides.q);
    let parts = dq.count();
    let parts = (
        dq,
        Segments::new(dk, context.kv_starts(), [kv_rows, kv_heads, head_dim], strides.kv),
        Segments::new(dv, context.kv_starts(), [kv_rows, kv_heads, head_dim], strides.kv),
        Optional::new(dbias.is_some().then(|| Diagonals::new(&mut *sums, dims, *context)), parts),
    );
    pool.each_with(parts, scratch, |_, (mut dq, mut dk, mut dv, diagonals), scratch| {
        if !dk.is_sequence() {
            for part in [&mut dq, &mut dk, &mut dv] {
                part.clear();
            }
            return;
        }
        let grads = [dq, dk, dv];
        let task = BackwardTask { isa: pool.isa(), dims, strides, context, saved, dout, grads, diagonals };
        #[cfg(target_arch = "x86_64")]
        if amx::supports::<T>(pool.isa()) {
            amx::backward(task, scratch);
            return;
        }
        portable_backward::backward(task, scratch);
    });
    if let Some(dbias) = dbias {
        sum_sequences(pool, dims, context, sums, dbias);
    }
}

/// A tile of scores: rows of q and of k of one sequence.
struct ScoreTile<'a> {
    sequence: &'a Sequence,
    queries: Range<usize>,
    keys: Range<usize>,
}

impl ScoreTile<'_> {
    /// The keys visible to a query, relative to the tile.
    #[inline(always)]
    fn visible_keys(&self, dims: &AttentionDims, query: usize) -> Range<usize> {
        let first = self.first_key();
        let Range { start, end } = dims.visible_keys(self.position(query), self.sequence.keys.len());
        let to = end.clamp(first, first + self.keys.len());
        start.clamp(first, to) - first..to - first
    }

    /// The position of a row of q in the sequence.
    #[inline(always)]
    fn position(&self, query: usize) -> usize {
        query - self.sequence.queries.start
    }

    /// The position of the tile's first key in the sequence.
    #[inline(always)]
    fn first_key(&self) -> usize {
        self.keys.start - self.sequence.keys.start
    }
}

/// The gradient of one kv head of one sequence.
struct BackwardTask<'a, T> {
    isa: Isa,
    dims: &'a AttentionDims,
    strides: RowStrides,
    context: &'a ContextSlices<'a>,
    saved: AttentionSaved<'a, T>,
    dout: &'a [T],
    /// dq of all heads that share the kv head, dk and dv.
    grads: [Segment<'a, T>; 3],
    /// Sums of score gradients along diagonals, where the gradient of biases is computed.
    diagonals: Option<SequenceDiagonals<'a>>,
}

impl<T: Element> BackwardTask<'_, T> {
    /// Rows of the sequence.
    fn sequence(&self) -> Sequence {
        Sequence { queries: self.grads[0].rows(), keys: self.grads[1].rows() }
    }

    fn kv_head(&self) -> usize {
        self.grads[1].band()
    }

    /// The q heads that share the kv head.
    fn heads(&self) -> Range<usize> {
        self.kv_head() * self.dims.group()..(self.kv_head() + 1) * self.dims.group()
    }

    /// Gives zeros: no query has a key.
    #[cfg(target_arch = "x86_64")]
    fn clear(&mut self) {
        self.grads.iter_mut().for_each(Segment::clear);
        self.diagonals.iter_mut().for_each(SequenceDiagonals::clear);
    }

    /// Row statistics of one head: the saved lse in base 2, and delta = sum(dout · out).
    fn row_stats(&self, head: usize, lse: &mut [f32], delta: &mut [f32]) {
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
    fn scale_and_round<T>(sums: &[f32], factor: f32, out: &mut [T]) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(sum * factor);
        }
    }
}
