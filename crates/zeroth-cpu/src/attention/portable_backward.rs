//! Backward on the GEMM of any instruction set: one pass over tiles of keys and queries computes all three gradients.

use std::ops::Range;

use super::bias_grad::add_row;
use super::blocking::{KEYS, QUERIES};
use super::context::{HeadContext, add_biases};
use super::tasks::{BackwardTask, ScoreTile, aligned_tiles, head_view, scale_and_round};
use crate::gemm::{MatrixView, gemm_serial};
use crate::isa::each_isa;
use crate::math;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(super) fn backward<T: Element>(mut task: BackwardTask<T>, scratch: &mut [f32]) {
    let (isa, dims, sequence, kv_head) = (task.isa, task.dims, task.sequence(), task.kv_head());
    let (head_dim, strides) = (dims.head_dim, task.strides);
    let (saved, dout) = (task.saved, task.dout);
    let (rows, kv_rows) = (sequence.queries.len(), sequence.keys.len());
    let (weights, scratch) = scratch.split_at_mut(QUERIES * KEYS);
    let (grads, scratch) = scratch.split_at_mut(QUERIES * KEYS);
    let (lse, scratch) = scratch.split_at_mut(rows);
    let (delta, scratch) = scratch.split_at_mut(rows);
    let (dq, scratch) = scratch.split_at_mut(rows * head_dim);
    let (dk, scratch) = scratch.split_at_mut(kv_rows * head_dim);
    let (dv, pack) = scratch.split_at_mut(kv_rows * head_dim);
    dk.fill(0.0);
    dv.fill(0.0);
    for head in task.heads() {
        let context = task.context.of_head(dims, head);
        task.row_stats(head, lse, delta);
        dq.fill(0.0);
        let first_head = task.heads().start;
        let mut diagonals = task.diagonals.as_mut().map(|diagonals| diagonals.of_head(head - first_head));
        if let Some(diagonals) = &mut diagonals {
            diagonals.fill(0.0);
        }
        for keys in aligned_tiles(sequence.keys.start, sequence.keys.clone(), KEYS) {
            let first_key = keys.start - sequence.keys.start;
            let key_offset = first_key * head_dim;
            let seeing = sequence.queries.start + dims.seeing_queries(first_key, rows).start
                ..sequence.queries.start + dims.seeing_queries(first_key + keys.len() - 1, rows).end;
            for queries in aligned_tiles(sequence.queries.start, seeing.clone(), QUERIES) {
                // The first queries may not see the tile.
                let queries = queries.start.max(seeing.start)..queries.end;
                let shape = [queries.len(), keys.len(), head_dim];
                let q = head_view(dims, saved.q, strides.q, queries.start, head);
                let k = head_view(dims, saved.k, strides.kv, keys.start, kv_head);
                let v = head_view(dims, saved.v, strides.kv, keys.start, kv_head);
                let dout = head_view(dims, dout, strides.q, queries.start, head);
                gemm_serial(isa, shape, q, k.transposed(), weights, KEYS, false, pack);
                gemm_serial(isa, shape, dout, v.transposed(), grads, KEYS, false, pack);
                let query_offset = queries.start - sequence.queries.start;
                let tile = ScoreTile { sequence: &sequence, queries: queries.clone(), keys: keys.clone() };
                let fma = math::has_fma(isa);
                score_grads(
                    isa,
                    fma,
                    dims,
                    &tile,
                    context,
                    &lse[query_offset..],
                    &delta[query_offset..],
                    weights,
                    grads,
                    diagonals.as_deref_mut(),
                );
                let (weights, grads) =
                    (MatrixView::row_major(&*weights, KEYS), MatrixView::row_major(&*grads, KEYS));
                let shape = [queries.len(), head_dim, keys.len()];
                gemm_serial(isa, shape, grads, k, &mut dq[query_offset * head_dim..], head_dim, true, pack);
                let shape = [keys.len(), head_dim, queries.len()];
                gemm_serial(isa, shape, grads.transposed(), q, &mut dk[key_offset..], head_dim, true, pack);
                gemm_serial(
                    isa,
                    shape,
                    weights.transposed(),
                    dout,
                    &mut dv[key_offset..],
                    head_dim,
                    true,
                    pack,
                );
            }
        }
        let columns = (head - first_head) * head_dim;
        for (row, sums) in dq.chunks_exact(head_dim.max(1)).enumerate() {
            scale_and_round(isa, sums, dims.scale, &mut task.grads[0].row(row)[columns..][..head_dim]);
        }
    }
    for (row, sums) in dk.chunks_exact(head_dim.max(1)).enumerate() {
        scale_and_round(isa, sums, dims.scale, task.grads[1].row(row));
    }
    for (row, sums) in dv.chunks_exact(head_dim.max(1)).enumerate() {
        scale_and_round(isa, sums, 1.0, task.grads[2].row(row));
    }
}

each_isa! {
    fn score_grads(
        fma: bool,
        dims: &AttentionDims,
        tile: &ScoreTile<'_>,
        context: HeadContext<'_>,
        lse: &[f32],
        delta: &[f32],
        weights: &mut [f32],
        grads: &mut [f32],
        diagonals: Option<&mut [f32]>,
    ) {
        if fma {
            score_grads_with::<true>(dims, tile, context, lse, delta, weights, grads, diagonals);
        } else {
            score_grads_with::<false>(dims, tile, context, lse, delta, weights, grads, diagonals);
        }
    }
}

/// Turns raw scores and gradients of weights, both before dropout, into the weights after it and the gradients of scaled scores.
/// Masked keys get zeros. Gradients of scores are added to their `diagonals`.
#[inline(always)]
fn score_grads_with<const FMA: bool>(
    dims: &AttentionDims,
    tile: &ScoreTile<'_>,
    context: HeadContext<'_>,
    lse: &[f32],
    delta: &[f32],
    weights: &mut [f32],
    grads: &mut [f32],
    mut diagonals: Option<&mut [f32]>,
) {
    let scale = dims.log2_scale();
    for (row, ((query, &lse), &delta)) in tile.queries.clone().zip(lse).zip(delta).enumerate() {
        let weights = &mut weights[row * KEYS..][..tile.keys.len()];
        let grads = &mut grads[row * KEYS..][..tile.keys.len()];
        let Range { start: from, end: to } = tile.visible_keys(dims, query);
        for hidden in [0..from, to..tile.keys.len()] {
            weights[hidden.clone()].fill(0.0);
            grads[hidden].fill(0.0);
        }
        let (visible, grads) = (&mut weights[from..to], &mut grads[from..to]);
        let scale = if let Some(bias) = context.bias {
            for score in visible.iter_mut() {
                *score *= scale;
            }
            add_biases(bias, tile.position(query), tile.first_key() + from, visible);
            1.0
        } else {
            scale
        };
        if let Some(dropout) = &context.dropout {
            let factors = &dropout.factors(query, tile.first_key())[from..to];
            for ((weight, grad), factor) in visible.iter_mut().zip(&mut *grads).zip(factors) {
                let softmax = math::exp2::<FMA>(*weight * scale - lse);
                *grad = softmax * (*grad * factor - delta);
                *weight = softmax * factor;
            }
        } else {
            for (weight, grad) in visible.iter_mut().zip(&mut *grads) {
                *weight = math::exp2::<FMA>(*weight * scale - lse);
                *grad = *weight * (*grad - delta);
            }
        }
        if let Some(diagonals) = diagonals.as_deref_mut() {
            let queries = tile.sequence.queries.len();
            add_row(diagonals, queries, tile.position(query), tile.first_key() + from, grads);
        }
    }
}
