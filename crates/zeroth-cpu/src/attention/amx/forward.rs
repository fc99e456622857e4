//! Forward: keys and values are packed once for all tasks; a task is a block of queries of one head.
//!
//! Score tiles are [keys, queries]: a query's maximum and sum are vector lanes, and its weights already have the layout of
//! the B operand for the matmul with v. Only the output, [head_dim, queries], is transposed at the end.

use std::ops::Range;

use super::super::blocking::{BLOCK, PANEL, SPAN, bias_elements, forward_shared, padded, panel, slots};
use super::super::context::{ContextSlices, Sequence, sequences_in};
use super::super::dropout::HeadDropout;
use super::super::tasks::{RESCALE_THRESHOLD, RowStrides, head_view};
use super::context::{QueryKeys, TileBiases, TileContext, TileDropout};
use super::softmax::{ScoreTile, SoftmaxState};
use super::tile_matmul::{PackedSteps, PipelinedMatmuls, TileMatmul};
use super::{STEP, store, visible_queries};
use crate::avx512::prefetch_write_row;
use crate::gemm::{AmxKernel, MatrixView, Operand, pack_bf16};
use crate::pool::Pool;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{Chunks, Grid};
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(in super::super) fn forward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    strides: RowStrides,
    context: &ContextSlices<'_>,
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (shared, scratch) = scratch.split_at_mut(forward_shared(dims));
    let shared = ScratchSplitter::new(shared).bf16(slots(dims) * dims.kv_heads * 2 * panel(dims));
    pool.each(Chunks::new(shared, 2 * panel(dims)), |task, slot| {
        let (kv_head, first) = (task / slots(dims), task % slots(dims) * PANEL);
        if let Some(keys) = full_panel(context.kv_starts(), first) {
            pack_panel(dims, strides.kv, [k, v], kv_head, keys, slot);
        }
    });
    let shared = &*shared;
    let parts = (
        Grid::with_row_stride(out, [dims.q_width(), strides.q], BLOCK, dims.head_dim),
        Grid::new(lse, dims.rows, 1, BLOCK).down_first(),
    );
    pool.each_with(parts, scratch, |task, (mut out, mut lse), scratch| {
        let _tile_registers = AmxKernel::configured();
        let head = task % dims.heads;
        let kv_head = head / dims.group();
        let head_context = context.of_head(dims, head);
        let mut scratch = ScratchSplitter::new(scratch);
        let mut work = TaskState {
            dims,
            packed: &shared[kv_head * slots(dims) * 2 * panel(dims)..][..slots(dims) * 2 * panel(dims)],
            queries: scratch.bf16(BLOCK / PANEL * panel(dims)),
            at: 0,
            last: scratch.bf16(2 * panel(dims)),
            scores: [0; 2].map(|_| scratch.f32(PANEL * PANEL).try_into().expect("a tile of scores")),
            weights: scratch.bf16(SPAN * STEP / 2),
            sums: scratch.f32(panel(dims)),
            state: SoftmaxState::NEW,
            started: false,
            biases: head_context.bias.map(|bias| {
                let mut biases = TileBiases::new(scratch.f32(bias_elements(dims)), bias.len() / 2);
                biases.fill(bias);
                biases
            }),
            dropout: head_context.dropout,
            query_keys: None,
        };
        let first = out.first_row();
        let rows = first..first + out.rows();
        for row in context.rows_without_keys(rows.clone()) {
            out.row(row - first).fill(T::default());
            lse.row(0)[row - first] = 0.0;
        }
        for (sequence, queries) in context.sequences_in(rows) {
            let keys = sequence.keys.clone();
            if keys.is_empty() {
                continue;
            }
            let (last, position) =
                (keys.len() - keys.len() % PANEL, queries.end - 1 - sequence.queries.start);
            if dims.visible_keys(position, keys.len()).end > last {
                pack_panel(dims, strides.kv, [k, v], kv_head, keys.start + last..keys.end, work.last);
            }
            work.pack_queries(&queries, q, strides.q, head);
            for (at, start) in queries.clone().step_by(PANEL).enumerate() {
                let queries = start..queries.end.min(start + PANEL);
                (work.at, work.state, work.started) = (at * panel(dims), SoftmaxState::NEW, false);
                for row in queries.clone() {
                    prefetch_write_row(out.row(row - first));
                }
                work.query_keys =
                    work.dropout.as_ref().map(|dropout| QueryKeys::new(dropout, queries.clone()));
                work.attend(&sequence, &queries);
                let factors = work.state.running_sum.map(|sum| 1.0 / sum);
                let row_of = |lane: usize| {
                    let row = queries.start - first + lane;
                    (lane < queries.len()).then(|| out.row(row).as_mut_ptr())
                };
                // SAFETY: rows of a tile have the width of a head, and only this task has them.
                unsafe { store::transposed_panel(work.sums, &factors, dims.head_dim, row_of) }
                let lse = &mut lse.row(0)[queries.start - first..][..queries.len()];
                for ((lse, max), sum) in
                    lse.iter_mut().zip(work.state.running_max).zip(work.state.running_sum)
                {
                    *lse = max * std::f32::consts::LN_2 + sum.ln();
                }
            }
        }
    });
}

