//! The gradient of biases by distance: sums of the gradients of scores along diagonals.
//!
//! A sequence of n queries and m keys has n + m - 1 diagonals, so those of all sequences fit in as many elements per head as q
//! and k have rows. Each task sums its own; then sequences are added in order. That fixes every sum, whatever the threads.
#![allow(unsafe_code, reason = "hands disjoint parts of one slice to different threads")]

use std::marker::PhantomData;

use zeroth_kernel::AttentionDims;

#[cfg(target_arch = "x86_64")]
use super::blocking::PANEL;
use super::blocking::diagonals;
use super::context::{ContextSlices, Sequence};
use crate::check_len;
use crate::math;
use crate::pool::Pool;
use crate::work_partition::{Chunks, Partition};

/// Where the gradient of biases goes.
#[derive(Debug)]
pub struct BiasGradOut<'a> {
    /// [heads, 2 · `max_distance` + 1].
    pub to: &'a mut [f32],
    /// Whether it is added to what is there.
    pub add: bool,
}

/// The diagonals, a part for each sequence and kv head, numbered as the parts of [`super::segments::Segments`].
pub(super) struct Diagonals<'a> {
    start: *mut f32,
    context: ContextSlices<'a>,
    /// Kv heads, and the heads of each.
    bands: usize,
    group: usize,
    /// Elements of a head.
    per_head: usize,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: represents a `&mut [f32]` whose parts go to other threads.
unsafe impl Sync for Diagonals<'_> {}

impl<'a> Diagonals<'a> {
    /// Splits the [`diagonals`] of a context that has been checked.
    pub(super) fn new(slice: &'a mut [f32], dims: &AttentionDims, context: ContextSlices<'a>) -> Self {
        check_len("diagonals", slice.len(), diagonals(dims));
        Self {
            start: slice.as_mut_ptr(),
            context,
            bands: dims.kv_heads,
            group: dims.group(),
            per_head: dims.rows + dims.kv_rows,
            slice: PhantomData,
        }
    }
}

// SAFETY: rows of q and of k of sequences ascend without overlap and end within the dimensions, as the context's check
// ensures; so does the sum of both, and heads are apart.
unsafe impl<'a> Partition for Diagonals<'a> {
    type Part = SequenceDiagonals<'a>;

    fn count(&self) -> usize {
        (self.context.starts.len() + 1) * self.bands
    }

    unsafe fn part(&self, index: usize) -> SequenceDiagonals<'a> {
        let (segment, band) = (index / self.bands, index % self.bands);
        let of = |starts: &[u32]| match (segment.checked_sub(1), starts.get(segment)) {
            (Some(before), Some(end)) => starts[before] as usize..*end as usize,
            _ => 0..0,
        };
        let sequence = Sequence { queries: of(self.context.starts), keys: of(self.context.kv_starts()) };
        SequenceDiagonals {
            start: self.start.wrapping_add(band * self.group * self.per_head + offset(&sequence)),
            heads: self.group,
            per_head: self.per_head,
            count: count(&sequence),
            slice: PhantomData,
        }
    }
}

/// The place of a sequence's diagonals in those of a head.
fn offset(sequence: &Sequence) -> usize {
    sequence.queries.start + sequence.keys.start
}

/// The diagonals of a sequence: that of the last query and the first key is the first.
fn count(sequence: &Sequence) -> usize {
    if sequence.queries.is_empty() {
        0
    } else {
        (sequence.queries.len() + sequence.keys.len()).saturating_sub(1)
    }
}

/// The diagonals of one sequence and the heads that share a kv head.
pub(super) struct SequenceDiagonals<'a> {
    start: *mut f32,
    heads: usize,
    per_head: usize,
    count: usize,
    slice: PhantomData<&'a mut [f32]>,
}

impl SequenceDiagonals<'_> {
    /// Fills those of every head with zeros.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn clear(&mut self) {
        (0..self.heads).for_each(|head| self.of_head(head).fill(0.0));
    }

    /// Those of the `head`-th head.
    pub(super) fn of_head(&mut self, head: usize) -> &mut [f32] {
        assert!(head < self.heads, "head {head} of {}", self.heads);
        // SAFETY: within the head's elements, which only this task has; the borrow of self keeps heads from overlapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(head * self.per_head), self.count) }
    }
}

/// Adds the gradients of the scores of a query of a sequence of `queries`, for the keys from `first` on.
#[inline(always)]
pub(super) fn add_row(diagonals: &mut [f32], queries: usize, query: usize, first: usize, grads: &[f32]) {
    let diagonals = &mut diagonals[queries - 1 - query + first..][..grads.len()];
    for (sum, grad) in diagonals.iter_mut().zip(grads) {
        *sum += grad;
    }
}

/// Adds the sums of the diagonals of a tile of 32 queries and 32 keys from these positions on: those of which the query's position
/// less the key's is greater by c - 31 than that of the first have element c.
#[cfg(target_arch = "x86_64")]
pub(super) fn add_tile(
    diagonals: &mut [f32],
    queries: usize,
    query: usize,
    key: usize,
    sums: &[f32; 2 * PANEL],
) {
    // Element c belongs to diagonal `last` - c; a tile may reach beyond the sequence.
    let last = queries + PANEL - 2 - query + key;
    let first = (last + 1).saturating_sub(diagonals.len());
    let end = (2 * PANEL - 1).min(last + 1);
    let diagonals = &mut diagonals[last + 1 - end..last + 1 - first];
    for (to, sum) in diagonals.iter_mut().rev().zip(&sums[first..end]) {
        *to += sum;
    }
}

/// Sums the diagonals of all sequences by distance.
pub(super) fn sum_sequences(
    pool: &Pool,
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    diagonals: &[f32],
    BiasGradOut { to, add }: BiasGradOut<'_>,
) {
    let (distances, per_head) = (dims.distances(), dims.rows + dims.kv_rows);
    check_len("dbias", to.len(), dims.heads * distances);
    let most = distances / 2;
    pool.each(Chunks::new(to, distances), |head, to| {
        let diagonals = &diagonals[head * per_head..][..per_head];
        for (distance, to) in to.iter_mut().enumerate() {
            let mut sum = 0.0;
            for sequence in context.sequences() {
                let own = &diagonals[offset(&sequence)..][..count(&sequence)];
                // Diagonals from the largest distance on share an entry.
                let past = distance + sequence.queries.len();
                let end =
                    if distance == 2 * most { own.len() } else { past.saturating_sub(most).min(own.len()) };
                let first = if distance == 0 { 0 } else { past.saturating_sub(most + 1).min(end) };
                sum += match &own[first..end] {
                    [one] => *one,
                    several => math::sum_of(several, |grad| grad),
                };
            }
            *to = if add { *to + sum } else { sum };
        }
    });
}
