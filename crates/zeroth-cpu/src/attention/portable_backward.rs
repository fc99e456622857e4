//! Backward on the matrix kernels of any path: one pass over tiles of keys and queries brings all three gradients.

use std::ops::Range;

use super::blocking::{KEYS, QUERIES};
use super::{Scores, Task, head_view, round, tiles_of};
use crate::gemm::{View, block};
use crate::isa::each_isa;
use crate::math;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(super) fn backward<T: Element>(mut task: Task<T>, scratch: &mut [f32]) {
    let (path, dims, rows, kv_head) = (task.path, task.dims, task.rows(), task.kv_head());
    let (head_dim, pitches) = (dims.head_dim, task.pitches);
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
        task.statistics(head, lse, delta);
        dq.fill(0.0);
        for keys in tiles_of(rows.start, rows.clone(), KEYS) {
            let key_place = (keys.start - rows.start) * head_dim;
            let seeing = keys.start..dims.end_query(rows.end, keys.end - 1);
            for queries in tiles_of(rows.start, seeing, QUERIES) {
                // Queries before the tile's first key see nothing of it.
                let queries = queries.start.max(keys.start)..queries.end;
                let shape = [queries.len(), keys.len(), head_dim];
                let q = head_view(dims, saved.q, pitches.q, queries.start, head);
                let k = head_view(dims, saved.k, pitches.kv, keys.start, kv_head);
                let v = head_view(dims, saved.v, pitches.kv, keys.start, kv_head);
                let dout = head_view(dims, dout, pitches.q, queries.start, head);
                block(path, shape, q, k.transposed(), weights, KEYS, false, pack);
                block(path, shape, dout, v.transposed(), grads, KEYS, false, pack);
                let place = queries.start - rows.start;
                let tile = Scores { sequence: rows.start, queries: queries.clone(), keys: keys.clone() };
                let fused = math::has_fused(path);
                differentiate(path, fused, dims, &tile, &lse[place..], &delta[place..], weights, grads);
                let (weights, grads) = (View::rows(&*weights, KEYS), View::rows(&*grads, KEYS));
                let shape = [queries.len(), head_dim, keys.len()];
                block(path, shape, grads, k, &mut dq[place * head_dim..], head_dim, true, pack);
                let shape = [keys.len(), head_dim, queries.len()];
                block(path, shape, grads.transposed(), q, &mut dk[key_place..], head_dim, true, pack);
                block(path, shape, weights.transposed(), dout, &mut dv[key_place..], head_dim, true, pack);
            }
        }
        let columns = (head - task.heads().start) * head_dim;
        for (row, sums) in dq.chunks_exact(head_dim.max(1)).enumerate() {
            round(path, sums, dims.scale, &mut task.grads[0].row(row)[columns..][..head_dim]);
        }
    }
    for (row, sums) in dk.chunks_exact(head_dim.max(1)).enumerate() {
        round(path, sums, dims.scale, task.grads[1].row(row));
    }
    for (row, sums) in dv.chunks_exact(head_dim.max(1)).enumerate() {
        round(path, sums, 1.0, task.grads[2].row(row));
    }
}

each_isa! {
    fn differentiate(
        fused: bool,
        dims: &AttentionDims,
        tile: &Scores,
        lse: &[f32],
        delta: &[f32],
        weights: &mut [f32],
        grads: &mut [f32],
    ) {
        if fused {
            differentiate_with::<true>(dims, tile, lse, delta, weights, grads);
        } else {
            differentiate_with::<false>(dims, tile, lse, delta, weights, grads);
        }
    }
}

/// From raw scores and the gradients of weights: the weights, and the gradients of scaled scores. Keys that a query does
/// not see get zeros.
#[inline(always)]
fn differentiate_with<const FUSED: bool>(
    dims: &AttentionDims,
    tile: &Scores,
    lse: &[f32],
    delta: &[f32],
    weights: &mut [f32],
    grads: &mut [f32],
) {
    let scale = dims.log2_scale();
    for (row, ((query, &lse), &delta)) in tile.queries.clone().zip(lse).zip(delta).enumerate() {
        let weights = &mut weights[row * KEYS..][..tile.keys.len()];
        let grads = &mut grads[row * KEYS..][..tile.keys.len()];
        let Range { start: from, end: to } = tile.seen(dims, query);
        for hidden in [0..from, to..tile.keys.len()] {
            weights[hidden.clone()].fill(0.0);
            grads[hidden].fill(0.0);
        }
        for (weight, grad) in weights[from..to].iter_mut().zip(&mut grads[from..to]) {
            *weight = math::exp2::<FUSED>(*weight * scale - lse);
            *grad = *weight * (*grad - delta);
        }
    }
}
