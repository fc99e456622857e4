//! Forward: keys and values are packed once for all tasks, a task is a block of queries of one head.
//!
//! Scores stand with keys as rows: then a query's peak and total are lanes, and its weights are columns of the product with
//! the values as they come. Only what comes out, as [head's elements, queries], has to be turned at the end.

use std::ops::Range;

use super::super::blocking::{BLOCK, PANEL, SPAN, forward_shared, padded, panel, slots};
use super::super::{Pitches, SLACK, head_view, padding, pieces};
use super::softmax::{Scores, State};
use super::tile_matmul::{Product, Steps, Woven};
use super::{STEP, Tiles, seen, store};
use crate::avx512::{Room, ask_to_write_row};
use crate::gemm::{Side, View, pack_bf16};
use crate::pool::Pool;
use crate::work_partition::{Chunks, Grid};
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(in super::super) fn forward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    pitches: Pitches,
    starts: &[u32],
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (shared, scratch) = scratch.split_at_mut(forward_shared(dims));
    let shared = Room::new(shared).bf16(slots(dims) * dims.kv_heads * 2 * panel(dims));
    pool.each(Chunks::new(shared, 2 * panel(dims)), |task, slot| {
        let (kv_head, first) = (task / slots(dims), task % slots(dims) * PANEL);
        if let Some(keys) = whole_panel(starts, first) {
            pack_panel(dims, pitches.kv, [k, v], kv_head, keys, slot);
        }
    });
    let shared = &*shared;
    let parts = (
        Grid::with_pitch(out, [dims.q_width(), pitches.q], BLOCK, dims.head_dim),
        Grid::new(lse, dims.rows, 1, BLOCK).down_first(),
    );
    pool.each_with(parts, scratch, |task, (mut out, mut lse), scratch| {
        let _tiles = Tiles::configure();
        let head = task % dims.heads;
        let kv_head = head / dims.group();
        let mut scratch = Room::new(scratch);
        let mut work = Work {
            dims,
            packed: &shared[kv_head * slots(dims) * 2 * panel(dims)..][..slots(dims) * 2 * panel(dims)],
            queries: scratch.bf16(BLOCK / PANEL * panel(dims)),
            at: 0,
            last: scratch.bf16(2 * panel(dims)),
            scores: [0; 2].map(|_| scratch.f32(PANEL * PANEL).try_into().expect("a tile of scores")),
            weights: scratch.bf16(SPAN * STEP / 2),
            sums: scratch.f32(panel(dims)),
            state: State::NEW,
            begun: false,
        };
        let first = out.first_row();
        let rows = first..first + out.rows();
        for row in padding(starts, rows.clone()) {
            out.row(row - first).fill(T::default());
            lse.row(0)[row - first] = 0.0;
        }
        for (sequence, queries) in pieces(starts, rows) {
            let last = sequence.end - (sequence.end - sequence.start) % PANEL;
            if queries.end > last {
                pack_panel(dims, pitches.kv, [k, v], kv_head, last..sequence.end, work.last);
            }
            work.pack_queries(&queries, q, pitches.q, head);
            for (at, start) in queries.clone().step_by(PANEL).enumerate() {
                let queries = start..queries.end.min(start + PANEL);
                (work.at, work.state, work.begun) = (at * panel(dims), State::NEW, false);
                for row in queries.clone() {
                    ask_to_write_row(out.row(row - first));
                }
                work.attend(&sequence, &queries);
                let factors = work.state.totals.map(|total| 1.0 / total);
                let place = |lane: usize| {
                    let row = queries.start - first + lane;
                    (lane < queries.len()).then(|| out.row(row).as_mut_ptr())
                };
                // SAFETY: rows of a tile have the width of a head, and are this task's alone.
                unsafe { store::columns(work.sums, &factors, dims.head_dim, place) }
                let lse = &mut lse.row(0)[queries.start - first..][..queries.len()];
                for ((lse, peak), total) in lse.iter_mut().zip(work.state.peaks).zip(work.state.totals) {
                    *lse = peak * std::f32::consts::LN_2 + total.ln();
                }
            }
        }
    });
}

/// The whole panel of a sequence that begins in the 32 rows from `first` on. There is one at most, and the slot of these
/// rows is its.
fn whole_panel(starts: &[u32], first: usize) -> Option<Range<usize>> {
    pieces(starts, first..first + PANEL).find_map(|(sequence, piece)| {
        let start = sequence.start + (piece.start - sequence.start).next_multiple_of(PANEL);
        (start < first + PANEL && start + PANEL <= sequence.end).then_some(start..start + PANEL)
    })
}

/// Packs keys as rows over the head's elements, then values as rows over keys, a row being an element of the head. Rows of
/// k and v are `pitch` elements apart.
fn pack_panel<T: Element>(
    dims: &AttentionDims,
    pitch: usize,
    [k, v]: [&[T]; 2],
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [u16],
) {
    let (out_keys, out_values) = out.split_at_mut(panel(dims));
    let keys_view = head_view(dims, k, pitch, keys.start, kv_head);
    pack_bf16(Side::Rows, keys_view, keys.len(), dims.head_dim, out_keys);
    for (step, out) in out_values.chunks_exact_mut(STEP / 2).enumerate() {
        let column = step * PANEL;
        let values = &v[keys.start * pitch + kv_head * dims.head_dim + column..];
        let columns = PANEL.min(dims.head_dim - column);
        pack_bf16(Side::Rows, View::rows(values, pitch).transposed(), columns, keys.len(), out);
    }
}

