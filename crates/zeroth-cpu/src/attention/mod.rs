//! Causal attention over packed sequences: grouped heads, an optional window, softmax streamed over tiles of keys; and
//! its gradient, for which scores are computed again from q, k and the saved lse.
//!
//! No [sequence, sequence] tensor exists. Tiles of keys are counted from the beginning of the sequence, so a row's result
//! does not depend on where in the pack its sequence stands. Scores, softmax and all sums are in f32; results are rounded
//! once. With AMX, softmax weights and gradients of scores are rounded to bf16 before they are multiplied.
//!
//! Powers are of 2: scores are multiplied by scale · log2 e, so that an exponential needs one multiplication less.

mod plain;
mod plain_backward;
mod segments;
mod sizes;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::f32::consts::LOG2_E;
use std::ops::Range;

use zeroth_kernel::{AttentionDims, Element};

use segments::{Segment, Segments};
pub use sizes::{attention_backward_scratch, attention_scratch};

use super::isa::{Isa, each_isa};
use super::matmul::View;
use super::pool::Pool;
use super::{check_len, check_scratch, math, rows};

/// A row's weights are relative to a peak that its scores may pass by this many powers of 2 before it moves: moving it
/// means scaling what was summed before.
const SLACK: f32 = 8.0;

/// Head `head` of rows from `row` on, of a matrix whose rows are `pitch` elements apart.
fn head_view<'a, T>(
    dims: &AttentionDims,
    data: &'a [T],
    pitch: usize,
    row: usize,
    head: usize,
) -> View<'a, T> {
    View::rows(&data[row * pitch + head * dims.head_dim..], pitch)
}

fn check(dims: &AttentionDims, starts: &[u32]) {
    assert!(
        dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads),
        "{} heads cannot share {} kv heads",
        dims.heads,
        dims.kv_heads
    );
    assert!(dims.window != Some(0), "a window of 0 keys leaves nothing to attend to");
    assert!(
        starts.is_sorted() && starts.last().is_none_or(|&end| end as usize <= dims.rows),
        "starts of sequences must rise and end within {} rows: {starts:?}",
        dims.rows
    );
}

/// Elements from one row to the next of matrices of a width.
#[derive(Clone, Copy)]
struct Pitches {
    /// Of q, out and their gradients.
    q: usize,
    /// Of k, v and their gradients.
    kv: usize,
}

impl Pitches {
    /// Those of `q` and `k`, by their lengths.
    #[track_caller]
    fn new(dims: &AttentionDims, q: usize, k: usize) -> Self {
        Self {
            q: rows::stride("q", q, [dims.rows, dims.q_width()]),
            kv: rows::stride("k", k, [dims.rows, dims.kv_width()]),
        }
    }
}

/// The pieces of sequences that lie in `rows`: where the sequence is, and which of its rows.
fn pieces(starts: &[u32], rows: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let first = starts.partition_point(|&start| start as usize <= rows.start).saturating_sub(1);
    let near = starts[first.min(starts.len())..].windows(2);
    near.map(|pair| pair[0] as usize..pair[1] as usize)
        .take_while(move |sequence| sequence.start < rows.end)
        .filter_map(move |sequence| {
            let piece = sequence.start.max(rows.start)..sequence.end.min(rows.end);
            (!piece.is_empty()).then_some((sequence, piece))
        })
}

/// The rows of `rows` that belong to no sequence.
fn padding(starts: &[u32], rows: Range<usize>) -> impl Iterator<Item = usize> {
    let first = starts.first().map_or(rows.end, |&start| start as usize);
    let end = starts.last().map_or(rows.end, |&end| end as usize);
    (rows.start..rows.end.min(first)).chain(rows.start.max(end)..rows.end)
}

/// Tiles of `size`, counted from `origin`, that cover `range`; the first may begin before it.
fn tiles_of(origin: usize, range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let first = origin + (range.start - origin) / size * size;
    (first..range.end).step_by(size).map(move |start| start..range.end.min(start + size))
}

/// out = softmax(scale · q · kᵀ) · v within each sequence.
///
/// `starts` holds where each sequence begins and, last, where the last one ends; rows beyond it are padding and give
/// zeros. `lse` [heads, rows] receives the logarithm of each softmax's denominator, which backward needs.
pub fn attention<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    starts: &[u32],
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    check(dims, starts);
    let pitches = Pitches::new(dims, q.len(), k.len());
    check_len("v", v.len(), dims.rows * pitches.kv);
    check_len("out", out.len(), dims.rows * pitches.q);
    check_len("lse", lse.len(), dims.heads * dims.rows);
    check_scratch(scratch.len(), attention_scratch(dims, pool.threads()));
    #[cfg(target_arch = "x86_64")]
    if tiles::fit::<T>(pool.isa()) {
        tiles::forward(pool, dims, pitches, starts, [q, k, v], out, lse, scratch);
        return;
    }
    plain::forward(pool, dims, pitches, starts, [q, k, v], out, lse, scratch);
}

