//! Backward: one pass over panels of keys and queries computes all three gradients.
//!
//! Score tiles are [keys, queries]: weights and score gradients already have the layout of the A operand for dv and dk, a
//! query's lse and delta are vector lanes, and only dq, [head_dim, queries], is transposed at the end.
//!
//! dk and dv are accumulated once all queries of a span were multiplied by a panel of keys, dq once all keys of a span were:
//! longer sums are loaded and stored less often.

use std::ops::Range;

use super::super::blocking::{PANEL, SPAN, padded, panel};
use super::super::{BackwardTask, head_view};
use super::softmax_backward::{ScoreGrads, softmax_backward};
use super::tile_matmul::{PackedSteps, PipelinedMatmuls, TileMatmul};
use super::{STEP, store, visible_queries};
use crate::avx512::{prefetch_write_row, unpack_order};
use crate::gemm::{AmxKernel, MatrixView, Operand, pack_bf16};
use crate::scratch_splitter::ScratchSplitter;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

/// Rows of dk and dv prefetched before they are written.
const PREFETCH_ROWS: usize = 8;

pub(in super::super) fn backward<T: Element>(mut task: BackwardTask<T>, scratch: &mut [f32]) {
    let _tile_registers = AmxKernel::configured();
    let (dims, rows, kv_head) = (task.dims, task.rows(), task.kv_head());
    if rows.is_empty() {
        return;
    }
    let (panels, width) = (rows.len().div_ceil(PANEL), padded(dims));
    let whole = panels * panel(dims);
    let mut scratch = ScratchSplitter::new(scratch);
    let mut work = TaskState {
        dims,
        rows: rows.len(),
        k: scratch.bf16(whole),
        v: scratch.bf16(whole),
        k_transposed: scratch.bf16(whole),
        q: scratch.bf16(whole),
        q_transposed: scratch.bf16(whole),
        dout: scratch.bf16(whole),
        dout_transposed: scratch.bf16(whole),
        dq: scratch.f32(whole),
        dk: scratch.f32(whole),
        dv: scratch.f32(whole),
        lse: scratch.f32(panels * PANEL),
        delta: scratch.f32(panels * PANEL),
        scores: [0; 2].map(|_| [0; 2].map(|_| scratch.f32(PANEL * PANEL))),
        weights: scratch.bf16(SPAN * STEP / 2),
        grads: scratch.bf16(SPAN * STEP / 2),
        ds_b: scratch.bf16(SPAN * SPAN * STEP / 2),
        tile: None,
        buffer: 0,
    };
    let k =
        Source { dims, data: task.saved.k, row_stride: task.strides.kv, rows: rows.clone(), head: kv_head };
    let v = Source { data: task.saved.v, ..k.clone() };
    for index in 0..panels {
        k.pack_panel(index, Operand::A, work.k);
        k.pack_transposed(index, Operand::A, work.k_transposed);
        v.pack_panel(index, Operand::A, work.v);
    }
    for head in task.heads() {
        let is_first = head == task.heads().start;
        let q = Source { dims, data: task.saved.q, row_stride: task.strides.q, rows: rows.clone(), head };
        let dout = Source { data: task.dout, ..q.clone() };
        // Everything that reads these 32 rows comes together: their stride is large, and few of them stay in cache.
        for index in 0..panels {
            work.row_stats(&task, head, index);
            dout.pack_panel(index, Operand::B, work.dout);
            dout.pack_transposed(index, Operand::B, work.dout_transposed);
            q.pack_panel(index, Operand::B, work.q);
            q.pack_transposed(index, Operand::B, work.q_transposed);
        }
        for keys in (0..panels).step_by(SPAN) {
            let keys = keys..panels.min(keys + SPAN);
            let seeing = work.end_panel(keys.end - 1);
            for queries in (keys.start..seeing).step_by(SPAN) {
                // The first span of queries that a key sees contains its panel_rows row.
                let add = !is_first || queries > keys.start;
                work.span(&keys, queries..seeing.min(queries + SPAN), add);
            }
        }
        let first = (head - task.heads().start) * dims.head_dim;
        for (index, dq) in work.dq.chunks_exact(panel(dims)).enumerate() {
            for row in ((index + 1) * PANEL..rows.len()).take(PANEL) {
                prefetch_write_row(&task.grads[0].row(row)[first..][..dims.head_dim]);
            }
            let row_of = |lane: usize| {
                let row = index * PANEL + unpack_order(lane);
                (row < rows.len()).then(|| task.grads[0].row(row)[first..][..dims.head_dim].as_mut_ptr())
            };
            // SAFETY: the row has the elements of a head there, and only this task has it.
            unsafe { store::transposed_panel(dq, &[dims.scale; PANEL], dims.head_dim, row_of) }
        }
    }
    for row in 0..rows.len() {
        if row + PREFETCH_ROWS < rows.len() {
            prefetch_write_row(task.grads[1].row(row + PREFETCH_ROWS));
            prefetch_write_row(task.grads[2].row(row + PREFETCH_ROWS));
        }
        store::row(&work.dk[row * width..][..width], dims.scale, task.grads[1].row(row));
        store::row(&work.dv[row * width..][..width], 1.0, task.grads[2].row(row));
    }
}

