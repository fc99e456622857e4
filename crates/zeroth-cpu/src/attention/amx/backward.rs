//! Backward: one pass over panels of keys and queries brings all three gradients.
//!
//! Scores stand with keys as rows: then weights and gradients of scores are rows of a product over queries (dv, dk) as
//! they come, a query's lse and delta are lanes, and only dq, as [head's elements, queries], has to be turned at the end.
//!
//! Sums over queries (dv, dk) are done when all queries of a span have met a panel of keys, sums over keys (dq) when all keys
//! of a span were there: a product of many terms is stored once.

use std::ops::Range;

use super::super::blocking::{PANEL, SPAN, padded, panel};
use super::super::{Task, head_view};
use super::score_grads::{Turned, differentiate};
use super::tile_matmul::{Product, Steps, Woven};
use super::{STEP, Tiles, seen, store};
use crate::avx512::{Room, ask_to_write_row, merged};
use crate::gemm::{Side, View, pack_bf16};
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

/// How many rows of dk and dv are asked for before they are written.
const AHEAD: usize = 8;

pub(in super::super) fn backward<T: Element>(mut task: Task<T>, scratch: &mut [f32]) {
    let _tiles = Tiles::configure();
    let (dims, rows, kv_head) = (task.dims, task.rows(), task.kv_head());
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
        weights: scratch.bf16(SPAN * STEP / 2),
        grads: scratch.bf16(SPAN * STEP / 2),
        columns: scratch.bf16(SPAN * SPAN * STEP / 2),
        tile: None,
        turn: 0,
    };
    let k = Source { dims, data: task.saved.k, pitch: task.pitches.kv, rows: rows.clone(), head: kv_head };
    let v = Source { data: task.saved.v, ..k.clone() };
    for number in 0..panels {
        k.panel(number, Side::Rows, work.k);
        k.terms(number, Side::Rows, work.k_turned);
        v.panel(number, Side::Rows, work.v);
    }
    for head in task.heads() {
        let is_first = head == task.heads().start;
        let q = Source { dims, data: task.saved.q, pitch: task.pitches.q, rows: rows.clone(), head };
        let dout = Source { data: task.dout, ..q.clone() };
        // All that 32 rows are needed for, one after the other: rows are so far apart that caches keep few of them.
        for number in 0..panels {
            work.statistics(&task, head, number);
            dout.panel(number, Side::Columns, work.dout);
            dout.terms(number, Side::Columns, work.dout_terms);
            q.panel(number, Side::Columns, work.q);
            q.terms(number, Side::Columns, work.q_terms);
        }
        for keys in (0..panels).step_by(SPAN) {
            let keys = keys..panels.min(keys + SPAN);
            let seeing = work.end_panel(keys.end - 1);
            for queries in (keys.start..seeing).step_by(SPAN) {
                // The queries of the keys' own rows are the first that they meet.
                let add = !is_first || queries > keys.start;
                work.span(&keys, queries..seeing.min(queries + SPAN), add);
            }
        }
        let first = (head - task.heads().start) * dims.head_dim;
        for (number, dq) in work.dq.chunks_exact(panel(dims)).enumerate() {
            for row in ((number + 1) * PANEL..rows.len()).take(PANEL) {
                ask_to_write_row(&task.grads[0].row(row)[first..][..dims.head_dim]);
            }
            let place = |lane: usize| {
                let row = number * PANEL + merged(lane);
                (row < rows.len()).then(|| task.grads[0].row(row)[first..][..dims.head_dim].as_mut_ptr())
            };
            // SAFETY: the row has a head's elements there, and is this task's alone.
            unsafe { store::columns(dq, &[dims.scale; PANEL], dims.head_dim, place) }
        }
    }
    for row in 0..rows.len() {
        if row + AHEAD < rows.len() {
            ask_to_write_row(task.grads[1].row(row + AHEAD));
            ask_to_write_row(task.grads[2].row(row + AHEAD));
        }
        store::row(&work.dk[row * width..][..width], dims.scale, task.grads[1].row(row));
        store::row(&work.dv[row * width..][..width], 1.0, task.grads[2].row(row));
    }
}

