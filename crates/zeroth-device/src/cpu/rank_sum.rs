//! The sum of what ranks hold, read where they hold it: one pass over every source, one over the result.
//!
//! [`super::sum_ranks`] is the same sum over parts that lie end to end, and what this one is compared with.

use super::check_len;
use super::cut::Chunks;
use super::element::Element;
use super::path::each_path;
use super::pool::Pool;
use super::stream::{self, STAGE, staged};

/// Elements that one task sums.
const PIECE: usize = 16_384;

/// to = the sum over ranks of `part(rank)`, added in f32 in their order; with `add` the sum is added to what `to` holds.
pub fn sum_parts<'a, A: Element>(
    pool: &Pool,
    ranks: usize,
    part: impl Fn(usize) -> &'a [A] + Sync,
    to: &mut [f32],
    add: bool,
) {
    (0..ranks).for_each(|rank| check_len("part", part(rank).len(), to.len()));
    // What is added to has been read, and lies in the cache.
    let past = !add && stream::worth(size_of_val(to));
    pool.each(Chunks::new(to, PIECE), |task, to| {
        let range = task * PIECE..task * PIECE + to.len();
        let of = |rank: usize| &part(rank)[range.clone()];
        match (ranks, add) {
            (0, false) => to.fill(0.0),
            (0, true) => {}
            (1, false) => first(pool.path(), of(0), to, past),
            // Two in one loop: the sum of the first is not stored and read again.
            (_, false) => two(pool.path(), of(0), of(1), to, past && ranks == 2),
            (1, true) => more(pool.path(), of(0), to),
            (2, true) => two_more(pool.path(), of(0), of(1), to),
            (_, true) => {
                let mut sums = [0.0; STAGE];
                for (piece, to) in to.chunks_mut(STAGE).enumerate() {
                    let (sums, range) = (&mut sums[..to.len()], piece * STAGE..piece * STAGE + to.len());
                    two(pool.path(), &of(0)[range.clone()], &of(1)[range.clone()], sums, false);
                    (2..ranks).for_each(|rank| more(pool.path(), &of(rank)[range.clone()], sums));
                    to.iter_mut().zip(sums).for_each(|(to, sum)| *to += *sum);
                }
            }
        }
        if !add {
            // A piece is small enough to be found in the cache by every rank's turn.
            (2..ranks).for_each(|rank| more(pool.path(), of(rank), to));
        }
    });
}

each_path! {
    fn first<A>(one: &[A], to: &mut [f32], past: bool) {
        staged(to, past, |at, to| {
            stream::ask_ahead(one, at, to.len());
            for (to, one) in to.iter_mut().zip(&one[at..]) {
                *to = one.to_f32();
            }
        });
    }
}

each_path! {
    fn two<A>(one: &[A], two: &[A], to: &mut [f32], past: bool) {
        staged(to, past, |at, to| {
            stream::ask_ahead(one, at, to.len());
            stream::ask_ahead(two, at, to.len());
            for ((to, one), two) in to.iter_mut().zip(&one[at..]).zip(&two[at..]) {
                *to = one.to_f32() + two.to_f32();
            }
        });
    }
}

each_path! {
    fn more<A>(one: &[A], to: &mut [f32]) {
        for (to, one) in to.iter_mut().zip(one) {
            *to += one.to_f32();
        }
    }
}

each_path! {
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
    use crate::cpu::sum_ranks;

    #[test]
    fn parts_apart_sum_to_the_same_bits_as_parts_end_to_end() {
        let pool = Pool::new(3);
        for length in [0, 1, 255, 40_000, (1 << 20) + 77] {
            for ranks in 1..=4 {
                let value = |i: usize| bf16::from_f32((i as f32 * 0.37).sin() * 1e3);
                let all: Vec<bf16> = (0..ranks * length).map(value).collect();
                let part = |rank: usize| &all[rank * length..(rank + 1) * length];
                for add in [false, true] {
                    let start: Vec<f32> = (0..length).map(|i| (i as f32).cos()).collect();
                    let (mut found, mut expected) = (start.clone(), start);
                    sum_parts(&pool, ranks, part, &mut found, add);
                    sum_ranks(&pool, &all, &mut expected, add);
                    let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{ranks} ranks, {length} elements, add {add}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "`part` has 2 elements; the sizes given need 3")]
    fn a_part_of_the_wrong_length_is_named() {
        sum_parts(&Pool::new(1), 1, |_| &[1.0f32, 2.0], &mut [0.0; 3], false);
    }
}
