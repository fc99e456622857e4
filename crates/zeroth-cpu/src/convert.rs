//! Casts, copies, fills, elementwise sums, and sums over ranks of contiguous parts.

use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::Pod;

use super::check_len;
use super::isa::each_isa;
use super::launch::{cpu_kernel, typed};
use super::pool::Pool;
use super::stream::{self, STAGE, staged};
use super::work_partition::Chunks;
use zeroth_kernel::{Element, is_nonfinite};

/// Elements per task.
const PIECE: usize = 16_384;
/// Bytes per task of a copy or fill.
const COPIED: usize = 256 << 10;

/// to = from, rounded to nearest even. NaN stays NaN.
pub fn convert<A: Element, B: Element>(pool: &Pool, from: &[A], to: &mut [B]) {
    check_len("to", to.len(), from.len());
    let past = stream::bypasses_cache(size_of_val(to));
    pool.each(Chunks::new(to, PIECE), |task, to| {
        convert_piece(pool.isa(), &from[task * PIECE..][..to.len()], to, past);
    });
}

each_isa! {
    fn convert_piece<A, B>(from: &[A], to: &mut [B], past: bool) {
        staged(to, past, |at, to| {
            stream::prefetch_next_page(from, at, to.len());
            for (to, from) in to.iter_mut().zip(&from[at..]) {
                *to = B::from_f32(from.to_f32());
            }
        });
    }
}

/// [`convert`]; returns whether a result is infinite or NaN.
pub fn convert_and_check_finite<A: Element, B: Element>(pool: &Pool, from: &[A], to: &mut [B]) -> bool {
    check_len("to", to.len(), from.len());
    // Only ever set, so the order of tasks does not matter.
    let found_inf = AtomicBool::new(false);
    let past = stream::bypasses_cache(size_of_val(to));
    pool.each(Chunks::new(to, PIECE), |task, to| {
        if convert_and_check_piece(pool.isa(), &from[task * PIECE..][..to.len()], to, past) {
            found_inf.store(true, Ordering::Relaxed);
        }
    });
    found_inf.into_inner()
}

each_isa! {
    /// [`convert_and_check_finite`] of one piece, with non-temporal stores where `past`.
    pub(super) fn convert_and_check_piece<A, B>(from: &[A], to: &mut [B], past: bool) -> bool {
        let mut found_inf = false;
        staged(to, past, |at, to| {
            stream::prefetch_next_page(from, at, to.len());
            for (to, from) in to.iter_mut().zip(&from[at..]) {
                *to = B::from_f32(from.to_f32());
                found_inf |= is_nonfinite(*to);
            }
        });
        found_inf
    }
}

/// Whether a value is infinite or NaN.
pub fn check_finite<A: Element>(pool: &Pool, values: &[A]) -> bool {
    let (found_inf, pieces) = (AtomicBool::new(false), values.len().div_ceil(PIECE));
    pool.run(pieces, |task, _| {
        let first = task * PIECE;
        if has_nonfinite(pool.isa(), &values[first..values.len().min(first + PIECE)]) {
            found_inf.store(true, Ordering::Relaxed);
        }
    });
    found_inf.into_inner()
}

each_isa! {
    /// Whether a value is infinite or NaN.
    pub(super) fn has_nonfinite<A>(values: &[A]) -> bool {
        values.iter().fold(false, |found_inf, value| found_inf | is_nonfinite(*value))
    }
}

/// to = from.
pub fn copy<T: Pod + Send + Sync>(pool: &Pool, from: &[T], to: &mut [T]) {
    check_len("to", to.len(), from.len());
    let (past, piece) = (stream::bypasses_cache(size_of_val(to)), COPIED / size_of::<T>().max(1));
    pool.each(Chunks::new(to, piece), |task, to| {
        let from = &from[task * piece..][..to.len()];
        if past {
            stream::copy(pool.isa(), from, to);
            stream::fence();
        } else {
            to.copy_from_slice(from);
        }
    });
}

/// Sets every element of `to` to `value`.
pub fn fill<T: Pod + Send + Sync>(pool: &Pool, value: T, to: &mut [T]) {
    let (past, piece) = (stream::bypasses_cache(size_of_val(to)), COPIED / size_of::<T>().max(1));
    pool.each(Chunks::new(to, piece), |_, to| {
        if past {
            to.chunks_mut(STAGE).for_each(|to| stream::store_non_temporal(&[value; STAGE][..to.len()], to));
            stream::fence();
        } else {
            to.fill(value);
        }
    });
}

/// to = the sum over ranks, added in f32 in rank order and rounded once; with `add` the old value of `to` is added too.
/// `parts` holds one part per rank, each as long as `to`, contiguously.
pub fn sum_ranks<A: Element, B: Element>(pool: &Pool, parts: &[A], to: &mut [B], add: bool) {
    let length = to.len();
    if length == 0 {
        return;
    }
    check_len("parts", parts.len(), parts.len().next_multiple_of(length));
    // With `add` the destination was just read and is in the cache.
    let past = !add && stream::bypasses_cache(size_of_val(to));
    pool.each(Chunks::new(to, PIECE), |task, to| {
        if add {
            add_piece(pool.isa(), parts, length, task * PIECE, to);
        } else {
            sum_piece(pool.isa(), parts, length, task * PIECE, to, past);
        }
    });
}

/// y = a + b, each element rounded once.
pub fn sum<T: Element>(pool: &Pool, a: &[T], b: &[T], y: &mut [T]) {
    check_len("a", a.len(), y.len());
    check_len("b", b.len(), y.len());
    pool.each(Chunks::new(y, PIECE), |task, y| {
        let range = task * PIECE..task * PIECE + y.len();
        super::rms_norm::add(pool.isa(), &a[range.clone()], &b[range], y);
    });
}