/// The full panel of a sequence that starts in the 32 rows from `first` on. There is at most one, and it uses the slot of these
/// rows.
fn full_panel(starts: &[u32], first: usize) -> Option<Range<usize>> {
    sequences_in(starts, first..first + PANEL).find_map(|(_, sequence, rows)| {
        let start = sequence.start + (rows.start - sequence.start).next_multiple_of(PANEL);
        (start < first + PANEL && start + PANEL <= sequence.end).then_some(start..start + PANEL)
    })
}

/// Packs keys as A [keys, head_dim], then values as A [head_dim, keys]. Rows of k and v are `row_stride` elements apart.
fn pack_panel<T: Element>(
    dims: &AttentionDims,
    row_stride: usize,
    [k, v]: [&[T]; 2],
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [u16],
) {
    let (out_keys, out_values) = out.split_at_mut(panel(dims));
    let keys_view = head_view(dims, k, row_stride, keys.start, kv_head);
    pack_bf16(Operand::A, keys_view, keys.len(), dims.head_dim, out_keys);
    for (step, out) in out_values.chunks_exact_mut(STEP / 2).enumerate() {
        let column = step * PANEL;
        let values = &v[keys.start * row_stride + kv_head * dims.head_dim + column..];
        let columns = PANEL.min(dims.head_dim - column);
        pack_bf16(
            Operand::A,
            MatrixView::row_major(values, row_stride).transposed(),
            columns,
            keys.len(),
            out,
        );
    }
}

/// State of a task, for 32 queries at a time.
struct TaskState<'a> {
    dims: &'a AttentionDims,
    /// Full panels of keys and values of the task's head, by slot.
    packed: &'a [u16],
    /// The task's queries packed as B, and the offset of the current panel.
    queries: &'a mut [u16],
    at: usize,
    /// Keys and values after the last full panel of the sequence.
    last: &'a mut [u16],
    /// Score tiles [32 keys, 32 queries] of two panels of keys, used alternately.
    scores: [&'a mut [f32; PANEL * PANEL]; 2],
    /// Weights of a span of panels of keys, packed as B.
    weights: &'a mut [u16],
    /// Accumulators [padded, 32 queries].
    sums: &'a mut [f32],
    state: SoftmaxState,
    /// Whether the accumulators are initialised.
    started: bool,
    biases: Option<TileBiases<'a>>,
    dropout: Option<HeadDropout<'a>>,
    /// What the dropout of the current panel follows from.
    query_keys: Option<QueryKeys>,
}

