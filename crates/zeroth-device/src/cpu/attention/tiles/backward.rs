//! Backward: one pass over blocks of keys and queries brings all three gradients.
//!
//! Scores stand with keys as rows: then weights and gradients of scores are rows of a product over queries (dv, dk) as
//! they come, a query's lse and delta are lanes, and only dq, as [head's elements, queries], has to be turned at the end.

use std::arch::x86_64::{_mm512_loadu_si512, _mm512_setzero_si512, _mm512_storeu_si512};
use std::ops::Range;

use super::super::sizes::{BLOCK, LANES, PANEL, PANELS, padded, panel};
use super::super::{AttentionDims, Task, round};
use super::differentiate::{Turned, differentiate, query_of};
use super::{STEP, Steps, Tiles, aligned, product, take, take_bf16};
use crate::cpu::element::Element;
use crate::cpu::matmul::{Side, View, pack_bf16, transpose};

pub(in super::super) fn backward<T: Element>(mut task: Task<T>, scratch: &mut [f32]) {
    let _tiles = Tiles::configure();
    let (path, dims, rows, kv_head) = (task.path, task.dims, task.rows(), task.kv_head());
    if rows.is_empty() {
        return;
    }
    let (panels, width) = (rows.len().div_ceil(PANEL), padded(dims));
    let whole = panels * panel(dims);
    let mut scratch = aligned(scratch);
    let mut work = Work {
        dims,
        rows: rows.len(),
        k: take_bf16(&mut scratch, whole),
        v: take_bf16(&mut scratch, whole),
        k_turned: take_bf16(&mut scratch, whole),
        q: take_bf16(&mut scratch, whole),
        q_terms: take_bf16(&mut scratch, whole),
        dout: take_bf16(&mut scratch, whole),
        dout_terms: take_bf16(&mut scratch, whole),
        dq: take(&mut scratch, whole),
        dk: take(&mut scratch, whole),
        dv: take(&mut scratch, whole),
        lse: take(&mut scratch, panels * PANEL),
        delta: take(&mut scratch, panels * PANEL),
        scores: take(&mut scratch, PANEL * PANEL),
        slopes: take(&mut scratch, PANEL * PANEL),
        weights: take_bf16(&mut scratch, BLOCK * BLOCK),
        grads: take_bf16(&mut scratch, BLOCK * BLOCK),
        columns: take_bf16(&mut scratch, BLOCK * BLOCK),
    };
    let turned = take(&mut scratch, panel(dims));
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
    /// Panels [padded, 32 queries], in the order of [`query_of`].
    dq: &'a mut [f32],
    /// [keys, padded].
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Of each query.
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    /// One tile [32 keys, 32 queries].
    scores: &'a mut [f32],
    slopes: &'a mut [f32],
    /// Of a block: a panel for each panel of keys, in steps of queries.
    weights: &'a mut [u16],
    grads: &'a mut [u16],
    /// Of a block: a panel for each panel of queries, in steps of keys.
    columns: &'a mut [u16],
}

/// The place of a step in a block's panels, in elements.
const fn step_of(panel: usize, step: usize) -> usize {
    (panel * PANELS + step) * STEP / 2
}

impl Work<'_> {
    /// The panels of queries behind the last one that sees a panel of keys.
    fn end_panel(&self, keys: usize) -> usize {
        let last_key = self.rows.min((keys + 1) * PANEL) - 1;
        self.dims.end_query(self.rows, last_key).div_ceil(PANEL)
    }

    /// Adds what panels `keys` and panels `queries`, four of each at most, bring to all sums.
    fn block(&mut self, keys: &Range<usize>, queries: Range<usize>) {
        let (dims, width) = (self.dims, padded(self.dims));
        let steps = width / PANEL;
        let panels = self.rows.div_ceil(PANEL);
        for key in keys.clone() {
            let seeing = queries.start.max(key)..queries.end.min(self.end_panel(key));
            for query in seeing.clone() {
                self.tile([key, query], [key - keys.start, query - queries.start]);
            }
            if seeing.is_empty() {
                continue;
            }
            let first = step_of(key - keys.start, seeing.start - queries.start);
            for step in 0..steps {
                let terms = (step * panels + seeing.start) * STEP / 2;
                let place = key * PANEL * width + step * PANEL;
                // SAFETY: tiles are configured, and all panels are whole in scratch.
                unsafe {
                    for (rows, terms_of, sums) in
                        [(&self.weights, &self.dout_terms, &mut self.dv), (&self.grads, &self.q_terms, &mut self.dk)]
                    {
                        let a = Steps::close(rows.as_ptr().add(first));
                        let b = Steps::close(terms_of.as_ptr().add(terms));
                        product::<true>(a, b, seeing.len(), sums.as_mut_ptr().add(place), width);
                    }
                }
            }
        }
        for query in queries.clone() {
            let end = keys.end.min(query + 1);
            let Some(start) = (keys.start..end).find(|&key| query < self.end_panel(key)) else { continue };
            let b = step_of(query - queries.start, start - keys.start);
            for step in 0..steps {
                let place = query * panel(dims) + step * PANEL * PANEL;
                // SAFETY: as above.
                unsafe {
                    let a = Steps::close(self.k_turned.as_ptr().add((step * panels + start) * STEP / 2));
                    let b = Steps::close(self.columns.as_ptr().add(b));
                    product::<true>(a, b, end - start, self.dq.as_mut_ptr().add(place), PANEL);
                }
            }
        }
    }

    /// Weights and gradients of scores of one panel of keys and one of queries, written to their places in the block.
    fn tile(&mut self, [key, query]: [usize; 2], [key_at, query_at]: [usize; 2]) {
        let (dims, steps) = (self.dims, padded(self.dims) / PANEL);
        let at = |packed: &[u16], number: usize| Steps::close(packed[number * panel(dims)..].as_ptr());
        // SAFETY: tiles are configured, and all panels are whole in scratch.
        unsafe {
            product::<false>(at(self.k, key), at(self.q, query), steps, self.scores.as_mut_ptr(), PANEL);
            product::<false>(at(self.v, key), at(self.dout, query), steps, self.slopes.as_mut_ptr(), PANEL);
        }
        let (first_key, first_query) = (key * PANEL, query * PANEL);
        let behind = first_query + PANEL;
        let all = query > key && behind <= dims.end_query(self.rows, first_key);
        let seen = |row: usize| {
            let key = first_key + row;
            let end = if key < self.rows { dims.end_query(self.rows, key).clamp(first_query, behind) } else { first_query };
            key.clamp(first_query, end) - first_query..end - first_query
        };
        let seen: Option<&dyn Fn(usize) -> Range<usize>> = if all { None } else { Some(&seen) };
        let (by_key, by_query) = (step_of(key_at, query_at), step_of(query_at, key_at));
        let out = Turned {
            weights: &mut self.weights[by_key..],
            grads: &mut self.grads[by_key..],
            columns: &mut self.columns[by_query..],
        };
        let statistics = [&self.lse[first_query..], &self.delta[first_query..]];
        differentiate([self.scores, self.slopes], statistics, dims.log2_scale(), seen, out);
    }
}

/// Turns a panel of dq, [padded, 32] in the order of [`query_of`], to [32, padded].
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
                    let place = query_of(half * LANES + i) * width + first;
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
