//! The gradient norm: squares are summed by blocks with a fixed tree, and block sums are added exactly.
//!
//! A block is 2,048 elements of a flat buffer and belongs to one rank. Squares of f32 are exact in f64; element i goes to lane
//! i mod 256, and lanes are folded in halves. Block sums are added in fixed point ([`zeroth_kernel::ExactSum`]), so that the
//! result depends on neither the ranks nor the order.

use super::check_len;
use super::isa::each_isa;
use super::launch::{cpu_kernel, typed};
use super::pool::Pool;
use super::work_partition::Chunks;
use super::{math, stream};
use bytemuck::Zeroable;
use zeroth_kernel::BLOCK;
use zeroth_kernel::Element;
use zeroth_kernel::ExactSum;

/// Lanes of a block's sum of squares.
pub(super) const SQUARES: usize = 256;
/// Blocks per task.
const TASK_BLOCKS: usize = 32;

/// `sums[b]` = the sum of squares of block b; infinite or NaN exactly when an element of the block is.
pub fn block_squares<T: Element>(pool: &Pool, values: &[T], sums: &mut [f64]) {
    check_len("sums", sums.len(), values.len().div_ceil(BLOCK));
    let fused = math::has_fma(pool.isa());
    pool.each(Chunks::new(sums, TASK_BLOCKS), |task, sums| {
        let values = &values[task * TASK_BLOCKS * BLOCK..];
        for (at, (sum, block)) in sums.iter_mut().zip(values.chunks(BLOCK)).enumerate() {
            let next = values.get((at + 1) * BLOCK..(at + 2) * BLOCK).unwrap_or_default();
            *sum = block_sum(pool.isa(), fused, block, next);
        }
    });
}

each_isa! {
    pub(super) fn block_sum<T>(fused: bool, block: &[T], next: &[T]) -> f64 {
        let mut lanes = [0.0f64; SQUARES];
        for (at, values) in block.chunks(SQUARES).enumerate() {
            // A block is a page or two, and the hardware prefetcher stops at page boundaries.
            stream::prefetch_read(next.get(at * SQUARES..(at + 1) * SQUARES).unwrap_or_default());
            if fused {
                // The same bits as below: the square is exact either way.
                for (lane, value) in lanes.iter_mut().zip(values) {
                    let value = f64::from(value.to_f32());
                    *lane = value.mul_add(value, *lane);
                }
            } else {
                for (lane, value) in lanes.iter_mut().zip(values) {
                    let value = f64::from(value.to_f32());
                    *lane += value * value;
                }
            }
        }
        fold(lanes)
    }
}

/// Folds the lanes of a block's sum of squares.
#[inline(always)]
pub(super) fn fold(mut lanes: [f64; SQUARES]) -> f64 {
    let mut half = SQUARES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    lanes[0]
}

cpu_kernel!(
    Squares { values, value_type, sum },
    |_| 8 * (values.bytes / value_type.bytes()).div_ceil(BLOCK as u64),
    |cx| {
        let blocks = (values.bytes / value_type.bytes()).div_ceil(BLOCK as u64);
        let sums = cx.write::<f64>(cx.scratch.part(0, blocks, 8))?;
        typed!(value_type, A => block_squares::<A>(cx.pool, cx.read(values)?, sums));
        let total = cx.write_one::<ExactSum>(sum)?;
        *total = ExactSum::zeroed();
        for sum in sums {
            total.add(*sum);
        }
    }
);

#[cfg(test)]
mod tests {
    use zeroth_kernel::ExactSum;

    use super::*;

    #[test]
    fn one_nonfinite_element_is_found_at_any_position() {
        let pool = Pool::new(2);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 2047, 2048, 5000] {
                let mut values = vec![f32::MAX; 5001];
                values[place] = bad;
                let mut sums = vec![0.0; 3];
                block_squares(&pool, &values, &mut sums);
                let mut total = ExactSum::default();
                for &sum in &sums {
                    total.add(sum);
                }
                assert_eq!(total.total(), None, "{bad} at {place}");
            }
        }
        let mut sums = vec![0.0; 3];
        block_squares(&pool, &vec![f32::MAX; 5001], &mut sums);
        let mut total = ExactSum::default();
        for &sum in &sums {
            total.add(sum);
        }
        assert!(total.total().is_some(), "large is not the same as infinite");
    }
}
