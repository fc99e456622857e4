//! Biases of relative positions: from a learned table by bucket to one by distance, and back. Tables are small, and one thread
//! computes them.

use super::check_len;
use super::launch::cpu_kernel;
use zeroth_kernel::{Element, PositionBiasDims};

/// The bucket of each distance, from the most negative on.
fn buckets(dims: PositionBiasDims) -> impl Iterator<Item = usize> {
    let most = dims.buckets.max_distance as i64;
    (-most..=most).map(move |distance| dims.buckets.of(distance) as usize)
}

#[track_caller]
fn check(dims: PositionBiasDims, by_bucket: usize, by_distance: usize) {
    check_len("w", by_bucket, dims.buckets.buckets as usize * dims.heads);
    check_len("table", by_distance, dims.buckets.distances() as usize * dims.heads);
}

/// table[h, d + `max_distance`] = w[bucket of d, h].
pub fn position_bias<T: Element>(dims: PositionBiasDims, w: &[T], table: &mut [f32]) {
    check(dims, w.len(), table.len());
    let distances = dims.buckets.distances() as usize;
    for (distance, bucket) in buckets(dims).enumerate() {
        let of_heads = &w[bucket * dims.heads..][..dims.heads];
        for (to, w) in table.iter_mut().skip(distance).step_by(distances).zip(of_heads) {
            *to = w.to_f32();
        }
    }
}

/// Adds to dw [buckets, heads] the entries of dtable that share a bucket, in the order of their distances.
pub fn position_bias_backward(dims: PositionBiasDims, dtable: &[f32], dw: &mut [f32]) {
    check(dims, dw.len(), dtable.len());
    let distances = dims.buckets.distances() as usize;
    for (distance, bucket) in buckets(dims).enumerate() {
        let of_heads = &mut dw[bucket * dims.heads..][..dims.heads];
        for (dw, dtable) in of_heads.iter_mut().zip(dtable.iter().skip(distance).step_by(distances)) {
            *dw += dtable;
        }
    }
}

cpu_kernel!(PositionBias { dims, w, table }, |_| 0, |cx| {
    position_bias::<T>(dims, cx.read(w)?, cx.write(table)?);
});

cpu_kernel!(PositionBiasBackward { dims, dtable, dw }, |_| 0, |cx| {
    position_bias_backward(dims, cx.read(dtable)?, cx.write(dw)?);
});
