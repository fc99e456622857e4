//! Random numbers by counter: a number is a pure function of what it is for, so it does not depend on order, threads or
//! ranks, and a recomputed one is the same.

use std::f64::consts::TAU;

use zeroth_base::philox4x32;

use super::cut::Chunks;
use super::element::Element;
use super::pool::Pool;

/// Elements that one task fills; a multiple of 4.
const PIECE: usize = 4096;

/// The two halves of a number, low first.
pub(super) const fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// A name as a number (FNV-1a, 64 bits).
pub const fn name_key(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    hash
}

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

/// Box and Muller's transform of the element's own two words.
fn normal_at(seed: u64, name: u64, element: u64) -> f64 {
    let ([low, high], [name_low, name_high]) = (halves(element / 2), halves(name));
    let words = philox4x32([low, high, name_low, name_high], halves(seed));
    let (a, b) = if element.is_multiple_of(2) { (words[0], words[1]) } else { (words[2], words[3]) };
    // In (0, 1]: the logarithm of 0 is never taken.
    let uniform = (f64::from(a) + 1.0) / 4_294_967_296.0;
    (-2.0 * uniform.ln()).sqrt() * (TAU * f64::from(b) / 4_294_967_296.0).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hash_as_fnv_1a_documents() {
        assert_eq!(name_key(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(name_key("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(name_key("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn normal_numbers_have_the_moments_of_the_normal_distribution() {
        let mut numbers = vec![0.0f32; 200_000];
        normal(&Pool::new(2), 42, name_key("lm_head.weight"), 0, 1.0, &mut numbers);
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
