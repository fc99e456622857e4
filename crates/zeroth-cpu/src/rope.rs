//! Rotary position embedding (RoPE) in the rotate-half form: dimension i is paired with dimension i + rotated/2.
//!
//! cos and sin stay in f32 (transformers rounds them to the model's dtype), and a result is rounded once.

use super::check_len;
use super::isa::each_isa;
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use zeroth_kernel::Element;
use zeroth_kernel::RopeDims;

/// The frequencies of a model's rotary embedding, after any scaling.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// Radians per position, one for each pair of dimensions.
    pub inv_freq: Vec<f32>,
    /// Factor of cos and sin.
    pub attention_scaling: f32,
}

impl RopeTable {
    /// The unscaled frequencies of base `theta` for `dim` rotated dimensions.
    pub fn plain(theta: f64, dim: usize) -> Self {
        let frequency = |pair: usize| theta.powf(-2.0 * pair as f64 / dim as f64) as f32;
        Self { inv_freq: (0..dim / 2).map(frequency).collect(), attention_scaling: 1.0 }
    }
}

/// Rows per task.
const ROWS: usize = 32;

/// Writes cos and sin [rows, rotated / 2] of every row's position.
pub fn rope_angles(pool: &Pool, table: &RopeTable, positions: &[i32], cos: &mut [f32], sin: &mut [f32]) {
    let pairs = table.inv_freq.len();
    check_len("cos", cos.len(), positions.len() * pairs);
    check_len("sin", sin.len(), positions.len() * pairs);
    pool.each((Chunks::new(cos, ROWS * pairs), Chunks::new(sin, ROWS * pairs)), |task, (cos, sin)| {
        let rows = cos.chunks_exact_mut(pairs).zip(sin.chunks_exact_mut(pairs));
        for ((cos, sin), &position) in rows.zip(&positions[task * ROWS..]) {
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&table.inv_freq) {
                let angle = position as f32 * frequency;
                *cos = angle.cos() * table.attention_scaling;
                *sin = angle.sin() * table.attention_scaling;
            }
        }
    });
}

/// Rotates x in place by each row's angles.
pub fn rope<T: Element>(pool: &Pool, dims: RopeDims, cos: &[f32], sin: &[f32], x: &mut [T]) {
    rotate(pool, dims, cos, sin, 1.0, x);
}

/// The gradient of [`rope`], in place: the rotation by the negative angles.
pub fn rope_backward<T: Element>(pool: &Pool, dims: RopeDims, cos: &[f32], sin: &[f32], dx: &mut [T]) {
    rotate(pool, dims, cos, sin, -1.0, dx);
}

/// y = x rotated by each row's angles, or by the negative angles with `back`; dimensions that are not rotated are copied.
pub fn rope_from<T: Element>(
    pool: &Pool,
    dims: RopeDims,
    cos: &[f32],
    sin: &[f32],
    back: bool,
    x: &[T],
    y: &mut [T],
) {
    let (pairs, width) = (dims.rotated / 2, dims.heads * dims.head_dim);
    check_len("cos", cos.len(), dims.rows * pairs);
    check_len("sin", sin.len(), dims.rows * pairs);
    let stride = dims.row_stride;
    check_rows("x", x.len(), [dims.rows, width], stride);
    check_len("y", y.len(), x.len());
    if pairs == 0 {
        return super::convert::copy(pool, x, y);
    }
    let sign = if back { -1.0 } else { 1.0 };
    pool.each(Chunks::new(y, ROWS * stride), |task, y| {
        let (first, x) = (task * ROWS * pairs, &x[task * ROWS * stride..]);
        rotate_rows_from(pool.isa(), dims, stride, &cos[first..], &sin[first..], sign, x, y);
    });
}

fn rotate<T: Element>(pool: &Pool, dims: RopeDims, cos: &[f32], sin: &[f32], sign: f32, x: &mut [T]) {
    let pairs = dims.rotated / 2;
    check_len("cos", cos.len(), dims.rows * pairs);
    check_len("sin", sin.len(), dims.rows * pairs);
    let stride = dims.row_stride;
    check_rows("x", x.len(), [dims.rows, dims.heads * dims.head_dim], stride);
    if pairs == 0 {
        return;
    }
    pool.each(Chunks::new(x, ROWS * stride), |task, x| {
        let first = task * ROWS * pairs;
        rotate_rows(pool.isa(), dims, stride, &cos[first..], &sin[first..], sign, x);
    });
}

each_isa! {
    fn rotate_rows<T>(dims: RopeDims, stride: usize, cos: &[f32], sin: &[f32], sign: f32, x: &mut [T]) {
        let (pairs, width) = (dims.rotated / 2, dims.heads * dims.head_dim);
        let angles = cos.chunks_exact(pairs).zip(sin.chunks_exact(pairs));
        for (row, (cos, sin)) in x.chunks_exact_mut(stride).zip(angles) {
            for head in row[..width].chunks_exact_mut(dims.head_dim) {
                rotate_head(head, cos, sin, sign);
            }
        }
    }
}

