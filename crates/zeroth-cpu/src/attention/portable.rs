//! Forward on the matrix kernels of any path. A task is a tile of queries of one head.

use std::ops::Range;

use super::blocking::{KEYS, QUERIES};
use super::{Pitches, SLACK, Scores, head_view, padding, pieces, round, tiles_of};
use crate::gemm::{View, block};
use crate::isa::each_isa;
use crate::math;
use crate::pool::Pool;
use crate::work_partition::Grid;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

pub(super) fn forward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    pitches: Pitches,
    starts: &[u32],
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (path, head_dim) = (pool.isa(), dims.head_dim);
    let parts = (
        Grid::with_pitch(out, [dims.q_width(), pitches.q], QUERIES, head_dim),
        Grid::new(lse, dims.rows, 1, QUERIES).down_first(),
    );
    pool.each_with(parts, scratch, |task, (mut out, mut lse), scratch| {
        let head = task % dims.heads;
        let kv_head = head / dims.group();
        let (scores, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (sums, scratch) = scratch.split_at_mut(QUERIES * head_dim);
        let (peaks, scratch) = scratch.split_at_mut(QUERIES);
        let (totals, pack) = scratch.split_at_mut(QUERIES);
        let first = out.first_row();
        let rows = first..first + out.rows();
        for row in padding(starts, rows.clone()) {
            out.row(row - first).fill(T::default());
            lse.row(0)[row - first] = 0.0;
        }
        for (sequence, queries) in pieces(starts, rows) {
            sums[..queries.len() * head_dim].fill(0.0);
            peaks.fill(f32::NEG_INFINITY);
            totals.fill(0.0);
            let seen = dims.first_key(sequence.start, queries.start)..queries.end;
            for keys in tiles_of(sequence.start, seen, KEYS) {
                // Queries before the tile's first key see nothing of it.
                let skip = keys.start.saturating_sub(queries.start);
                let seeing = queries.start + skip..queries.end;
                let q = head_view(dims, q, pitches.q, seeing.start, head);
                let k = head_view(dims, k, pitches.kv, keys.start, kv_head).transposed();
                block(path, [seeing.len(), keys.len(), head_dim], q, k, scores, KEYS, false, pack);
                let tile = Scores { sequence: sequence.start, queries: seeing.clone(), keys: keys.clone() };
                let sums = &mut sums[skip * head_dim..];
                let fused = math::has_fused(path);
                absorb(path, fused, dims, &tile, scores, &mut peaks[skip..], &mut totals[skip..], sums);
                let weights = View::rows(&*scores, KEYS);
                let v = head_view(dims, v, pitches.kv, keys.start, kv_head);
                block(path, [seeing.len(), head_dim, keys.len()], weights, v, sums, head_dim, true, pack);
            }
            for (row, sums) in sums.chunks_exact(head_dim.max(1)).enumerate().take(queries.len()) {
                let place = queries.start - first + row;
                round(path, sums, 1.0 / totals[row], out.row(place));
                lse.row(0)[place] = peaks[row] * std::f32::consts::LN_2 + totals[row].ln();
            }
        }
    });
}

each_isa! {
    fn absorb(
        fused: bool,
        dims: &AttentionDims,
        tile: &Scores,
        scores: &mut [f32],
        peaks: &mut [f32],
        totals: &mut [f32],
        sums: &mut [f32],
    ) {
        if fused {
            absorb_with::<true>(dims, tile, scores, peaks, totals, sums);
        } else {
            absorb_with::<false>(dims, tile, scores, peaks, totals, sums);
        }
    }
}

/// Turns a tile of raw scores into weights relative to each row's peak, and scales what was summed before where a peak
/// moves.
#[inline(always)]
fn absorb_with<const FUSED: bool>(
    dims: &AttentionDims,
    tile: &Scores,
    scores: &mut [f32],
    peaks: &mut [f32],
    totals: &mut [f32],
    sums: &mut [f32],
) {
    let (head_dim, scale) = (dims.head_dim, dims.log2_scale());
    for (row, query) in tile.queries.clone().enumerate() {
        let scores = &mut scores[row * KEYS..][..tile.keys.len()];
        let Range { start: from, end: to } = tile.seen(dims, query);
        scores[..from].fill(0.0);
        scores[to..].fill(0.0);
        let seen = &mut scores[from..to];
        if seen.is_empty() {
            continue;
        }
        let (peak, total) = (&mut peaks[row], &mut totals[row]);
        for score in seen.iter_mut() {
            *score *= scale;
        }
        let new = math::largest(seen);
        if new > *peak + SLACK {
            let shrink = math::exp2::<FUSED>(*peak - new);
            *peak = new;
            *total *= shrink;
            for sum in &mut sums[row * head_dim..][..head_dim] {
                *sum *= shrink;
            }
        }
        let peak = *peak;
        for score in seen.iter_mut() {
            *score = math::exp2::<FUSED>(*score - peak);
        }
        *total += math::sum_of(seen, |weight| weight);
    }
}
