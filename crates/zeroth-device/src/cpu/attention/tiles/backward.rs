//! Backward: one pass over blocks of keys and queries brings all three gradients.
//!
//! Scores stand with keys as rows: then weights and gradients of scores are rows of a product over queries (dv, dk) as
//! they come, a query's lse and delta are lanes, and only dq, as [head's elements, queries], has to be turned at the end.

use std::arch::x86_64::{_mm512_loadu_si512, _mm512_setzero_si512, _mm512_storeu_si512};
use std::ops::Range;

use super::super::sizes::{BLOCK, LANES, PANEL, PANELS, padded, panel};
use super::super::{AttentionDims, Task, round};
use super::differentiate::{Turned, differentiate};
use super::queue::{Product, Queue, Steps};
use super::{STEP, Tiles};
use crate::cpu::element::Element;
use crate::cpu::matmul::{Side, View, pack_bf16, transpose};
use crate::cpu::panels::{Room, merged};

pub(in super::super) fn backward<T: Element>(mut task: Task<T>, scratch: &mut [f32]) {
    let _tiles = Tiles::configure();
    let (path, dims, rows, kv_head) = (task.path, task.dims, task.rows(), task.kv_head());
    if rows.is_empty() {
        return;
    }
    let (panels, width) = (rows.len().div_ceil(PANEL), padded(dims));
    let whole = panels * panel(dims);
    let mut scratch = Room::new(scratch);
    let mut work = Work {
        dims,
        rows: rows.len(),
        k: scratch.bf16(whole),
        v: scratch.bf16(whole),
        k_turned: scratch.bf16(whole),
        q: scratch.bf16(whole),
        q_terms: scratch.bf16(whole),
        dout: scratch.bf16(whole),
        dout_terms: scratch.bf16(whole),
        dq: scratch.f32(whole),
        dk: scratch.f32(whole),
        dv: scratch.f32(whole),
        lse: scratch.f32(panels * PANEL),
        delta: scratch.f32(panels * PANEL),
        scores: [0; 2].map(|_| [0; 2].map(|_| scratch.f32(PANEL * PANEL))),
        rounded: [0; 3].map(|_| scratch.bf16(BLOCK * BLOCK)),
        queue: Queue::new(),
        tile: None,
        turn: 0,
    };
    let turned = scratch.f32(panel(dims));
    let k = Source { dims, data: task.saved.k, width: dims.kv_width(), rows: rows.clone(), head: kv_head };
    let v = Source { data: task.saved.v, ..k.clone() };
    k.panels(Side::Rows, work.k);
    v.panels(Side::Rows, work.v);
    k.terms(Side::Rows, work.k_turned);
    work.dk.fill(0.0);
    work.dv.fill(0.0);
    for head in task.heads() {
        task.statistics(head, work.lse, work.delta);
        let q = Source { dims, data: task.saved.q, width: dims.q_width(), rows: rows.clone(), head };
        let dout = Source { data: task.dout, ..q.clone() };
        q.panels(Side::Columns, work.q);
        q.terms(Side::Columns, work.q_terms);
        dout.panels(Side::Columns, work.dout);
        dout.terms(Side::Columns, work.dout_terms);
        work.dq.fill(0.0);
        for keys in (0..panels).step_by(PANELS) {
            let keys = keys..panels.min(keys + PANELS);
            let last_key = rows.len().min(keys.end * PANEL) - 1;
            let seeing = dims.end_query(rows.len(), last_key).div_ceil(PANEL);
            for queries in (keys.start..seeing).step_by(PANELS) {
                work.block(&keys, queries..seeing.min(queries + PANELS));
            }
        }
        let first = (head - task.heads().start) * dims.head_dim;
        for (number, dq) in work.dq.chunks_exact(panel(dims)).enumerate() {
            turn(dq, turned);
            for (row, sums) in turned.chunks_exact(width).enumerate().take(rows.len() - number * PANEL) {
                let out = &mut task.grads[0].row(number * PANEL + row)[first..][..dims.head_dim];
                round(path, &sums[..dims.head_dim], dims.scale, out);
            }
        }
    }
    for row in 0..rows.len() {
        round(path, &work.dk[row * width..][..dims.head_dim], dims.scale, task.grads[1].row(row));
        round(path, &work.dv[row * width..][..dims.head_dim], 1.0, task.grads[2].row(row));
    }
}

/// One head of a sequence's rows.
#[derive(Clone)]
struct Source<'a, T> {
    dims: &'a AttentionDims,
    data: &'a [T],
    width: usize,
    rows: Range<usize>,
    head: usize,
}

