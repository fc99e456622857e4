//! Forward: keys and values are packed once for all tasks, a task is a block of queries of one head.

use std::ops::Range;

use super::super::sizes::{BLOCK, LANES, PANEL, PANELS, forward_shared, padded, panel, slots};
use super::super::{AttentionDims, Scores, padding, pieces, round, tiles_of};
use super::queue::{Product, Queue, Steps};
use super::softmax::{self, State};
use super::{STEP, Tiles};
use crate::cpu::cut::{Chunks, Grid};
use crate::cpu::element::Element;
use crate::cpu::math;
use crate::cpu::matmul::{Side, View, pack_bf16};
use crate::cpu::panels::Room;
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
    let shared = Room::new(shared).bf16(slots(dims) * dims.kv_heads * 2 * panel(dims));
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
        let mut scratch = Room::new(scratch);
        let mut work = Work {
            dims,
            packed: &shared[kv_head * slots(dims) * 2 * panel(dims)..][..slots(dims) * 2 * panel(dims)],
            queries: scratch.bf16(PANELS * panel(dims)),
            last: scratch.bf16(2 * panel(dims)),
            scores: [scratch.f32(PANEL * BLOCK), scratch.f32(PANEL * BLOCK)],
            weights: [scratch.bf16(PANEL * BLOCK), scratch.bf16(PANEL * BLOCK)],
            sums: scratch.f32(BLOCK * padded(dims)),
            lanes: scratch.f32(BLOCK * LANES),
            peaks: scratch.f32(BLOCK),
            queue: Queue::new(),
            unit: None,
            turn: 0,
            adding: None,
        };
        let first = out.first_row();
        let rows = first..first + out.rows();
        for row in padding(starts, rows.clone()) {
            out.row(row - first).fill(T::default());
            lse.row(0)[row - first] = 0.0;
        }
        for (sequence, queries) in pieces(starts, rows) {
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
            work.finish();
            for row in 0..queries.len() {
                let place = queries.start - first + row;
                let total = math::sum_of(&work.lanes[row * LANES..][..LANES], |lane| lane);
                let sums = &work.sums[row * padded(dims)..][..dims.head_dim];
                round(pool.path(), sums, 1.0 / total, out.row(place));
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

/// A panel of queries and a block of keys.
struct Unit {
    /// Which of the task's panels of queries.
    number: usize,
    tile: Scores,
    /// The block's panels of keys that are seen, and the first that is not among the sequence's whole ones.
    panels: Range<usize>,
    whole: usize,
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
    /// Of two units, in turn.
    scores: [&'a mut [f32]; 2],
    weights: [&'a mut [u16]; 2],
    sums: &'a mut [f32],
    lanes: &'a mut [f32],
    peaks: &'a mut [f32],
    queue: Queue,
    /// The unit whose scores are there or wait, and in which of the two places.
    unit: Option<Unit>,
    turn: usize,
    /// The panel of queries whose sums may wait for a product.
    adding: Option<usize>,
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

    /// Takes a block of keys for all queries. Panels from key `last` on are not among the whole ones.
    fn block(&mut self, tile: &Scores, last: usize) {
        let dims = self.dims;
        let Scores { sequence, ref queries, ref keys } = *tile;
        for (number, first) in queries.clone().step_by(PANEL).enumerate() {
            let end = queries.end.min(first + PANEL);
            let from = dims.first_key(sequence, first).max(keys.start);
            let to = keys.end.min(end);
            if from >= to {
                continue;
            }
            let panels = (from - keys.start) / PANEL..(to - keys.start).div_ceil(PANEL);
            let whole = panels.end.min(last.saturating_sub(keys.start) / PANEL);
            let tile = Scores { sequence, queries: first..end, keys: keys.clone() };
            self.next(Unit { number, tile, panels, whole });
        }
    }

    /// Lets the scores of a unit wait, and does the unit before it.
    fn next(&mut self, unit: Unit) {
        self.turn = 1 - self.turn;
        let dims = self.dims;
        for at in unit.panels.clone() {
            // SAFETY: tiles are configured, and panels are whole in scratch: 32 rows or columns, and steps for the head's
            // elements. The scores of the unit before are the other ones.
            unsafe {
                self.queue.push(Product {
                    a: Steps::close(self.queries.as_ptr().add(unit.number * panel(dims))),
                    b: Steps::close(self.keys_of(&unit, at)),
                    steps: padded(dims) / PANEL,
                    c: self.scores[self.turn].as_mut_ptr().add(at * PANEL),
                    stride: BLOCK,
                    add: false,
                });
            }
        }
        let before = self.unit.replace(unit);
        self.absorb(before, 1 - self.turn);
    }

    /// Does the last unit, and all that waits.
    fn finish(&mut self) {
        self.queue.finish();
        let last = self.unit.take();
        self.absorb(last, self.turn);
        self.queue.finish();
        self.adding = None;
    }

    /// The packed keys of a unit's panel; values follow them.
    fn keys_of(&self, unit: &Unit, at: usize) -> *const u16 {
        if at >= unit.whole {
            return self.last.as_ptr();
        }
        let slot = (unit.tile.keys.start + at * PANEL) / PANEL;
        self.packed[slot * 2 * panel(self.dims)..].as_ptr()
    }

    /// Softmax of a unit whose scores are there, beside what waits; its product with the values waits then.
    fn absorb(&mut self, unit: Option<Unit>, turn: usize) {
        let Some(unit) = unit else {
            // The first unit has none beside which its scores could be done.
            self.queue.finish();
            return;
        };
        let (dims, width) = (self.dims, padded(self.dims));
        let Unit { number, ref tile, ref panels, whole } = unit;
        // A peak that moves scales sums that must be complete.
        if self.adding == Some(number) {
            self.queue.finish();
        }
        let queries = &tile.queries;
        let covered = tile.keys.start + panels.start * PANEL..tile.keys.start + panels.end * PANEL;
        let all = covered.end <= queries.start + 1
            && dims.first_key(tile.sequence, queries.end - 1) <= covered.start;
        let seen = |row: usize| tile.seen(dims, queries.start + row);
        let seen: Option<&dyn Fn(usize) -> Range<usize>> = if all { None } else { Some(&seen) };
        let row = number * PANEL;
        let state = State {
            peaks: &mut self.peaks[row..],
            lanes: &mut self.lanes[row * LANES..],
            sums: &mut self.sums[row * width..][..PANEL * width],
        };
        let (rows, scale) = (queries.len(), dims.log2_scale());
        let (scores, weights) = (&*self.scores[turn], &mut *self.weights[turn]);
        softmax::absorb(scores, weights, panels.clone(), rows, scale, seen, state, &mut self.queue);
        self.queue.finish();
        self.adding = Some(number);
        for step in 0..width / PANEL {
            for (first, count) in [(panels.start, whole - panels.start), (whole, panels.end - whole)] {
                if count == 0 {
                    continue;
                }
                // SAFETY: as in `next`. Weights are written again after this is done, and sums as well.
                unsafe {
                    let values = self.keys_of(&unit, first).add(panel(dims) + step * STEP / 2);
                    self.queue.push(Product {
                        a: Steps::close(self.weights[turn].as_ptr().add(first * STEP / 2)),
                        b: Steps::apart(values, 4 * panel(dims)),
                        steps: count,
                        c: self.sums.as_mut_ptr().add(row * width + step * PANEL),
                        stride: width,
                        add: true,
                    });
                }
            }
        }
    }
}