/// What forward read and wrote, and backward reads again.
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

/// Writes dq, dk and dv from dout. Rows of padding get zeros.
///
/// A task is one head of k and v of one sequence: it has all that adds to its part of dk and dv, and to the parts of dq of
/// the heads that share it.
pub fn attention_backward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    starts: &[u32],
    saved: AttentionSaved<T>,
    dout: &[T],
    dq: &mut [T],
    dk: &mut [T],
    dv: &mut [T],
    scratch: &mut [f32],
) {
    let rows = dims.rows;
    check(dims, starts);
    let pitches = Pitches::new(dims, saved.q.len(), saved.k.len());
    check_len("v", saved.v.len(), rows * pitches.kv);
    check_len("out", saved.out.len(), rows * pitches.q);
    check_len("lse", saved.lse.len(), dims.heads * rows);
    check_len("dout", dout.len(), rows * pitches.q);
    check_len("dq", dq.len(), rows * pitches.q);
    check_len("dk", dk.len(), rows * pitches.kv);
    check_len("dv", dv.len(), rows * pitches.kv);
    check_scratch(scratch.len(), attention_backward_scratch(dims, pool.threads()));
    let parts = (
        Segments::new(dq, starts, [rows, dims.kv_heads, dims.group() * dims.head_dim], pitches.q),
        Segments::new(dk, starts, [rows, dims.kv_heads, dims.head_dim], pitches.kv),
        Segments::new(dv, starts, [rows, dims.kv_heads, dims.head_dim], pitches.kv),
    );
    pool.each_with(parts, scratch, |_, (mut dq, mut dk, mut dv), scratch| {
        if !dk.is_sequence() {
            for part in [&mut dq, &mut dk, &mut dv] {
                part.clear();
            }
            return;
        }
        let task = Task { path: pool.isa(), dims, pitches, saved, dout, grads: [dq, dk, dv] };
        #[cfg(target_arch = "x86_64")]
        if tiles::fit::<T>(pool.isa()) {
            tiles::backward(task, scratch);
            return;
        }
        plain_backward::backward(task, scratch);
    });
}

/// Where a tile of scores stands.
struct Scores {
    /// The first row of the sequence.
    sequence: usize,
    queries: Range<usize>,
    keys: Range<usize>,
}

impl Scores {
    /// The keys that a query sees, counted from the tile's first.
    #[inline(always)]
    fn seen(&self, dims: &AttentionDims, query: usize) -> Range<usize> {
        let Range { start, end } = self.keys;
        let to = (query + 1).clamp(start, end);
        let from = dims.first_key(self.sequence, query).clamp(start, to);
        from - start..to - start
    }
}

/// The gradient of one head of k and v of one sequence.
struct Task<'a, T> {
    path: Isa,
    dims: &'a AttentionDims,
    pitches: Pitches,
    saved: AttentionSaved<'a, T>,
    dout: &'a [T],
    /// dq of all heads that share it, dk, dv.
    grads: [Segment<'a, T>; 3],
}

impl<T: Element> Task<'_, T> {
    /// The rows of the sequence.
    fn rows(&self) -> Range<usize> {
        self.grads[1].rows()
    }

    fn kv_head(&self) -> usize {
        self.grads[1].band()
    }

    /// The heads of q that share it.
    fn heads(&self) -> Range<usize> {
        self.kv_head() * self.dims.group()..(self.kv_head() + 1) * self.dims.group()
    }

    /// What one head's queries bring to their scores: the saved lse as a power of 2, and the sum over dout · out.
    fn statistics(&self, head: usize, lse: &mut [f32], delta: &mut [f32]) {
        let (dims, rows) = (self.dims, self.rows());
        let saved = &self.saved.lse[head * dims.rows..][rows.clone()];
        for (lse, saved) in lse.iter_mut().zip(saved) {
            *lse = saved * LOG2_E;
        }
        let pitch = self.pitches.q;
        let place = rows.start * pitch + head * dims.head_dim;
        let (out, dout) = (&self.saved.out[place..], &self.dout[place..]);
        products(self.path, out, dout, pitch, dims.head_dim, &mut delta[..rows.len()]);
    }
}

each_isa! {
    /// sums[i] = the dot product of rows i of a and b, of `width` elements each, `stride` apart.
    fn products<T>(a: &[T], b: &[T], stride: usize, width: usize, sums: &mut [f32]) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.chunks(stride).zip(b.chunks(stride))) {
            *sum = math::sum_of_two([&a[..width], &b[..width]], |a, b| a * b);
        }
    }
}

each_isa! {
    /// Rounds sums times a factor.
    fn round<T>(sums: &[f32], factor: f32, out: &mut [T]) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(sum * factor);
        }
    }
}
