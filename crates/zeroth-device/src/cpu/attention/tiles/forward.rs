//! Forward: keys and values are packed once for all tasks, a task is a block of queries of one head.

use std::ops::Range;

use super::super::sizes::{BLOCK, LANES, PANEL, PANELS, forward_shared, padded, panel, slots};
use super::super::{AttentionDims, Scores, divide, pieces, tiles_of};
use super::softmax::{State, absorb};
use super::{STEP, Steps, Tiles, aligned, product, take, take_bf16};
use crate::cpu::cut::{Chunks, Grid};
use crate::cpu::element::Element;
use crate::cpu::math;
use crate::cpu::matmul::{Side, View, pack_bf16};
use crate::cpu::pool::Pool;

pub(in super::super) fn forward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    starts: &[u32],
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (shared, scratch) = scratch.split_at_mut(forward_shared(dims));
    let shared: &mut [u16] = bytemuck::cast_slice_mut(aligned(shared));
    let shared = &mut shared[..slots(dims) * dims.kv_heads * 2 * panel(dims)];
    pool.each(Chunks::new(shared, 2 * panel(dims)), |task, slot| {
        let (kv_head, first) = (task / slots(dims), task % slots(dims) * PANEL);
        if let Some(keys) = whole_panel(starts, first) {
            pack_panel(dims, [k, v], kv_head, keys, slot);
        }
    });
    let shared = &*shared;
    let parts = (
        Grid::new(out, dims.q_width(), BLOCK, dims.head_dim),
        Grid::new(lse, dims.rows, 1, BLOCK).down_first(),
    );
    pool.each_with(parts, scratch, |task, (mut out, mut lse), scratch| {
        let _tiles = Tiles::configure();
        let head = task % dims.heads;
        let kv_head = head / dims.group();
        let mut scratch = aligned(scratch);
        let mut work = Work {
            dims,
            packed: &shared[kv_head * slots(dims) * 2 * panel(dims)..][..slots(dims) * 2 * panel(dims)],
            queries: take_bf16(&mut scratch, PANELS * panel(dims)),
            last: take_bf16(&mut scratch, 2 * panel(dims)),
            scores: take(&mut scratch, PANEL * BLOCK),
            weights: take_bf16(&mut scratch, PANEL * BLOCK),
            sums: take(&mut scratch, BLOCK * padded(dims)),
            lanes: take(&mut scratch, BLOCK * LANES),
            peaks: take(&mut scratch, BLOCK),
        };
        let first = out.first_row();
        lse.row(0).fill(0.0);
        for row in 0..out.rows() {
            out.row(row).fill(T::default());
        }
        for (sequence, queries) in pieces(starts, first..first + out.rows()) {
            work.start(&queries, q, head);
            let seen = dims.first_key(sequence.start, queries.start)..queries.end;
            for keys in tiles_of(sequence.start, seen, BLOCK) {
                let last = sequence.end - (sequence.end - sequence.start) % PANEL;
                if keys.end > last {
                    pack_panel(dims, [k, v], kv_head, last..sequence.end, work.last);
                }
                let tile = Scores { sequence: sequence.start, queries: queries.clone(), keys };
                work.block(&tile, last);
            }
            for row in 0..queries.len() {
                let place = queries.start - first + row;
                let total = math::sum_of(&work.lanes[row * LANES..][..LANES], |lane| lane);
                let sums = &work.sums[row * padded(dims)..][..dims.head_dim];
                divide(pool.path(), sums, total, out.row(place));
                lse.row(0)[place] = work.peaks[row] * std::f32::consts::LN_2 + total.ln();
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

/// Packs keys as columns over the head's elements, then values as columns over keys.
fn pack_panel<T: Element>(
    dims: &AttentionDims,
    [k, v]: [&[T]; 2],
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [u16],
) {
    let (out_keys, out_values) = out.split_at_mut(panel(dims));
    let keys_view = dims.view(k, dims.kv_width(), keys.start, kv_head);
    pack_bf16(Side::Columns, keys_view, keys.len(), dims.head_dim, out_keys);
    for (step, out) in out_values.chunks_exact_mut(STEP / 2).enumerate() {
        let (column, width) = (step * PANEL, dims.kv_width());
        let values = &v[keys.start * width + kv_head * dims.head_dim + column..];
        let columns = PANEL.min(dims.head_dim - column);
        pack_bf16(Side::Columns, View::rows(values, width).transposed(), columns, keys.len(), out);
    }
}

/// What a task works with. Rows of `sums`, `lanes` and `peaks` are those of its queries.
struct Work<'a> {
    dims: &'a AttentionDims,
    /// The whole panels of keys and values of the task's head, by slots.
    packed: &'a [u16],
    /// The task's queries, in panels.
    queries: &'a mut [u16],
    /// Keys and values behind the last whole panel of the sequence.
    last: &'a mut [u16],
    scores: &'a mut [f32],
    weights: &'a mut [u16],
    sums: &'a mut [f32],
    lanes: &'a mut [f32],
    peaks: &'a mut [f32],
}

impl Work<'_> {
    /// Makes it ready for the queries of a sequence.
    fn start<T: Element>(&mut self, queries: &Range<usize>, q: &[T], head: usize) {
        let dims = self.dims;
        for (first, out) in queries.clone().step_by(PANEL).zip(self.queries.chunks_exact_mut(panel(dims))) {
            let rows = PANEL.min(queries.end - first);
            pack_bf16(Side::Rows, dims.view(q, dims.q_width(), first, head), rows, dims.head_dim, out);
        }
        self.sums[..queries.len() * padded(dims)].fill(0.0);
        self.lanes[..queries.len() * LANES].fill(0.0);
        self.peaks[..queries.len()].fill(f32::NEG_INFINITY);
    }

    /// Adds a block of keys to what its queries have seen. Panels from key `last` on are not among the whole ones.
    fn block(&mut self, tile: &Scores, last: usize) {
        let (dims, width) = (self.dims, padded(self.dims));
        let Scores { sequence, ref queries, ref keys } = *tile;
        let steps = width / PANEL;
        for (number, first) in queries.clone().step_by(PANEL).enumerate() {
            let end = queries.end.min(first + PANEL);
            let from = dims.first_key(sequence, first).max(keys.start);
            let to = keys.end.min(end);
            if from >= to {
                continue;
            }
            let panels = (from - keys.start) / PANEL..(to - keys.start).div_ceil(PANEL);
            let covered = keys.start + panels.start * PANEL..keys.start + panels.end * PANEL;
            let all = covered.end <= first + 1 && dims.first_key(sequence, end - 1) <= covered.start;
            let seen = |row: usize| tile.seen(dims, first + row);
            let whole = panels.end.min((last - keys.start.min(last)) / PANEL);
            // SAFETY: tiles are configured, and all panels are whole in scratch: 32 rows or columns, and steps for the
            // head's elements or the block's keys.
            unsafe {
                let q = Steps::close(self.queries.as_ptr().add(number * panel(dims)));
                let key = |at: usize| {
                    let slot = (keys.start + at * PANEL) / PANEL;
                    if at < whole { &self.packed[slot * 2 * panel(dims)..] } else { &*self.last }.as_ptr()
                };
                for at in panels.clone() {
                    let scores = self.scores.as_mut_ptr().add(at * PANEL);
                    product::<false>(q, Steps::close(key(at)), steps, scores, BLOCK);
                }
                let row = number * PANEL;
                let state = State {
                    peaks: &mut self.peaks[row..],
                    lanes: &mut self.lanes[row * LANES..],
                    sums: &mut self.sums[row * width..][..PANEL * width],
                };
                let rows = end - first;
                let seen: Option<&dyn Fn(usize) -> Range<usize>> = if all { None } else { Some(&seen) };
                absorb(self.scores, self.weights, panels.clone(), rows, dims.log2_scale(), seen, state);
                for step in 0..steps {
                    let sums = self.sums.as_mut_ptr().add(row * width + step * PANEL);
                    let value = |at: usize| Steps {
                        start: key(at).add(panel(dims) + step * STEP / 2),
                        apart: 4 * panel(dims),
                    };
                    let weights = |at: usize| Steps::close(self.weights.as_ptr().add(at * STEP / 2));
                    if panels.start < whole {
                        let count = whole - panels.start;
                        product::<true>(weights(panels.start), value(panels.start), count, sums, width);
                    }
                    if whole < panels.end {
                        product::<true>(weights(whole), value(whole), 1, sums, width);
                    }
                }
            }
        }
    }
}