/// One head of a sequence.
#[derive(Clone)]
struct Source<'a, T> {
    dims: &'a AttentionDims,
    data: &'a [T],
    /// Elements between rows.
    row_stride: usize,
    rows: Range<usize>,
    head: usize,
}

impl<T: Element> Source<'_, T> {
    /// Rows of a panel.
    fn rows_of(&self, index: usize) -> Range<usize> {
        let first = self.rows.start + index * PANEL;
        first..self.rows.end.min(first + PANEL)
    }

    /// Packs one panel of 32 rows, with k over the head dimension.
    fn pack_panel(&self, index: usize, operand: Operand, out: &mut [u16]) {
        let (dims, rows) = (self.dims, self.rows_of(index));
        let view = head_view(dims, self.data, self.row_stride, rows.start, self.head);
        let out = &mut out[index * panel(dims)..][..panel(dims)];
        pack_bf16(operand, view, rows.len(), dims.head_dim, out);
    }

    /// Packs one panel of rows as a tile step of all panels of 32 head elements, with k over rows.
    fn pack_transposed(&self, index: usize, operand: Operand, out: &mut [u16]) {
        let (dims, rows) = (self.dims, self.rows_of(index));
        let panel = self.rows.len().next_multiple_of(PANEL) * PANEL;
        for (at, out) in out.chunks_exact_mut(panel).enumerate() {
            let column = at * PANEL;
            let data = &self.data[rows.start * self.row_stride + self.head * dims.head_dim + column..];
            let view = MatrixView::row_major(data, self.row_stride).transposed();
            let out = &mut out[index * STEP / 2..][..STEP / 2];
            pack_bf16(operand, view, PANEL.min(dims.head_dim - column), rows.len(), out);
        }
    }
}