impl TaskState<'_> {
    /// Packs the task's queries of a sequence, from rows `row_stride` elements apart.
    fn pack_queries<T: Element>(&mut self, queries: &Range<usize>, q: &[T], row_stride: usize, head: usize) {
        let dims = self.dims;
        if !queries.len().is_multiple_of(PANEL) {
            // Scores of missing queries are 0.
            self.queries[queries.len() / PANEL * panel(dims)..][..panel(dims)].fill(0);
        }
        let view = head_view(dims, q, row_stride, queries.start, head);
        pack_bf16(Operand::B, view, queries.len(), dims.head_dim, self.queries);
    }

    /// Accumulates softmax-weighted values for one panel of queries.
    fn attend(&mut self, sequence: &Sequence, queries: &Range<usize>) {
        let keys = sequence.keys.len();
        let position = |query: usize| query - sequence.queries.start;
        let first_key = self.dims.visible_keys(position(queries.start), keys).start;
        let end_key = self.dims.visible_keys(position(queries.end - 1), keys).end;
        let panels = first_key / PANEL..end_key.div_ceil(PANEL);
        // SAFETY: tile registers are configured, and panels in scratch are complete: 32 rows or columns, padded to tile steps.
        unsafe { self.score_matmul(&sequence.keys, panels.start).run(false) }
        for first in panels.clone().step_by(SPAN) {
            let span = first..panels.end.min(first + SPAN);
            let mut done = first;
            for at in span.clone() {
                // SAFETY: as above. The result goes to the other score tile.
                let next = (at + 1 < panels.end)
                    .then(|| unsafe { PipelinedMatmuls::new([self.score_matmul(&sequence.keys, at + 1)]) });
                self.update(sequence, queries, at, first, &mut done, next);
            }
            self.add_values(&sequence.keys, done..span.end, first);
        }
    }

    /// The matmul that computes the scores of a panel of keys.
    fn score_matmul(&mut self, keys: &Range<usize>, at: usize) -> TileMatmul {
        TileMatmul {
            a: PackedSteps::contiguous(self.keys_of(keys, at)),
            b: PackedSteps::contiguous(self.queries[self.at..].as_ptr()),
            steps: padded(self.dims) / PANEL,
            c: self.scores[at % 2].as_mut_ptr(),
            stride: PANEL,
        }
    }

    /// The packed keys of a panel of the sequence; its values follow them.
    fn keys_of(&self, keys: &Range<usize>, at: usize) -> *const u16 {
        let start = keys.start + at * PANEL;
        if start + PANEL > keys.end {
            return self.last.as_ptr();
        }
        self.packed[start / PANEL * 2 * panel(self.dims)..].as_ptr()
    }

    /// Turns the scores of a panel of keys into weights, interleaved with the next matmul. Where the maximum is raised, panels from
    /// `done` on are added to the accumulators first.
    fn update(
        &mut self,
        sequence: &Sequence,
        queries: &Range<usize>,
        at: usize,
        first: usize,
        done: &mut usize,
        mut next: Option<PipelinedMatmuls<1>>,
    ) {
        let dims = self.dims;
        let (key, query) = (at * PANEL, queries.start - sequence.queries.start);
        let lengths = [sequence.queries.len(), sequence.keys.len()];
        let visible = visible_queries(dims, lengths, key, query);
        let dropout = self.dropout.as_ref().zip(self.query_keys.as_ref());
        let dropout = dropout.map(|(dropout, queries)| TileDropout::new(dropout, queries, key));
        for limit in [RESCALE_THRESHOLD, f32::INFINITY] {
            let scores = ScoreTile {
                raw: self.scores[at % 2],
                scale: dims.log2_scale(),
                visible: visible.as_ref(),
                context: TileContext {
                    bias: self.biases.as_ref().map(|biases| biases.tile(query, key)),
                    dropout: dropout.as_ref(),
                },
            };
            let offset = (at - first) * STEP / 2;
            let weights = self.weights[offset..].first_chunk_mut().expect("a tile step");
            let fresh = !self.started && at == *done && limit == RESCALE_THRESHOLD;
            if !fresh && scores.update(limit, weights, &mut self.state, next.as_mut()) {
                return;
            }
            let factors = scores.raise_max(&mut self.state);
            self.add_values(&sequence.keys, *done..at, first);
            *done = at;
            if self.started {
                for sums in self.sums.as_chunks_mut::<PANEL>().0 {
                    sums.iter_mut().zip(factors).for_each(|(sum, factor)| *sum *= factor);
                }
            }
        }
    }

    /// Multiplies buffered weights of panels of keys by their values into the accumulators.
    fn add_values(&mut self, keys: &Range<usize>, panels: Range<usize>, first: usize) {
        let (dims, whole) = (self.dims, keys.len() / PANEL);
        for panels in [panels.start..panels.end.min(whole), panels.start.max(whole)..panels.end] {
            if panels.is_empty() {
                continue;
            }
            let values = self.keys_of(keys, panels.start).wrapping_add(panel(dims));
            for (step, sums) in self.sums.chunks_exact_mut(PANEL * PANEL).enumerate() {
                let matmul = TileMatmul {
                    a: PackedSteps::strided(values.wrapping_add(step * STEP / 2), 4 * panel(dims)),
                    b: PackedSteps::contiguous(self.weights[(panels.start - first) * STEP / 2..].as_ptr()),
                    steps: panels.len(),
                    c: sums.as_mut_ptr(),
                    stride: PANEL,
                };
                // SAFETY: as in `attend`; weights have a tile step for each panel.
                unsafe { matmul.run(self.started) }
            }
            self.started = true;
        }
    }
}