/// What a task works with, for 32 queries at a time.
struct Work<'a> {
    dims: &'a AttentionDims,
    /// The whole panels of keys and values of the task's head, by slots.
    packed: &'a [u16],
    /// The task's queries as columns, in panels, and where the panel at hand is.
    queries: &'a mut [u16],
    at: usize,
    /// Keys and values behind the last whole panel of the sequence.
    last: &'a mut [u16],
    /// [32 keys, 32 queries], of two panels of keys in turn.
    scores: [&'a mut [f32; PANEL * PANEL]; 2],
    /// Of a span of panels of keys, as columns.
    weights: &'a mut [u16],
    /// [padded, 32 queries].
    sums: &'a mut [f32],
    state: State,
    /// Whether sums hold something.
    begun: bool,
}

impl Work<'_> {
    /// Packs the task's queries of a sequence, from rows `pitch` elements apart.
    fn pack_queries<T: Element>(&mut self, queries: &Range<usize>, q: &[T], pitch: usize, head: usize) {
        let dims = self.dims;
        if !queries.len().is_multiple_of(PANEL) {
            // Scores of queries that are not there are 0.
            self.queries[queries.len() / PANEL * panel(dims)..][..panel(dims)].fill(0);
        }
        let view = head_view(dims, q, pitch, queries.start, head);
        pack_bf16(Side::Columns, view, queries.len(), dims.head_dim, self.queries);
    }

    /// Sums up the values that queries see.
    fn attend(&mut self, sequence: &Range<usize>, queries: &Range<usize>) {
        let seen = self.dims.first_key(sequence.start, queries.start) - sequence.start;
        let panels = seen / PANEL..(queries.end - sequence.start).div_ceil(PANEL);
        // SAFETY: tiles are configured, and panels are whole in scratch: 32 rows or columns, and steps for the head's elements.
        unsafe { self.product(sequence, panels.start).run(false) }
        for first in panels.clone().step_by(SPAN) {
            let span = first..panels.end.min(first + SPAN);
            let mut done = first;
            for at in span.clone() {
                // SAFETY: as above. What is written is the other place of the two.
                let next =
                    (at + 1 < panels.end).then(|| unsafe { Woven::new([self.product(sequence, at + 1)]) });
                self.absorb(sequence, queries, at, first, &mut done, next);
            }
            self.add(sequence, done..span.end, first);
        }
    }

    /// The scores of a panel of keys.
    fn product(&mut self, sequence: &Range<usize>, at: usize) -> Product {
        Product {
            a: Steps::close(self.keys_of(sequence, at)),
            b: Steps::close(self.queries[self.at..].as_ptr()),
            steps: padded(self.dims) / PANEL,
            c: self.scores[at % 2].as_mut_ptr(),
            stride: PANEL,
        }
    }

    /// The packed keys of a panel of the sequence; values follow them.
    fn keys_of(&self, sequence: &Range<usize>, at: usize) -> *const u16 {
        let start = sequence.start + at * PANEL;
        if start + PANEL > sequence.end {
            return self.last.as_ptr();
        }
        self.packed[start / PANEL * 2 * panel(self.dims)..].as_ptr()
    }

    /// Turns the scores of a panel of keys into weights, beside the product that comes next. Where peaks move, panels from `done`
    /// on are added to the sums first.
    fn absorb(
        &mut self,
        sequence: &Range<usize>,
        queries: &Range<usize>,
        at: usize,
        first: usize,
        done: &mut usize,
        mut next: Option<Woven<1>>,
    ) {
        let dims = self.dims;
        let start = sequence.start + at * PANEL;
        let seen = seen(dims, sequence.end, start, queries.start);
        for limit in [SLACK, f32::INFINITY] {
            let scores = Scores { raw: self.scores[at % 2], scale: dims.log2_scale(), seen: seen.as_ref() };
            let place = (at - first) * STEP / 2;
            let weights = self.weights[place..].first_chunk_mut().expect("a step");
            let fresh = !self.begun && at == *done && limit == SLACK;
            if !fresh && scores.absorb(limit, weights, &mut self.state, next.as_mut()) {
                return;
            }
            let factors = scores.move_peaks(&mut self.state);
            self.add(sequence, *done..at, first);
            *done = at;
            if self.begun {
                for sums in self.sums.as_chunks_mut::<PANEL>().0 {
                    sums.iter_mut().zip(factors).for_each(|(sum, factor)| *sum *= factor);
                }
            }
        }
    }

    /// Adds what panels of keys, whose weights are there, bring to the sums.
    fn add(&mut self, sequence: &Range<usize>, panels: Range<usize>, first: usize) {
        let (dims, whole) = (self.dims, (sequence.end - sequence.start) / PANEL);
        for panels in [panels.start..panels.end.min(whole), panels.start.max(whole)..panels.end] {
            if panels.is_empty() {
                continue;
            }
            let values = self.keys_of(sequence, panels.start).wrapping_add(panel(dims));
            for (step, sums) in self.sums.chunks_exact_mut(PANEL * PANEL).enumerate() {
                let product = Product {
                    a: Steps::apart(values.wrapping_add(step * STEP / 2), 4 * panel(dims)),
                    b: Steps::close(self.weights[(panels.start - first) * STEP / 2..].as_ptr()),
                    steps: panels.len(),
                    c: sums.as_mut_ptr(),
                    stride: PANEL,
                };
                // SAFETY: as in `attend`; weights have a step for each panel.
                unsafe { product.run(self.begun) }
            }
            self.begun = true;
        }
    }
}
