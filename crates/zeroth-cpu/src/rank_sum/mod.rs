//! The sum over ranks of buffers that are read in place, in the ranks' own memory.
//!
//! [`super::sum_ranks`] computes the same sum over contiguous parts and is the reference of the tests. For the gradient norm
//! the squares of the result are summed while it is in L1.

#![allow(unsafe_code, reason = "vector kernels run where their instructions were detected")]

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::sync::{Mutex, PoisonError};

use zeroth_base::DType;

use super::check_len;
use super::isa::{Isa, each_isa};
use super::math;
use super::norm::block_sum;
use super::pool::Pool;
use super::stream::{self, STAGE, staged};
use super::work_partition::Chunks;
use zeroth_kernel::Element;
use zeroth_kernel::{BLOCK, ExactSum};

/// Elements per task.
const PIECE: usize = 16_384;

/// to = the sum of `part(rank)` over ranks, added in f32 in rank order and rounded once; with `add` the old value of `to` is
/// added too. The squares of `to`, summed by blocks, are added to `squares`.
pub fn sum_parts<'a, A: Element, B: Element>(
    pool: &Pool,
    ranks: usize,
    part: impl Fn(usize) -> &'a [A] + Sync,
    to: &mut [B],
    add: bool,
    squares: Option<&mut ExactSum>,
) {
    if B::DTYPE == DType::F32 {
        return sum_wide(pool, ranks, part, bytemuck::cast_slice_mut(to), add, squares);
    }
    (0..ranks).for_each(|rank| check_len("part", part(rank).len(), to.len()));
    let squares = squares.map(Mutex::new);
    pool.each(Chunks::new(to, PIECE), |task, to| {
        let range = task * PIECE..task * PIECE + to.len();
        let counted = rounded_blocks(pool.isa(), ranks, |rank| &part(rank)[range.clone()], to, add);
        if let Some(squares) = &squares {
            squares.lock().unwrap_or_else(PoisonError::into_inner).merge(&counted);
        }
    });
}

/// [`sum_parts`] of one task with a 16-bit result; returns the sum of squares.
fn rounded_blocks<'a, A: Element, B: Element>(
    isa: Isa,
    ranks: usize,
    of: impl Fn(usize) -> &'a [A],
    to: &mut [B],
    add: bool,
) -> ExactSum {
    let fused = math::has_fma(isa);
    let (mut counted, mut near) = (ExactSum::default(), [0.0; BLOCK]);
    for (block, to) in to.chunks_mut(BLOCK).enumerate() {
        #[cfg(target_arch = "x86_64")]
        if avx512::fits::<A>(isa)
            && B::DTYPE == DType::Bf16
            && let Ok(to) = <&mut [u16; BLOCK]>::try_from(bytemuck::cast_slice_mut::<B, u16>(&mut *to))
        {
            // SAFETY: `fits` has found the instructions.
            counted.add(unsafe { avx512::sum_block_bf16(ranks, |rank| block_of(of(rank), block), to, add) });
            continue;
        }
        let sums = &mut near[..to.len()];
        sum_near(isa, ranks, |rank| &of(rank)[block * BLOCK..], sums);
        round_sums(isa, sums, to, add);
        counted.add(block_sum(isa, fused, sums, &[]));
    }
    counted
}

/// A whole block of one rank's bf16.
#[cfg(target_arch = "x86_64")]
fn block_of<A: Element>(part: &[A], block: usize) -> &[u16; BLOCK] {
    let block = bytemuck::cast_slice(&part[block * BLOCK..][..BLOCK]);
    block.try_into().expect("the slice has the length of a block")
}

/// Sums of a few elements over ranks, in L1.
fn sum_near<'a, A: Element>(isa: Isa, ranks: usize, of: impl Fn(usize) -> &'a [A], sums: &mut [f32]) {
    for (stage, sums) in sums.chunks_mut(STAGE).enumerate() {
        let at = stage * STAGE;
        match ranks {
            0 => sums.fill(0.0),
            1 => first(isa, &of(0)[at..], sums, false),
            _ => two(isa, &of(0)[at..], &of(1)[at..], sums, false),
        }
        (2..ranks).for_each(|rank| more(isa, &of(rank)[at..], sums));
    }
}