/// sums = the ranks' values from `first` on, added in f32 in rank order.
#[inline(always)]
fn sum_values<A: Element>(parts: &[A], length: usize, first: usize, sums: &mut [f32]) {
    let count = sums.len();
    let mut ranks = parts.chunks_exact(length).map(|part| &part[first..][..count]);
    let (one, two) = (ranks.next().unwrap_or(&[]), ranks.next());
    match two {
        None => sums.iter_mut().zip(one).for_each(|(sum, one)| *sum = one.to_f32()),
        // Two ranks in one loop: the first one's values are not stored and loaded again.
        Some(two) => {
            for ((sum, one), two) in sums.iter_mut().zip(one).zip(two) {
                *sum = one.to_f32() + two.to_f32();
            }
        }
    }
    for values in ranks {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += value.to_f32();
        }
    }
}

each_isa! {
    fn sum_piece<A, B>(parts: &[A], length: usize, first: usize, to: &mut [B], past: bool) {
        let mut sums = [0.0f32; STAGE];
        staged(to, past, |at, to| {
            for (piece, to) in to.chunks_mut(STAGE).enumerate() {
                let sums = &mut sums[..to.len()];
                sum_values(parts, length, first + at + piece * STAGE, sums);
                for (to, sum) in to.iter_mut().zip(sums) {
                    *to = B::from_f32(*sum);
                }
            }
        });
    }
}

each_isa! {
    fn add_piece<A, B>(parts: &[A], length: usize, first: usize, to: &mut [B]) {
        let mut sums = [0.0f32; STAGE];
        for (piece, to) in to.chunks_mut(STAGE).enumerate() {
            let sums = &mut sums[..to.len()];
            sum_values(parts, length, first + piece * STAGE, sums);
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = B::from_f32(to.to_f32() + *sum);
            }
        }
    }
}

cpu_kernel!(Sum { a, b, y }, |_| 0, |cx| sum::<T>(cx.pool, cx.read(a)?, cx.read(b)?, cx.write(y)?));

cpu_kernel!(Zero { to }, |_| 0, |cx| fill(cx.pool, 0u8, cx.write(to)?));

cpu_kernel!(Convert { from, from_type, to, to_type, found_inf }, |_| 0, |cx| match found_inf {
    None if from_type == to_type => copy::<u8>(cx.pool, cx.read(from)?, cx.write(to)?),
    None => typed!(from_type, A => typed!(to_type, B => {
        convert::<A, B>(cx.pool, cx.read(from)?, cx.write(to)?);
    })),
    Some(found_inf) => typed!(from_type, A => typed!(to_type, B => {
        let found_inf = cx.write_one::<u64>(found_inf)?;
        if convert_and_check_finite::<A, B>(cx.pool, cx.read(from)?, cx.write(to)?) {
            *found_inf = 1;
        }
    })),
});

cpu_kernel!(CheckFinite { values, value_type, found_inf }, |_| 0, |cx| typed!(value_type, A => {
    if check_finite::<A>(cx.pool, cx.read(values)?) {
        *cx.write_one::<u64>(found_inf)? = 1;
    }
}));

cpu_kernel!(SumRanks { parts, from_type, to, to_type, add }, |_| 0, |cx| {
    typed!(from_type, A => typed!(to_type, B => {
        sum_ranks::<A, B>(cx.pool, cx.read(parts)?, cx.write(to)?, add);
    }));
});

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn copy_and_fill_cover_every_element_over_several_tasks() {
        let pool = Pool::new(3);
        let from: Vec<u32> = (0..40_000).collect();
        let mut to = vec![0; 40_000];
        copy(&pool, &from, &mut to);
        assert_eq!(to, from);
        fill(&pool, 7, &mut to);
        assert!(to.iter().all(|&value| value == 7));
    }

    #[test]
    fn non_temporal_stores_give_the_same_results() {
        let (pool, count) = (Pool::new(2), (4 << 20) + 77);
        let wide: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin() * 1e3).collect();
        let narrow: Vec<bf16> = wide.iter().map(|value| bf16::from_f32(*value)).collect();
        let mut found = vec![bf16::ZERO; count];
        convert(&pool, &wide, &mut found);
        assert!(found == narrow);
        found.fill(bf16::ZERO);
        assert!(!convert_and_check_finite(&pool, &wide, &mut found) && found == narrow);
        found.fill(bf16::ZERO);
        copy(&pool, &narrow, &mut found);
        assert!(found == narrow);
        let mut found_inf = wide;
        found_inf[count - 1] = f32::NAN;
        assert!(convert_and_check_finite(&pool, &found_inf, &mut found) && found[count - 1].is_nan());
        fill(&pool, bf16::ONE, &mut found);
        assert!(found.iter().all(|value| *value == bf16::ONE));
        for ranks in 1..=3 {
            let length = narrow.len() / 3;
            let parts = &narrow[..ranks * length];
            let mut sums = vec![f32::NAN; length];
            sum_ranks(&pool, parts, &mut sums, false);
            let sum = |i: usize| {
                (1..ranks).fold(f32::from(parts[i]), |sum, rank| sum + f32::from(parts[rank * length + i]))
            };
            assert!((0..length).all(|i| sums[i] == sum(i)), "{ranks} ranks");
            sum_ranks(&pool, parts, &mut sums, true);
            assert!((0..length).all(|i| sums[i] == sum(i) + sum(i)), "{ranks} ranks, added");
        }
    }

    #[test]
    #[should_panic(expected = "`to` has 3 elements; the sizes given need 2")]
    fn a_buffer_of_the_wrong_length_is_named_in_the_panic() {
        convert(&Pool::new(1), &[1.0f32, 2.0], &mut [0.0f32; 3]);
    }
}
