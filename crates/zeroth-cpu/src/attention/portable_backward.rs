//! Backward on the GEMM of any instruction set: one pass over tiles of keys and queries computes all three gradients.

use std::ops::Range;

use super::blocking::{KEYS, QUERIES};
use super::{BackwardTask, ScoreTile, aligned_tiles, head_view, scale_and_round};
use crate::gemm::{MatrixView, gemm_serial};
use crate::isa::each_isa;
use crate::math;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(super) fn backward<T: Element>(mut task: BackwardTask<T>, scratch: &mut [f32]) {
    let (isa, dims, rows, kv_head) = (task.isa, task.dims, task.rows(), task.kv_head());
    let (head_dim, strides) = (dims.head_dim, task.strides);
    let (saved, dout) = (task.saved, task.dout);
    let (weights, scratch) = scratch.split_at_mut(QUERIES * KEYS);
    let (grads, scratch) = scratch.split_at_mut(QUERIES * KEYS);
    let (lse, scratch) = scratch.split_at_mut(rows.len());
    let (delta, scratch) = scratch.split_at_mut(rows.len());
    let (dq, scratch) = scratch.split_at_mut(rows.len() * head_dim);
    let (dk, scratch) = scratch.split_at_mut(rows.len() * head_dim);
    let (dv, pack) = scratch.split_at_mut(rows.len() * head_dim);
    dk.fill(0.0);
    dv.fill(0.0);
    for head in task.heads() {
        task.row_stats(head, lse, delta);
        dq.fill(0.0);
        for keys in aligned_tiles(rows.start, rows.clone(), KEYS) {
            let key_offset = (keys.start - rows.start) * head_dim;
            let seeing = keys.start..dims.end_query(rows.end, keys.end - 1);
            for queries in aligned_tiles(rows.start, seeing, QUERIES) {
                // Queries before the first key of the tile do not see it.
                let queries = queries.start.max(keys.start)..queries.end;
                let shape = [queries.len(), keys.len(), head_dim];
                let q = head_view(dims, saved.q, strides.q, queries.start, head);
                let k = head_view(dims, saved.k, strides.kv, keys.start, kv_head);
                let v = head_view(dims, saved.v, strides.kv, keys.start, kv_head);
                let dout = head_view(dims, dout, strides.q, queries.start, head);
                gemm_serial(isa, shape, q, k.transposed(), weights, KEYS, false, pack);
                gemm_serial(isa, shape, dout, v.transposed(), grads, KEYS, false, pack);
                let query_offset = queries.start - rows.start;
                let tile = ScoreTile { sequence: rows.start, queries: queries.clone(), keys: keys.clone() };
                let fma = math::has_fma(isa);
                score_grads(
                    isa,
                    fma,
                    dims,
                    &tile,
                    &lse[query_offset..],
                    &delta[query_offset..],
                    weights,
                    grads,
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
        let columns = (head - task.heads().start) * head_dim;
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
        tile: &ScoreTile,
        lse: &[f32],
        delta: &[f32],
        weights: &mut [f32],
        grads: &mut [f32],
    ) {
        if fma {
            score_grads_with::<true>(dims, tile, lse, delta, weights, grads);
        } else {
            score_grads_with::<false>(dims, tile, lse, delta, weights, grads);
        }
    }
}

/// Turns raw scores and gradients of weights into weights and gradients of scaled scores. Masked keys get zeros.
#[inline(always)]
fn score_grads_with<const FMA: bool>(
    dims: &AttentionDims,
    tile: &ScoreTile,
    lse: &[f32],
    delta: &[f32],
    weights: &mut [f32],
    grads: &mut [f32],
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
        for (weight, grad) in weights[from..to].iter_mut().zip(&mut grads[from..to]) {
            *weight = math::exp2::<FMA>(*weight * scale - lse);
            *grad = *weight * (*grad - delta);
        }
    }
}