/// State of a task. Rows are relative to the sequence.
struct TaskState<'a> {
    dims: &'a AttentionDims,
    rows: usize,
    /// k and v packed as A [keys, head_dim].
    k: &'a mut [u16],
    v: &'a mut [u16],
    /// k packed as A [head_dim, keys].
    k_transposed: &'a mut [u16],
    /// q and dout packed as B: [head_dim, queries], and transposed [queries, head_dim].
    q: &'a mut [u16],
    q_transposed: &'a mut [u16],
    dout: &'a mut [u16],
    dout_transposed: &'a mut [u16],
    /// Accumulators [padded, 32 queries] per panel of queries, columns in [`unpack_order`].
    dq: &'a mut [f32],
    /// Accumulators [keys, padded].
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Row statistics of each query.
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    /// Scores and gradients of weights [32 keys, 32 queries] of two tiles, used alternately.
    scores: [[&'a mut [f32]; 2]; 2],
    /// Weights and score gradients of a panel of keys, packed as A [keys, queries].
    weights: &'a mut [u16],
    grads: &'a mut [u16],
    /// Score gradients of a span, packed as B [keys, queries], one panel per panel of queries.
    ds_b: &'a mut [u16],
    /// The tile whose scores are computed, and the index of its buffers.
    tile: Option<Tile>,
    buffer: usize,
}

/// A panel of keys and one of queries, and their positions in the span.
#[derive(Clone, Copy)]
struct Tile {
    key: usize,
    query: usize,
    in_span: [usize; 2],
}

impl TaskState<'_> {
    /// Row statistics of a panel of queries: the saved lse in base 2, and delta = sum(dout · out).
    fn row_stats<T: Element>(&mut self, task: &BackwardTask<T>, head: usize, index: usize) {
        let (dims, all) = (self.dims, task.rows());
        let panel_rows = index * PANEL..all.len().min((index + 1) * PANEL);
        let first = all.start + panel_rows.start;
        let saved = &task.saved.lse[head * dims.rows + first..];
        for (lse, saved) in self.lse[panel_rows.clone()].iter_mut().zip(saved) {
            *lse = saved * std::f32::consts::LOG2_E;
        }
        let row_stride = task.strides.q;
        let offset = first * row_stride + head * dims.head_dim;
        let (out, dout) = (&task.saved.out[offset..], &task.dout[offset..]);
        store::row_dots(out, dout, row_stride, dims.head_dim, &mut self.delta[panel_rows]);
    }

    /// Accumulates the gradients of at most a span of panels of keys and queries; without `add`, dk and dv are overwritten.
    fn span(&mut self, keys: &Range<usize>, queries: Range<usize>, add: bool) {
        for key in keys.clone() {
            for query in self.seeing(key, &queries) {
                self.next(Tile { key, query, in_span: [key - keys.start, query - queries.start] });
                if query == queries.start.max(key) && key > keys.start {
                    self.sum_queries(key - 1, &queries, add);
                }
            }
        }
        if let Some(tile) = self.tile.take() {
            self.softmax_backward(tile, self.buffer, None);
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

    /// One past the last panel of queries that sees a panel of keys.
    fn end_panel(&self, keys: usize) -> usize {
        let last_key = self.rows.min((keys + 1) * PANEL) - 1;
        self.dims.end_query(self.rows, last_key).div_ceil(PANEL)
    }

    /// Computes the scores of a tile and the gradients of its weights, interleaved with the vector work of the previous tile.
    fn next(&mut self, tile: Tile) {
        self.buffer = 1 - self.buffer;
        let (dims, steps) = (self.dims, padded(self.dims) / PANEL);
        let at =
            |packed: &[u16], index: usize| PackedSteps::contiguous(packed[index * panel(dims)..].as_ptr());
        let [scores, weight_grads] = &mut self.scores[self.buffer];
        let both = [(&self.k, &self.q, scores), (&self.v, &self.dout, weight_grads)];
        let matmuls = both.map(|(a, b, out)| TileMatmul {
            a: at(a, tile.key),
            b: at(b, tile.query),
            steps,
            c: out.as_mut_ptr(),
            stride: PANEL,
        });
        // SAFETY: tile registers are configured, and panels in scratch are complete. The previous tile has the other buffers.
        let mut pipelined = unsafe { PipelinedMatmuls::new(matmuls) };
        match self.tile.replace(tile) {
            Some(previous) => self.softmax_backward(previous, 1 - self.buffer, Some(&mut pipelined)),
            None => pipelined.finish(),
        }
    }

    /// Computes weights and score gradients of a tile from its matmuls, and packs them into the span.
    fn softmax_backward(&mut self, tile: Tile, buffer: usize, pipelined: Option<&mut PipelinedMatmuls<2>>) {
        let Tile { key, query, in_span: [key_at, query_at] } = tile;
        let dims = self.dims;
        let (first_key, first_query) = (key * PANEL, query * PANEL);
        let visible = visible_queries(dims, self.rows, first_key, first_query);
        let (by_key, by_query) = (query_at * STEP / 2, (query_at * SPAN + key_at) * STEP / 2);
        let out = ScoreGrads {
            weights: &mut self.weights[by_key..][..STEP / 2],
            grads: &mut self.grads[by_key..][..STEP / 2],
            ds_b: &mut self.ds_b[by_query..][..STEP / 2],
        };
        let row_stats = [&self.lse[first_query..], &self.delta[first_query..]];
        let [scores, weight_grads] = &self.scores[buffer];
        softmax_backward(
            [scores, weight_grads],
            row_stats,
            dims.log2_scale(),
            visible.as_ref(),
            out,
            pipelined,
        );
    }

    /// Accumulates dk and dv of a panel of keys over the queries of the span.
    fn sum_queries(&mut self, key: usize, queries: &Range<usize>, add: bool) {
        let (width, panels) = (padded(self.dims), self.rows.div_ceil(PANEL));
        let seeing = self.seeing(key, queries);
        if seeing.is_empty() {
            return;
        }
        let first = (seeing.start - queries.start) * STEP / 2;
        let both = [
            (&self.weights, &self.dout_transposed, &mut self.dv),
            (&self.grads, &self.q_transposed, &mut self.dk),
        ];
        for (rows, transposed, sums) in both {
            for step in 0..width / PANEL {
                let offset = (step * panels + seeing.start) * STEP / 2;
                let matmul = TileMatmul {
                    a: PackedSteps::contiguous(rows[first..].as_ptr()),
                    b: PackedSteps::contiguous(transposed[offset..].as_ptr()),
                    steps: seeing.len(),
                    c: sums[key * PANEL * width + step * PANEL..].as_mut_ptr(),
                    stride: width,
                };
                // SAFETY: tile registers are configured, no pipelined matmul is in flight, and panels in scratch are complete.
                unsafe { matmul.run(add) }
            }
        }
    }

    /// Accumulates dq of a panel of queries over the keys of the span.
    fn sum_keys(&mut self, query: usize, keys: &Range<usize>, in_span: usize) {
        let (dims, panels) = (self.dims, self.rows.div_ceil(PANEL));
        let first = dims.first_key(0, query * PANEL) / PANEL;
        let seen = first.max(keys.start)..keys.end.min(query + 1);
        if seen.is_empty() {
            return;
        }
        for step in 0..padded(dims) / PANEL {
            let matmul = TileMatmul {
                a: PackedSteps::contiguous(
                    self.k_transposed[(step * panels + seen.start) * STEP / 2..].as_ptr(),
                ),
                b: PackedSteps::contiguous(
                    self.ds_b[(in_span * SPAN + seen.start - keys.start) * STEP / 2..].as_ptr(),
                ),
                steps: seen.len(),
                c: self.dq[query * panel(dims) + step * PANEL * PANEL..].as_mut_ptr(),
                stride: PANEL,
            };
            // SAFETY: as in `sum_queries`. Contributions of keys before the span are in the accumulators.
            unsafe { matmul.run(first < keys.start) }
        }
    }
}