fn sum_wide<'a, A: Element>(
    pool: &Pool,
    ranks: usize,
    part: impl Fn(usize) -> &'a [A] + Sync,
    to: &mut [f32],
    add: bool,
    squares: Option<&mut ExactSum>,
) {
    (0..ranks).for_each(|rank| check_len("part", part(rank).len(), to.len()));
    // With `add` the destination was just read and is in the cache.
    let past = !add && stream::bypasses_cache(size_of_val(to));
    let squares = squares.map(Mutex::new);
    pool.each(Chunks::new(to, PIECE), |task, to| {
        let range = task * PIECE..task * PIECE + to.len();
        let of = |rank: usize| &part(rank)[range.clone()];
        if let Some(squares) = &squares {
            let counted = count_blocks(pool.isa(), ranks, of, to, add, past);
            // Exact, so the order of tasks does not matter.
            squares.lock().unwrap_or_else(PoisonError::into_inner).merge(&counted);
            return;
        }
        match (ranks, add) {
            (0, false) => to.fill(0.0),
            (0, true) => {}
            (1, false) => first(pool.isa(), of(0), to, past),
            // Two ranks in one loop: the first one's values are not stored and loaded again.
            (_, false) => two(pool.isa(), of(0), of(1), to, past && ranks == 2),
            (1, true) => more(pool.isa(), of(0), to),
            (2, true) => two_more(pool.isa(), of(0), of(1), to),
            (_, true) => {
                let mut sums = [0.0; STAGE];
                for (piece, to) in to.chunks_mut(STAGE).enumerate() {
                    let (sums, range) = (&mut sums[..to.len()], piece * STAGE..piece * STAGE + to.len());
                    two(pool.isa(), &of(0)[range.clone()], &of(1)[range.clone()], sums, false);
                    (2..ranks).for_each(|rank| more(pool.isa(), &of(rank)[range.clone()], sums));
                    to.iter_mut().zip(sums).for_each(|(to, sum)| *to += *sum);
                }
            }
        }
        if !add {
            // A piece stays in the cache for all ranks.
            (2..ranks).for_each(|rank| more(pool.isa(), of(rank), to));
        }
    });
}

/// [`sum_parts`] of one task with an f32 result, block by block; returns the sum of squares.
fn count_blocks<'a, A: Element>(
    isa: Isa,
    ranks: usize,
    of: impl Fn(usize) -> &'a [A],
    to: &mut [f32],
    add: bool,
    past: bool,
) -> ExactSum {
    let fused = math::has_fma(isa);
    let (mut counted, mut near) = (ExactSum::default(), [0.0; BLOCK]);
    for (block, to) in to.chunks_mut(BLOCK).enumerate() {
        #[cfg(target_arch = "x86_64")]
        if avx512::fits::<A>(isa)
            && let Ok(to) = <&mut [f32; BLOCK]>::try_from(&mut *to)
        {
            // SAFETY: `fits` has found the instructions.
            counted.add(unsafe { avx512::sum_block(ranks, |rank| block_of(of(rank), block), to, add, past) });
            continue;
        }
        let sums = &mut near[..to.len()];
        sum_near(isa, ranks, |rank| &of(rank)[block * BLOCK..], sums);
        if add {
            more(isa, sums, to);
            counted.add(block_sum(isa, fused, to, &[]));
            continue;
        }
        counted.add(block_sum(isa, fused, sums, &[]));
        if past {
            stream::store_non_temporal(sums, to);
        } else {
            to.copy_from_slice(sums);
        }
    }
    stream::fence();
    counted
}

each_isa! {
    fn first<A>(one: &[A], to: &mut [f32], past: bool) {
        staged(to, past, |at, to| {
            stream::prefetch_next_page(one, at, to.len());
            for (to, one) in to.iter_mut().zip(&one[at..]) {
                *to = one.to_f32();
            }
        });
    }
}

each_isa! {
    fn two<A>(one: &[A], two: &[A], to: &mut [f32], past: bool) {
        staged(to, past, |at, to| {
            stream::prefetch_next_page(one, at, to.len());
            stream::prefetch_next_page(two, at, to.len());
            for ((to, one), two) in to.iter_mut().zip(&one[at..]).zip(&two[at..]) {
                *to = one.to_f32() + two.to_f32();
            }
        });
    }
}