impl<T: Element> Source<'_, T> {
    /// Packs panels of 32 rows over the head's elements.
    fn panels(&self, side: Side, out: &mut [u16]) {
        let dims = self.dims;
        for (first, out) in self.rows.clone().step_by(PANEL).zip(out.chunks_exact_mut(panel(dims))) {
            let view = dims.view(self.data, self.width, first, self.head);
            pack_bf16(side, view, PANEL.min(self.rows.end - first), dims.head_dim, out);
        }
    }

    /// Packs panels of 32 of the head's elements over all rows.
    fn terms(&self, side: Side, out: &mut [u16]) {
        let dims = self.dims;
        let panel = self.rows.len().next_multiple_of(PANEL) * PANEL;
        for (number, out) in out.chunks_exact_mut(panel).enumerate() {
            let column = number * PANEL;
            let data = &self.data[self.rows.start * self.width + self.head * dims.head_dim + column..];
            let view = View::rows(data, self.width).transposed();
            pack_bf16(side, view, PANEL.min(dims.head_dim - column), self.rows.len(), out);
        }
    }
}

/// What a task works with. Rows are counted from the sequence's first.
struct Work<'a> {
    dims: &'a AttentionDims,
    rows: usize,
    /// k and v as rows, panels of 32 keys over the head's elements.
    k: &'a mut [u16],
    v: &'a mut [u16],
    /// k as rows, panels of 32 of the head's elements over keys.
    k_turned: &'a mut [u16],
    /// q and dout as columns: panels of 32 queries over the head's elements, and panels of these over queries.
    q: &'a mut [u16],
    q_terms: &'a mut [u16],
    dout: &'a mut [u16],
    dout_terms: &'a mut [u16],
    /// Panels [padded, 32 queries], in the order of [`merged`].
    dq: &'a mut [f32],
    /// [keys, padded].
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Of each query.
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    /// Scores and gradients of weights [32 keys, 32 queries] of two tiles, in turn.
    scores: [[&'a mut [f32]; 2]; 2],
    /// Weights and gradients of scores of a block: a panel for each panel of keys, in steps of queries; and gradients
    /// again, a panel for each panel of queries, in steps of keys.
    rounded: [&'a mut [u16]; 3],
    /// What is done beside the tile before.
    queue: Queue,
    /// The tile whose scores are there or wait, and in which of the two places.
    tile: Option<Tile>,
    turn: usize,
}

/// The place of a step in a block's panels, in elements.
const fn step_of(panel: usize, step: usize) -> usize {
    (panel * PANELS + step) * STEP / 2
}

/// A panel of keys and one of queries, and their places in the block.
#[derive(Clone, Copy)]
struct Tile {
    key: usize,
    query: usize,
    place: [usize; 2],
}

impl Work<'_> {
    /// Adds what panels `keys` and panels `queries`, four of each at most, bring to all sums.
    fn block(&mut self, keys: &Range<usize>, queries: Range<usize>) {
        let (dims, width) = (self.dims, padded(self.dims));
        let (steps, panels) = (width / PANEL, self.rows.div_ceil(PANEL));
        for key in keys.clone() {
            for query in queries.start.max(key)..queries.end.min(self.end_panel(key)) {
                let place = [key - keys.start, query - queries.start];
                self.next(Tile { key, query, place });
            }
        }
        self.finish();
        let [weights, grads, columns] = &mut self.rounded;
        let panel_of = |packed: &[u16], at: usize| Steps::close(packed[at..].as_ptr());
        for key in keys.clone() {
            let seeing = queries.start.max(key)..queries.end.min(end_panel(dims, self.rows, key));
            if seeing.is_empty() {
                continue;
            }
            let first = step_of(key - keys.start, seeing.start - queries.start);
            for step in 0..steps {
                let terms = (step * panels + seeing.start) * STEP / 2;
                let place = key * PANEL * width + step * PANEL;
                let both =
                    [(&*weights, &self.dout_terms, &mut self.dv), (&*grads, &self.q_terms, &mut self.dk)];
                for (rows, terms_of, sums) in both {
                    let (a, b) = (panel_of(rows, first), panel_of(terms_of, terms));
                    let c = sums[place..].as_mut_ptr();
                    // SAFETY: tiles are configured, and panels are whole in scratch. What is read is written again, and
                    // sums are read, only after all of it is done below.
                    unsafe {
                        let product = Product { a, b, steps: seeing.len(), c, stride: width, add: true };
                        self.queue.push(product);
                    }
                }
            }
        }
        for query in queries.clone() {
            let end = keys.end.min(query + 1);
            let seen = (keys.start..end).find(|&key| query < end_panel(dims, self.rows, key));
            let Some(start) = seen else { continue };
            for step in 0..steps {
                let a = panel_of(self.k_turned, (step * panels + start) * STEP / 2);
                let b = panel_of(columns, step_of(query - queries.start, start - keys.start));
                let c = self.dq[query * panel(dims) + step * PANEL * PANEL..].as_mut_ptr();
                // SAFETY: as above.
                unsafe { self.queue.push(Product { a, b, steps: end - start, c, stride: PANEL, add: true }) }
            }
        }
        self.queue.finish();
    }

    fn end_panel(&self, key: usize) -> usize {
        end_panel(self.dims, self.rows, key)
    }

    /// Lets the scores of a tile and the gradients of its weights wait, and does the tile before it.
    fn next(&mut self, tile: Tile) {
        self.turn = 1 - self.turn;
        let (dims, steps) = (self.dims, padded(self.dims) / PANEL);
        let at = |packed: &[u16], number: usize| Steps::close(packed[number * panel(dims)..].as_ptr());
        let [scores, slopes] = &mut self.scores[self.turn];
        let both = [(&self.k, &self.q, scores), (&self.v, &self.dout, slopes)];
        for (rows, columns, out) in both {
            let (a, b, c) = (at(rows, tile.key), at(columns, tile.query), out.as_mut_ptr());
            // SAFETY: tiles are configured, and panels are whole in scratch. The tile before has the other scores.
            unsafe { self.queue.push(Product { a, b, steps, c, stride: PANEL, add: false }) }
        }
        let before = self.tile.replace(tile);
        self.differentiate(before, 1 - self.turn);
    }

    /// Does the last tile, and all that waits.
    fn finish(&mut self) {
        self.queue.finish();
        let last = self.tile.take();
        self.differentiate(last, self.turn);
    }

    /// Weights and gradients of the scores of a tile whose products are there, written to their places in the block.
    fn differentiate(&mut self, tile: Option<Tile>, turn: usize) {
        let Some(Tile { key, query, place: [key_at, query_at] }) = tile else {
            // The first tile of a block has none beside which its scores could be done.
            self.queue.finish();
            return;
        };
        let dims = self.dims;
        let (first_key, first_query) = (key * PANEL, query * PANEL);
        let behind = first_query + PANEL;
        let all = query > key && behind <= dims.end_query(self.rows, first_key);
        let seen = |row: usize| {
            let key = first_key + row;
            if key >= self.rows {
                return 0..0;
            }
            let end = dims.end_query(self.rows, key).clamp(first_query, behind);
            key.clamp(first_query, end) - first_query..end - first_query
        };
        let seen: Option<&dyn Fn(usize) -> Range<usize>> = if all { None } else { Some(&seen) };
        let (by_key, by_query) = (step_of(key_at, query_at), step_of(query_at, key_at));
        let [weights, grads, columns] = &mut self.rounded;
        let out = Turned {
            weights: &mut weights[by_key..][..STEP / 2],
            grads: &mut grads[by_key..][..STEP / 2],
            columns: &mut columns[by_query..][..STEP / 2],
        };
        let statistics = [&self.lse[first_query..], &self.delta[first_query..]];
        let [scores, slopes] = &self.scores[turn];
        differentiate([scores, slopes], statistics, dims.log2_scale(), seen, out, &mut self.queue);
        self.queue.finish();
    }
}

/// The panel of queries behind the last one that sees a panel of keys.
fn end_panel(dims: &AttentionDims, rows: usize, keys: usize) -> usize {
    let last_key = rows.min((keys + 1) * PANEL) - 1;
    dims.end_query(rows, last_key).div_ceil(PANEL)
}

/// Turns a panel of dq, [padded, 32] in the order of [`merged`], to [32, padded].
fn turn(panel: &[f32], out: &mut [f32]) {
    #[target_feature(enable = "avx512f")]
    unsafe fn run(panel: &[f32], out: &mut [f32]) {
        let width = panel.len() / PANEL;
        for first in (0..width).step_by(LANES) {
            for half in 0..2 {
                let mut lines = [_mm512_setzero_si512(); LANES];
                for (i, line) in lines.iter_mut().enumerate() {
                    let place = (first + i) * PANEL + half * LANES;
                    // SAFETY: within the panel.
                    *line = unsafe { _mm512_loadu_si512(panel.as_ptr().add(place).cast()) };
                }
                for (i, line) in transpose(lines).into_iter().enumerate() {
                    let place = merged(half * LANES + i) * width + first;
                    // SAFETY: within `out`, which is as long as the panel.
                    unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(place).cast(), line) };
                }
            }
        }
    }
    assert!(panel.len() == out.len() && panel.len().is_multiple_of(PANEL * LANES));
    // SAFETY: a machine with tiles has AVX-512, and lengths were checked.
    unsafe { run(panel, out) }
}
