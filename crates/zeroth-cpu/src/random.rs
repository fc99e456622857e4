//! Random numbers by counter: a number is a pure function of what it is for, so it does not depend on order, threads or
//! ranks, and a recomputed one is the same.

use zeroth_base::normal_at;

use super::pool::Pool;
use super::work_partition::Chunks;
use zeroth_kernel::Element;

/// Elements that one task fills; a multiple of 4.
const PIECE: usize = 4096;

/// Normal numbers with standard deviation `std`, from element `first` on: the data of checks. A model's new weights are
/// made where its names are known, in zeroth-model.
///
/// Element e of what is called `name` (see [`name_key`]) is the same number whoever fills it.
pub fn normal<T: Element>(pool: &Pool, seed: u64, name: u64, first: u64, std: f32, out: &mut [T]) {
    pool.each(Chunks::new(out, PIECE), |task, out| {
        for (at, out) in out.iter_mut().enumerate() {
            let element = first + (task * PIECE + at) as u64;
            *out = T::from_f32((normal_at(seed, name, element) * f64::from(std)) as f32);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_the_moments_of_the_normal_distribution() {
        let mut numbers = vec![0.0f32; 200_000];
        normal(&Pool::new(2), 42, zeroth_base::name_key("lm_head.weight"), 0, 1.0, &mut numbers);
        let mean = |power: i32| {
            numbers.iter().map(|&x| f64::from(x).powi(power)).sum::<f64>() / numbers.len() as f64
        };
        assert!(mean(1).abs() < 0.01, "{}", mean(1));
        assert!((mean(2) - 1.0).abs() < 0.015, "{}", mean(2));
        assert!(mean(3).abs() < 0.05, "{}", mean(3));
        assert!((mean(4) - 3.0).abs() < 0.1, "{}", mean(4));
    }

    #[test]
    fn an_element_does_not_depend_on_where_the_filling_begins() {
        let pool = Pool::new(3);
        let mut whole = vec![0.0f32; 9000];
        normal(&pool, 7, 11, 0, 0.02, &mut whole);
        let mut part = vec![0.0f32; 4500];
        normal(&pool, 7, 11, 4097, 0.02, &mut part);
        assert_eq!(part[..], whole[4097..4097 + 4500]);
    }
}