each_isa! {
    /// Stores sums rounded, with the old value added where `add`. `sums` then holds the stored values.
    fn round_sums<B>(sums: &mut [f32], to: &mut [B], add: bool) {
        for (sum, to) in sums.iter_mut().zip(to) {
            *to = B::from_f32(if add { to.to_f32() + *sum } else { *sum });
            *sum = to.to_f32();
        }
    }
}

each_isa! {
    fn more<A>(one: &[A], to: &mut [f32]) {
        for (to, one) in to.iter_mut().zip(one) {
            *to += one.to_f32();
        }
    }
}

each_isa! {
    fn two_more<A>(one: &[A], two: &[A], to: &mut [f32]) {
        for ((to, one), two) in to.iter_mut().zip(one).zip(two) {
            *to += one.to_f32() + two.to_f32();
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::{block_squares, sum_ranks};

    #[test]
    fn parts_in_place_sum_to_the_bits_of_contiguous_parts_on_every_isa() {
        for &isa in Isa::available() {
            sums_match_contiguous_parts(&Pool::on_isa(3, isa).unwrap());
        }
    }

    fn sums_match_contiguous_parts(pool: &Pool) {
        for length in [0, 1, 255, 40_000, (1 << 20) + 77] {
            for ranks in 1..=4 {
                let value = |i: usize| bf16::from_f32((i as f32 * 0.37).sin() * 1e3);
                let all: Vec<bf16> = (0..ranks * length).map(value).collect();
                let part = |rank: usize| &all[rank * length..(rank + 1) * length];
                for add in [false, true] {
                    let start: Vec<f32> = (0..length).map(|i| (i as f32).cos()).collect();
                    let (mut found, mut expected, mut counting) = (start.clone(), start.clone(), start);
                    sum_parts(pool, ranks, part, &mut found, add, None);
                    sum_ranks(pool, &all, &mut expected, add);
                    let same =
                        |found: &[f32]| found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same(&found), "{ranks} ranks, {length} elements, add {add}");
                    let mut squares = ExactSum::default();
                    squares.add(0.5);
                    sum_parts(pool, ranks, part, &mut counting, add, Some(&mut squares));
                    assert!(same(&counting), "{ranks} ranks, {length} elements, add {add}, counted");
                    let mut sums = vec![0.0; length.div_ceil(BLOCK)];
                    block_squares(pool, &expected, &mut sums);
                    let mut all_squares = ExactSum::default();
                    sums.iter().chain(&[0.5]).for_each(|sum| all_squares.add(*sum));
                    assert_eq!(squares, all_squares, "{ranks} ranks, {length} elements, add {add}");
                    rounded_sums_match_contiguous_parts(pool, ranks, &all, length, add);
                }
            }
        }
    }

    fn rounded_sums_match_contiguous_parts(
        pool: &Pool,
        ranks: usize,
        all: &[bf16],
        length: usize,
        add: bool,
    ) {
        let mut found: Vec<bf16> = (0..length).map(|i| bf16::from_f32((i as f32).cos())).collect();
        let (mut expected, mut squares) = (found.clone(), ExactSum::default());
        let part = |rank: usize| &all[rank * length..(rank + 1) * length];
        sum_parts(pool, ranks, part, &mut found, add, Some(&mut squares));
        sum_ranks(pool, all, &mut expected, add);
        assert!(found == expected, "{ranks} ranks, {length} elements, add {add}, rounded");
        let mut sums = vec![0.0; length.div_ceil(BLOCK)];
        block_squares(pool, &expected, &mut sums);
        let mut all_squares = ExactSum::default();
        for sum in sums {
            all_squares.add(sum);
        }
        assert_eq!(squares, all_squares, "{ranks} ranks, {length} elements, add {add}, rounded");
    }

    #[test]
    #[should_panic(expected = "`part` has 2 elements; the sizes given need 3")]
    fn a_part_of_the_wrong_length_is_named_in_the_panic() {
        sum_parts(&Pool::new(1), 1, |_| &[1.0f32, 2.0], &mut [0.0f32; 3], false, None);
    }
}
