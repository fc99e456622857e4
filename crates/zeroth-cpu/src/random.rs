//! Counter-based random numbers: a number is a pure function of seed, name and index, whatever the order, threads or ranks.

use zeroth_base::normal_at;

use super::pool::Pool;
use super::work_partition::Chunks;
use zeroth_kernel::Element;

/// Elements per task.
const PIECE: usize = 4096;

/// Fills `out` with normal numbers of standard deviation `std`, from element `first` of the stream `name` on.
///
/// Tests and benchmarks use it; zeroth-model initializes weights.
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
    fn numbers_have_the_moments_of_the_normal_distribution() {
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
    fn an_element_does_not_depend_on_the_first_element_filled() {
        let pool = Pool::new(3);
        let mut whole = vec![0.0f32; 9000];
        normal(&pool, 7, 11, 0, 0.02, &mut whole);
        let mut part = vec![0.0f32; 4500];
        normal(&pool, 7, 11, 4097, 0.02, &mut part);
        assert_eq!(part[..], whole[4097..4097 + 4500]);
    }
}