each_isa! {
    fn rotate_rows_from<T>(
        dims: RopeDims,
        stride: usize,
        cos: &[f32],
        sin: &[f32],
        sign: f32,
        x: &[T],
        y: &mut [T],
    ) {
        let (pairs, width) = (dims.rotated / 2, dims.heads * dims.head_dim);
        let angles = cos.chunks_exact(pairs).zip(sin.chunks_exact(pairs));
        for ((y, x), (cos, sin)) in y.chunks_exact_mut(stride).zip(x.chunks_exact(stride)).zip(angles) {
            for (y, x) in y[..width].chunks_exact_mut(dims.head_dim).zip(x[..width].chunks_exact(dims.head_dim)) {
                rotate_head_from(x, y, cos, sin, sign);
            }
        }
    }
}

/// Rotates the first `2 * cos.len()` dimensions of a head in place.
#[inline(always)]
pub(super) fn rotate_head<T: Element>(head: &mut [T], cos: &[f32], sin: &[f32], sign: f32) {
    let (first, second) = head[..2 * cos.len()].split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        [*a, *b] = rotate_pair(*a, *b, *cos, sin * sign);
    }
}

/// [`rotate_head`] from x to y; the other dimensions are copied.
#[inline(always)]
pub(super) fn rotate_head_from<T: Element>(x: &[T], y: &mut [T], cos: &[f32], sin: &[f32], sign: f32) {
    let pairs = cos.len();
    let ((y, y_rest), (x, x_rest)) = (y.split_at_mut(2 * pairs), x.split_at(2 * pairs));
    y_rest.copy_from_slice(x_rest);
    let ((a, b), (u, v)) = (y.split_at_mut(pairs), x.split_at(pairs));
    for (((((a, b), u), v), cos), sin) in a.iter_mut().zip(b).zip(u).zip(v).zip(cos).zip(sin) {
        [*a, *b] = rotate_pair(*u, *v, *cos, sin * sign);
    }
}

/// A rotated pair of dimensions.
#[inline(always)]
pub(super) fn rotate_pair<T: Element>(u: T, v: T, cos: f32, sin: f32) -> [T; 2] {
    let (u, v) = (u.to_f32(), v.to_f32());
    [T::from_f32(u * cos - v * sin), T::from_f32(v * cos + u * sin)]
}

cpu_kernel!(Rope { dims, cos, sin, x, y, back }, |_| 0, |cx| {
    let (cos, sin) = (cx.read(cos)?, cx.read(sin)?);
    rope_from::<T>(cx.pool, dims, cos, sin, back, cx.read(x)?, cx.write(y)?);
});

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};

    #[test]
    fn row_stride_changes_no_bits_and_padding_is_untouched() {
        let dims = RopeDims::new(70, 3, 8, 6);
        let padded = RopeDims { row_stride: 24 + APART, ..dims };
        let (x, cos, sin) = (random::<bf16>(1, 70 * 24), random(2, 70 * 3), random(3, 70 * 3));
        for pool in pools() {
            for back in [false, true] {
                let both = [(dims, x.clone()), (padded, apart(&x, 24, f32::NAN))];
                let [(y, place), (found, found_place)] = both.map(|(dims, x)| {
                    let (mut y, mut place) = (vec![bf16::NAN; x.len()], x.clone());
                    rope_from(&pool, dims, &cos, &sin, back, &x, &mut y);
                    let in_place = if back { rope_backward } else { rope };
                    in_place(&pool, dims, &cos, &sin, &mut place);
                    (y, place)
                });
                assert_eq!(bits(&found), bits(&apart(&y, 24, f32::NAN)), "{}, back: {back}", pool.isa());
                assert_eq!(bits(&found_place), bits(&apart(&place, 24, f32::NAN)), "{}", pool.isa());
            }
        }
    }

    #[test]
    fn rotation_out_of_place_matches_rotation_in_place() {
        for rotated in [0, 6, 8] {
            let dims = RopeDims::new(70, 3, 8, rotated);
            let value = |i: usize| (i as f32 * 0.731).sin();
            let x: Vec<f32> = (0..70 * 24).map(value).collect();
            let angles: Vec<f32> = (0..70 * rotated).map(|i| value(i + 9)).collect();
            let (cos, sin) = angles.split_at(70 * rotated / 2);
            let pool = Pool::new(2);
            for back in [false, true] {
                let (mut place, mut y) = (x.clone(), vec![f32::NAN; x.len()]);
                let in_place = if back { rope_backward } else { rope };
                in_place(&pool, dims, cos, sin, &mut place);
                rope_from(&pool, dims, cos, sin, back, &x, &mut y);
                assert_eq!(y, place, "{rotated} of 8 rotated, back: {back}");
            }
        }
    }
}
