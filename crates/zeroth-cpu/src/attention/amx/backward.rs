//! Backward: one pass over panels of keys and queries computes all three gradients.
//!
//! Score tiles are [keys, queries]: weights and score gradients already have the layout of the A operand for dv and dk, a
//! query's lse and delta are vector lanes, and only dq, [head_dim, queries], is transposed at the end.
//!
//! dk and dv are accumulated once all queries of a span were multiplied by a panel of keys, dq once all keys of a span were:
//! longer sums are loaded and stored less often.

use std::ops::Range;

use super::super::bias_grad::{SequenceDiagonals, add_tile};
use super::super::blocking::{PANEL, SKEWED, SPAN, bias_elements, padded, panel};
use super::super::context::{HeadContext, Sequence};
use super::super::dropout::HeadDropout;
use super::super::tasks::{BackwardTask, head_view};
use super::context::{QueryKeys, TileBiases, TileContext, TileDropout};
use super::softmax_backward::{ScoreGrads, ScoreTile, diagonal_sums, softmax_backward};
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
    let (dims, sequence, kv_head) = (task.dims, task.sequence(), task.kv_head());
    let Sequence { queries: rows, keys } = sequence;
    if rows.is_empty() || keys.is_empty() {
        task.clear();
        return;
    }
    let (q_panels, k_panels, width) = (rows.len().div_ceil(PANEL), keys.len().div_ceil(PANEL), padded(dims));
    let [of_q, of_k] = [q_panels, k_panels].map(|panels| panels * panel(dims));
    let mut scratch = ScratchSplitter::new(scratch);
    let mut work = TaskState {
        dims,
        lengths: [rows.len(), keys.len()],
        k: scratch.bf16(of_k),
        v: scratch.bf16(of_k),
        k_transposed: scratch.bf16(of_k),
        q: scratch.bf16(of_q),
        q_transposed: scratch.bf16(of_q),
        dout: scratch.bf16(of_q),
        dout_transposed: scratch.bf16(of_q),
        dq: scratch.f32(of_q),
        dk: scratch.f32(of_k),
        dv: scratch.f32(of_k),
        lse: scratch.f32(q_panels * PANEL),
        delta: scratch.f32(q_panels * PANEL),
        scores: [0; 2].map(|_| [0; 2].map(|_| scratch.f32(PANEL * PANEL))),
        weights: scratch.bf16(SPAN * STEP / 2),
        grads: scratch.bf16(SPAN * STEP / 2),
        ds_b: scratch.bf16(SPAN * SPAN * STEP / 2),
        tile: None,
        buffer: 0,
        biases: dims.max_distance.map(|most| TileBiases::new(scratch.f32(bias_elements(dims)), most)),
        dropout: None,
        query_keys: [QueryKeys::NONE; SPAN],
        bias_grad: task.diagonals.take().map(|diagonals| {
            let skewed: &mut [f32; SKEWED] = scratch.f32(SKEWED).try_into().expect("a skewed tile");
            skewed.fill(0.0);
            BiasGrad { skewed, diagonals, head: 0 }
        }),
    };
    let k =
        Source { dims, data: task.saved.k, row_stride: task.strides.kv, rows: keys.clone(), head: kv_head };
    let v = Source { data: task.saved.v, ..k.clone() };
    for index in 0..k_panels {
        k.pack_panel(index, Operand::A, work.k);
        k.pack_transposed(index, Operand::A, work.k_transposed);
        v.pack_panel(index, Operand::A, work.v);
    }
    for head in task.heads() {
        let head_in_group = head - task.heads().start;
        work.start_head(&task.context.of_head(dims, head), head_in_group);
        let q = Source { dims, data: task.saved.q, row_stride: task.strides.q, rows: rows.clone(), head };
        let dout = Source { data: task.dout, ..q.clone() };
        // Everything that reads these 32 rows comes together: their stride is large, and few of them stay in cache.
        for index in 0..q_panels {
            work.row_stats(&task, head, index);
            dout.pack_panel(index, Operand::B, work.dout);
            dout.pack_transposed(index, Operand::B, work.dout_transposed);
            q.pack_panel(index, Operand::B, work.q);
            q.pack_transposed(index, Operand::B, work.q_transposed);
        }
        for first_key in (0..k_panels).step_by(SPAN) {
            let keys = first_key..k_panels.min(first_key + SPAN);
            let seeing = work.seeing_panels(first_key).start..work.seeing_panels(keys.end - 1).end;
            for first in seeing.clone().step_by(SPAN) {
                let queries = first..seeing.end.min(first + SPAN);
                work.find_query_keys(&rows, &queries);
                // The first span of queries that a key sees contains its panel_rows row.
                let add = head_in_group > 0 || first > seeing.start;
                work.span(&keys, queries, add);
            }
        }
        let first = head_in_group * dims.head_dim;
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
    for row in 0..keys.len() {
        if row + PREFETCH_ROWS < keys.len() {
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

/// The gradient of biases.
struct BiasGrad<'a> {
    /// Score gradients of a tile: see [`ScoreGrads::skewed`].
    skewed: &'a mut [f32; SKEWED],
    diagonals: SequenceDiagonals<'a>,
    /// The current head of those that share a kv head.
    head: usize,
}

/// State of a task. Rows are relative to the sequence.
struct TaskState<'a> {
    dims: &'a AttentionDims,
    /// Queries and keys of the sequence.
    lengths: [usize; 2],
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
    /// The current head's biases and dropout.
    biases: Option<TileBiases<'a>>,
    dropout: Option<HeadDropout<'a>>,
    /// What dropout follows from, of each panel of queries of a span.
    query_keys: [QueryKeys; SPAN],
    bias_grad: Option<BiasGrad<'a>>,
}

/// A panel of keys and one of queries, and their positions in the span.
#[derive(Clone, Copy)]
struct Tile {
    key: usize,
    query: usize,
    in_span: [usize; 2],
}

impl<'a> TaskState<'a> {
    /// Begins the `head`-th head of those that share a kv head.
    fn start_head(&mut self, context: &HeadContext<'a>, head: usize) {
        if let (Some(biases), Some(bias)) = (&mut self.biases, context.bias) {
            biases.fill(bias);
        }
        self.dropout = context.dropout;
        if let Some(grad) = &mut self.bias_grad {
            grad.head = head;
            grad.diagonals.of_head(head).fill(0.0);
        }
    }

    /// Computes what the dropout of some panels of queries follows from. `rows` are those of the sequence.
    fn find_query_keys(&mut self, rows: &Range<usize>, queries: &Range<usize>) {
        let Some(dropout) = &self.dropout else { return };
        for (keys, query) in self.query_keys.iter_mut().zip(queries.clone()) {
            let first = rows.start + query * PANEL;
            *keys = QueryKeys::new(dropout, first..rows.end.min(first + PANEL));
        }
    }

    /// Row statistics of a panel of queries: the saved lse in base 2, and delta = sum(dout · out).
    fn row_stats<T: Element>(&mut self, task: &BackwardTask<T>, head: usize, index: usize) {
        let (dims, all) = (self.dims, task.sequence().queries);
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
                if query == self.seeing(key, &queries).start && key > keys.start {
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
        let seeing = self.seeing_panels(key);
        queries.start.max(seeing.start)..queries.end.min(seeing.end)
    }

    /// The panels of queries that see a panel of keys.
    fn seeing_panels(&self, keys: usize) -> Range<usize> {
        let [rows, all_keys] = self.lengths;
        let last_key = all_keys.min((keys + 1) * PANEL) - 1;
        let first = self.dims.seeing_queries(keys * PANEL, rows).start;
        first / PANEL..self.dims.seeing_queries(last_key, rows).end.div_ceil(PANEL)
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
        let visible = visible_queries(dims, self.lengths, first_key, first_query);
        let dropout = self.dropout.as_ref();
        let dropout = dropout.map(|dropout| TileDropout::new(dropout, &self.query_keys[query_at], first_key));
        let (by_key, by_query) = (query_at * STEP / 2, (query_at * SPAN + key_at) * STEP / 2);
        let out = ScoreGrads {
            weights: &mut self.weights[by_key..][..STEP / 2],
            grads: &mut self.grads[by_key..][..STEP / 2],
            ds_b: &mut self.ds_b[by_query..][..STEP / 2],
            skewed: self.bias_grad.as_mut().map(|grad| &mut *grad.skewed),
        };
        let [scores, grads] = &self.scores[buffer];
        let tile = ScoreTile {
            scores,
            grads,
            lse: &self.lse[first_query..],
            delta: &self.delta[first_query..],
            scale: dims.log2_scale(),
            visible: visible.as_ref(),
            context: TileContext {
                bias: self.biases.as_ref().map(|biases| biases.tile(first_query, first_key)),
                dropout: dropout.as_ref(),
            },
        };
        softmax_backward(&tile, out, pipelined);
        if let Some(grad) = &mut self.bias_grad {
            let diagonals = grad.diagonals.of_head(grad.head);
            add_tile(diagonals, self.lengths[0], first_query, first_key, &diagonal_sums(grad.skewed));
        }
    }

    /// Accumulates dk and dv of a panel of keys over the queries of the span.
    fn sum_queries(&mut self, key: usize, queries: &Range<usize>, add: bool) {
        let (width, panels) = (padded(self.dims), self.lengths[0].div_ceil(PANEL));
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
        let (dims, [rows, all_keys]) = (self.dims, self.lengths);
        let panels = all_keys.div_ceil(PANEL);
        let last_query = rows.min((query + 1) * PANEL) - 1;
        let first = dims.visible_keys(query * PANEL, all_keys).start / PANEL;
        let end = dims.visible_keys(last_query, all_keys).end.div_ceil(PANEL);
        let seen = first.max(keys.start)..keys.end.min(end);
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
