//! Forward on the GEMM of any instruction set. A task is a tile of queries of one head.

use std::ops::Range;

use super::blocking::{KEYS, QUERIES};
use super::context::{ContextSlices, HeadContext, add_biases};
use super::tasks::{RESCALE_THRESHOLD, RowStrides, ScoreTile, aligned_tiles, head_view, scale_and_round};
use crate::gemm::{MatrixView, gemm_serial};
use crate::isa::each_isa;
use crate::math;
use crate::pool::Pool;
use crate::work_partition::Grid;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(super) fn forward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    strides: RowStrides,
    context: &ContextSlices<'_>,
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (isa, head_dim) = (pool.isa(), dims.head_dim);
    let parts = (
        Grid::with_row_stride(out, [dims.q_width(), strides.q], QUERIES, head_dim),
        Grid::new(lse, dims.rows, 1, QUERIES).down_first(),
    );
    pool.each_with(parts, scratch, |task, (mut out, mut lse), scratch| {
        let head = task % dims.heads;
        let kv_head = head / dims.group();
        let (scores, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (sums, scratch) = scratch.split_at_mut(QUERIES * head_dim);
        let (running_max, scratch) = scratch.split_at_mut(QUERIES);
        let (running_sum, pack) = scratch.split_at_mut(QUERIES);
        let head_context = context.of_head(dims, head);
        let first = out.first_row();
        let rows = first..first + out.rows();
        for row in context.rows_without_keys(rows.clone()) {
            out.row(row - first).fill(T::default());
            lse.row(0)[row - first] = 0.0;
        }
        for (sequence, queries) in context.sequences_in(rows) {
            let (length, position) = (sequence.keys.len(), queries.start - sequence.queries.start);
            if length == 0 {
                continue;
            }
            sums[..queries.len() * head_dim].fill(0.0);
            running_max.fill(f32::NEG_INFINITY);
            running_sum.fill(0.0);
            let first_key = sequence.keys.start + dims.visible_keys(position, length).start;
            let end_key = sequence.keys.start + dims.visible_keys(position + queries.len() - 1, length).end;
            for keys in aligned_tiles(sequence.keys.start, first_key..end_key, KEYS) {
                // The first queries may not see the tile.
                let key = keys.start - sequence.keys.start;
                let skip = dims.seeing_queries(key, sequence.queries.len()).start.saturating_sub(position);
                let seeing = queries.start + skip..queries.end;
                let q = head_view(dims, q, strides.q, seeing.start, head);
                let k = head_view(dims, k, strides.kv, keys.start, kv_head).transposed();
                gemm_serial(isa, [seeing.len(), keys.len(), head_dim], q, k, scores, KEYS, false, pack);
                let tile = ScoreTile { sequence: &sequence, queries: seeing.clone(), keys: keys.clone() };
                let sums = &mut sums[skip * head_dim..];
                let fma = math::has_fma(isa);
                online_softmax(
                    isa,
                    fma,
                    dims,
                    &tile,
                    head_context,
                    scores,
                    &mut running_max[skip..],
                    &mut running_sum[skip..],
                    sums,
                );
                let weights = MatrixView::row_major(&*scores, KEYS);
                let v = head_view(dims, v, strides.kv, keys.start, kv_head);
                gemm_serial(
                    isa,
                    [seeing.len(), head_dim, keys.len()],
                    weights,
                    v,
                    sums,
                    head_dim,
                    true,
                    pack,
                );
            }
            for (row, sums) in sums.chunks_exact(head_dim.max(1)).enumerate().take(queries.len()) {
                let row_in_tile = queries.start - first + row;
                scale_and_round(isa, sums, 1.0 / running_sum[row], out.row(row_in_tile));
                lse.row(0)[row_in_tile] = running_max[row] * std::f32::consts::LN_2 + running_sum[row].ln();
            }
        }
    });
}

each_isa! {
    /// [`online_softmax_with`] for the queries of a tile, a row of `KEYS` scores each.
    pub(super) fn online_softmax(
        fma: bool,
        dims: &AttentionDims,
        tile: &ScoreTile<'_>,
        context: HeadContext<'_>,
        scores: &mut [f32],
        running_max: &mut [f32],
        running_sum: &mut [f32],
        sums: &mut [f32],
    ) {
        if fma {
            online_softmax_with::<true>(dims, tile, context, scores, running_max, running_sum, sums);
        } else {
            online_softmax_with::<false>(dims, tile, context, scores, running_max, running_sum, sums);
        }
    }
}

/// Turns a tile of raw scores into weights relative to each row's running maximum, and rescales the accumulators where the
/// maximum is raised. The running sum has the weights before dropout.
#[inline(always)]
fn online_softmax_with<const FMA: bool>(
    dims: &AttentionDims,
    tile: &ScoreTile<'_>,
    context: HeadContext<'_>,
    scores: &mut [f32],
    running_max: &mut [f32],
    running_sum: &mut [f32],
    sums: &mut [f32],
) {
    let (head_dim, scale) = (dims.head_dim, dims.log2_scale());
    for (row, query) in tile.queries.clone().enumerate() {
        let scores = &mut scores[row * KEYS..][..tile.keys.len()];
        let Range { start: from, end: to } = tile.visible_keys(dims, query);
        scores[..from].fill(0.0);
        scores[to..].fill(0.0);
        let visible = &mut scores[from..to];
        if visible.is_empty() {
            continue;
        }
        let (max, sum_of_weights) = (&mut running_max[row], &mut running_sum[row]);
        for score in visible.iter_mut() {
            *score *= scale;
        }
        if let Some(bias) = context.bias {
            add_biases(bias, tile.position(query), tile.first_key() + from, visible);
        }
        let new = math::max_of(visible);
        if new > *max + RESCALE_THRESHOLD {
            let shrink = math::exp2::<FMA>(*max - new);
            *max = new;
            *sum_of_weights *= shrink;
            for sum in &mut sums[row * head_dim..][..head_dim] {
                *sum *= shrink;
            }
        }
        let max = *max;
        for score in visible.iter_mut() {
            *score = math::exp2::<FMA>(*score - max);
        }
        *sum_of_weights += math::sum_of(visible, |weight| weight);
        if let Some(dropout) = &context.dropout {
            let factors = dropout.factors(query, tile.first_key());
            visible.iter_mut().zip(&factors[from..]).for_each(|(weight, factor)| *weight *= factor);
        }
    }
}
