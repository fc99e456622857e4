//! Moving numbers: casts, copies, fills, and the sum of what ranks sent.

use std::sync::atomic::{AtomicBool, Ordering};

use super::check_len;
use super::cut::Chunks;
use super::element::Element;
use super::path::each_path;
use super::pool::Pool;

/// Elements that one task moves.
const PIECE: usize = 16_384;

/// to = from, rounded to the nearest, ties to even. A NaN stays a NaN.
pub fn convert<A: Element, B: Element>(pool: &Pool, from: &[A], to: &mut [B]) {
    check_len("to", to.len(), from.len());
    pool.each(Chunks::new(to, PIECE), |task, to| {
        convert_piece(pool.path(), &from[task * PIECE..][..to.len()], to);
    });
}

each_path! {
    pub(super) fn convert_piece<A, B>(from: &[A], to: &mut [B]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = B::from_f32(from.to_f32());
        }
    }
}

/// As [`convert`]; true where a result is not finite.
pub fn convert_and_look<A: Element, B: Element>(pool: &Pool, from: &[A], to: &mut [B]) -> bool {
    check_len("to", to.len(), from.len());
    // It only ever becomes true, so the order of the tasks means nothing.
    let broken = AtomicBool::new(false);
    pool.each(Chunks::new(to, PIECE), |task, to| {
        if look_piece(pool.path(), &from[task * PIECE..][..to.len()], to) {
            broken.store(true, Ordering::Relaxed);
        }
    });
    broken.into_inner()
}

each_path! {
    fn look_piece<A, B>(from: &[A], to: &mut [B]) -> bool {
        /// The exponent of infinity and NaN.
        const ENDLESS: u32 = 0x7f80_0000;
        let mut broken = 0u32;
        for (to, from) in to.iter_mut().zip(from) {
            *to = B::from_f32(from.to_f32());
            broken |= u32::from(to.to_f32().to_bits() & ENDLESS == ENDLESS);
        }
        broken != 0
    }
}

/// to = from.
pub fn copy<T: Copy + Send + Sync>(pool: &Pool, from: &[T], to: &mut [T]) {
    check_len("to", to.len(), from.len());
    pool.each(Chunks::new(to, PIECE), |task, to| to.copy_from_slice(&from[task * PIECE..][..to.len()]));
}

/// Every element of `to` becomes `value`.
pub fn fill<T: Copy + Send + Sync>(pool: &Pool, value: T, to: &mut [T]) {
    pool.each(Chunks::new(to, PIECE), |_, to| to.fill(value));
}

/// The sum over ranks, added in f32 in their order and rounded once; with `add` the sum is added to what `to` holds.
/// `parts` holds a part for each rank, as long as `to`, end to end.
pub fn sum_ranks<A: Element, B: Element>(pool: &Pool, parts: &[A], to: &mut [B], add: bool) {
    let length = to.len();
    if length == 0 {
        return;
    }
    check_len("parts", parts.len(), parts.len().next_multiple_of(length));
    pool.each(Chunks::new(to, PIECE), |task, to| {
        sum_piece(pool.path(), parts, length, task * PIECE, to, add);
    });
}

/// y = a + b, each element rounded once.
pub fn sum<T: Element>(pool: &Pool, a: &[T], b: &[T], y: &mut [T]) {
    check_len("a", a.len(), y.len());
    check_len("b", b.len(), y.len());
    pool.each(Chunks::new(y, PIECE), |task, y| {
        let range = task * PIECE..task * PIECE + y.len();
        super::rms_norm::add(pool.path(), &a[range.clone()], &b[range], y);
    });
}

each_path! {
    fn sum_piece<A, B>(parts: &[A], length: usize, first: usize, to: &mut [B], add: bool) {
        // Small enough to stay in registers and the nearest cache from one rank to the next.
        let mut sums = [0.0f32; 256];
        for (at, to) in to.chunks_mut(sums.len()).enumerate() {
            let sums = &mut sums[..to.len()];
            sums.fill(0.0);
            for (rank, values) in parts.chunks_exact(length).enumerate() {
                let values = &values[first + at * 256..];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = if rank == 0 { value.to_f32() } else { *sum + value.to_f32() };
                }
            }
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = B::from_f32(if add { to.to_f32() + *sum } else { *sum });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_copied_and_filled_over_several_tasks() {
        let pool = Pool::new(3);
        let from: Vec<u32> = (0..40_000).collect();
        let mut to = vec![0; 40_000];
        copy(&pool, &from, &mut to);
        assert_eq!(to, from);
        fill(&pool, 7, &mut to);
        assert!(to.iter().all(|&value| value == 7));
    }

    #[test]
    #[should_panic(expected = "`to` has 3 elements; the sizes given need 2")]
    fn a_buffer_of_the_wrong_length_is_named() {
        convert(&Pool::new(1), &[1.0f32, 2.0], &mut [0.0f32; 3]);
    }
}