/// One head of a sequence's rows.
#[derive(Clone)]
struct Source<'a, T> {
    dims: &'a AttentionDims,
    data: &'a [T],
    /// Elements from one row of it to the next.
    pitch: usize,
    rows: Range<usize>,
    head: usize,
}

impl<T: Element> Source<'_, T> {
    /// The rows of a panel.
    fn rows_of(&self, number: usize) -> Range<usize> {
        let first = self.rows.start + number * PANEL;
        first..self.rows.end.min(first + PANEL)
    }

    /// Packs one panel of 32 rows over the head's elements.
    fn panel(&self, number: usize, side: Side, out: &mut [u16]) {
        let (dims, rows) = (self.dims, self.rows_of(number));
        let view = head_view(dims, self.data, self.pitch, rows.start, self.head);
        let out = &mut out[number * panel(dims)..][..panel(dims)];
        pack_bf16(side, view, rows.len(), dims.head_dim, out);
    }

    /// Packs the step of one panel of rows in all panels of 32 of the head's elements over rows.
    fn terms(&self, number: usize, side: Side, out: &mut [u16]) {
        let (dims, rows) = (self.dims, self.rows_of(number));
        let panel = self.rows.len().next_multiple_of(PANEL) * PANEL;
        for (at, out) in out.chunks_exact_mut(panel).enumerate() {
            let column = at * PANEL;
            let data = &self.data[rows.start * self.pitch + self.head * dims.head_dim + column..];
            let view = View::rows(data, self.pitch).transposed();
            let out = &mut out[number * STEP / 2..][..STEP / 2];
            pack_bf16(side, view, PANEL.min(dims.head_dim - column), rows.len(), out);
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
    /// Weights and gradients of scores of a panel of keys, in steps of queries.
    weights: &'a mut [u16],
    grads: &'a mut [u16],
    /// Gradients of scores of a span, a panel for each panel of queries, in steps of keys.
    columns: &'a mut [u16],
    /// The tile whose scores are there, and in which of the two places.
    tile: Option<Tile>,
    turn: usize,
}

/// A panel of keys and one of queries, and their places in the span.
#[derive(Clone, Copy)]
struct Tile {
    key: usize,
    query: usize,
    place: [usize; 2],
}

impl Work<'_> {
    /// What a panel of one head's queries brings to its scores: the saved lse as a power of 2, and the sum over dout · out.
    fn statistics<T: Element>(&mut self, task: &Task<T>, head: usize, number: usize) {
        let (dims, all) = (self.dims, task.rows());
        let own = number * PANEL..all.len().min((number + 1) * PANEL);
        let first = all.start + own.start;
        let saved = &task.saved.lse[head * dims.rows + first..];
        for (lse, saved) in self.lse[own.clone()].iter_mut().zip(saved) {
            *lse = saved * std::f32::consts::LOG2_E;
        }
        let pitch = task.pitches.q;
        let place = first * pitch + head * dims.head_dim;
        let (out, dout) = (&task.saved.out[place..], &task.dout[place..]);
        store::products(out, dout, pitch, dims.head_dim, &mut self.delta[own]);
    }

    /// Adds what panels `keys` and panels `queries`, a span of each at most, bring to all sums; without `add`, dk and dv begin.
    fn span(&mut self, keys: &Range<usize>, queries: Range<usize>, add: bool) {
        for key in keys.clone() {
            for query in self.seeing(key, &queries) {
                self.next(Tile { key, query, place: [key - keys.start, query - queries.start] });
                if query == queries.start.max(key) && key > keys.start {
                    self.sum_queries(key - 1, &queries, add);
                }
            }
        }
        if let Some(tile) = self.tile.take() {
            self.differentiate(tile, self.turn, None);
            self.sum_queries(tile.key, &queries, add);
        }
        for query in queries.clone() {
            self.sum_keys(query, keys, query - queries.start);
        }
    }

    /// The panels of `queries` that see a panel of keys.
    fn seeing(&self, key: usize, queries: &Range<usize>) -> Range<usize> {
        queries.start.max(key)..queries.end.min(self.end_panel(key))
    }

    /// The panel of queries behind the last one that sees a panel of keys.
    fn end_panel(&self, keys: usize) -> usize {
        let last_key = self.rows.min((keys + 1) * PANEL) - 1;
        self.dims.end_query(self.rows, last_key).div_ceil(PANEL)
    }

    /// Computes the scores of a tile and the gradients of its weights beside what is left to do for the tile before it.
    fn next(&mut self, tile: Tile) {
        self.turn = 1 - self.turn;
        let (dims, steps) = (self.dims, padded(self.dims) / PANEL);
        let at = |packed: &[u16], number: usize| Steps::close(packed[number * panel(dims)..].as_ptr());
        let [scores, slopes] = &mut self.scores[self.turn];
        let both = [(&self.k, &self.q, scores), (&self.v, &self.dout, slopes)];
        let products = both.map(|(rows, columns, out)| Product {
            a: at(rows, tile.key),
            b: at(columns, tile.query),
            steps,
            c: out.as_mut_ptr(),
            stride: PANEL,
        });
        // SAFETY: tiles are configured, and panels are whole in scratch. The tile before has the other scores.
        let mut woven = unsafe { Woven::new(products) };
        match self.tile.replace(tile) {
            Some(before) => self.differentiate(before, 1 - self.turn, Some(&mut woven)),
            None => woven.finish(),
        }
    }

    /// Weights and gradients of the scores of a tile whose products are there, written to their places in the span.
    fn differentiate(&mut self, tile: Tile, turn: usize, woven: Option<&mut Woven<2>>) {
        let Tile { key, query, place: [key_at, query_at] } = tile;
        let dims = self.dims;
        let (first_key, first_query) = (key * PANEL, query * PANEL);
        let seen = seen(dims, self.rows, first_key, first_query);
        let (by_key, by_query) = (query_at * STEP / 2, (query_at * SPAN + key_at) * STEP / 2);
        let out = Turned {
            weights: &mut self.weights[by_key..][..STEP / 2],
            grads: &mut self.grads[by_key..][..STEP / 2],
            columns: &mut self.columns[by_query..][..STEP / 2],
        };
        let statistics = [&self.lse[first_query..], &self.delta[first_query..]];
        let [scores, slopes] = &self.scores[turn];
        differentiate([scores, slopes], statistics, dims.log2_scale(), seen.as_ref(), out, woven);
    }

    /// What the span's queries bring to dk and dv of a panel of keys.
    fn sum_queries(&mut self, key: usize, queries: &Range<usize>, add: bool) {
        let (width, panels) = (padded(self.dims), self.rows.div_ceil(PANEL));
        let seeing = self.seeing(key, queries);
        if seeing.is_empty() {
            return;
        }
        let first = (seeing.start - queries.start) * STEP / 2;
        let both =
            [(&self.weights, &self.dout_terms, &mut self.dv), (&self.grads, &self.q_terms, &mut self.dk)];
        for (rows, terms_of, sums) in both {
            for step in 0..width / PANEL {
                let terms = (step * panels + seeing.start) * STEP / 2;
                let product = Product {
                    a: Steps::close(rows[first..].as_ptr()),
                    b: Steps::close(terms_of[terms..].as_ptr()),
                    steps: seeing.len(),
                    c: sums[key * PANEL * width + step * PANEL..].as_mut_ptr(),
                    stride: width,
                };
                // SAFETY: tiles are configured and nothing is woven in, and panels are whole in scratch.
                unsafe { product.run(add) }
            }
        }
    }

    /// What the span's keys bring to dq of a panel of queries.
    fn sum_keys(&mut self, query: usize, keys: &Range<usize>, place: usize) {
        let (dims, panels) = (self.dims, self.rows.div_ceil(PANEL));
        let first = dims.first_key(0, query * PANEL) / PANEL;
        let seen = first.max(keys.start)..keys.end.min(query + 1);
        if seen.is_empty() {
            return;
        }
        for step in 0..padded(dims) / PANEL {
            let product = Product {
                a: Steps::close(self.k_turned[(step * panels + seen.start) * STEP / 2..].as_ptr()),
                b: Steps::close(self.columns[(place * SPAN + seen.start - keys.start) * STEP / 2..].as_ptr()),
                steps: seen.len(),
                c: self.dq[query * panel(dims) + step * PANEL * PANEL..].as_mut_ptr(),
                stride: PANEL,
            };
            // SAFETY: as in `sum_queries`. What keys before the span bring is there already.
            unsafe { product.run(first < keys.start) }
        }
    }
}
