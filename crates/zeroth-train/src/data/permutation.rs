//! A shuffle without a table: each position is computed on its own, so any rank finds any sample without
//! communication.
//!
//! A Feistel network permutes the next power of two; values that fall beyond n are permuted again until they do not
//! (cycle walking), which yields a permutation of n. Round keys come from Philox by (seed, epoch).

use zeroth_base::philox4x32;

/// Enough to shuffle even tiny datasets: all orders of up to 4 samples are equally likely, those of 5 within a tenth.
/// With 8 rounds the orders of 3 samples are measurably biased.
const ROUNDS: usize = 16;
/// Domain separation from dropout and weight initialisation with the same seed.
const PURPOSE: u32 = 0x5348_5546; // "SHUF"

/// A permutation of 0..n.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permutation {
    size: u64,
    /// Width of the low half; `high_mask` masks the high half once shifted down.
    low_bits: u32,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    pub(crate) fn new(size: u64, seed: u64, epoch: u32) -> Self {
        let mut keys = [0; ROUNDS];
        for (index, pair) in keys.chunks_exact_mut(2).enumerate() {
            let words = philox4x32([epoch, index as u32, PURPOSE, 0], [seed as u32, (seed >> 32) as u32]);
            pair[0] = u64::from(words[0]) | u64::from(words[1]) << 32;
            pair[1] = u64::from(words[2]) | u64::from(words[3]) << 32;
        }
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        let low_bits = bits / 2;
        Self { size, low_bits, high_mask: (1 << (bits - low_bits)) - 1, keys }
    }

    /// The image of `place`, which must be below the size.
    pub(crate) fn at(&self, place: u64) -> u64 {
        let mut value = place;
        loop {
            value = self.through(value);
            if value < self.size {
                return value;
            }
        }
    }

    fn through(&self, value: u64) -> u64 {
        let low_mask = (1 << self.low_bits) - 1;
        let (mut high, mut low) = (value >> self.low_bits, value & low_mask);
        // Each half is XORed with a function of the other, so every round is invertible.
        for pair in self.keys.chunks_exact(2) {
            high ^= mixed(low, pair[0]) & self.high_mask;
            low ^= mixed(high, pair[1]) & low_mask;
        }
        high << self.low_bits | low
    }
}

/// Mixes both words: the two halves of their product, XORed.
fn mixed(word: u64, key: u64) -> u64 {
    let product = u128::from(word ^ key) * u128::from(0x9E37_79B9_7F4A_7C15_u64);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_appears_once_at_any_size() {
        for size in (1..300).chain([1023, 1024, 1025, 4095, 4096, 4097, 65_537]) {
            let permutation = Permutation::new(size, 42, 3);
            let mut seen = vec![false; size as usize];
            for place in 0..size {
                let value = permutation.at(place) as usize;
                assert!(!seen[value], "{value} twice of {size}");
                seen[value] = true;
            }
        }
    }

    /// A checkpoint's position is meaningless under another order. The expected values come from an independent
    /// Python implementation of this file's description.
    #[test]
    fn the_order_of_a_seed_is_stable() {
        let order = |size, seed, epoch| -> Vec<u64> {
            let permutation = Permutation::new(size, seed, epoch);
            (0..size).map(|place| permutation.at(place)).collect()
        };
        assert_eq!(order(10, 42, 0), [3, 8, 6, 5, 9, 0, 4, 1, 2, 7]);
        assert_eq!(order(10, 42, 1), [3, 0, 6, 2, 9, 1, 8, 5, 7, 4]);
        assert_eq!(order(7, (1 << 32) + 5, 3), [5, 4, 3, 1, 2, 6, 0]);
    }

    #[test]
    fn the_largest_sizes_stay_within_bounds() {
        for size in [(1 << 32) + 1, 1 << 62] {
            let permutation = Permutation::new(size, 1, 0);
            for place in [0, 1, size / 2, size - 1] {
                assert!(permutation.at(place) < size);
            }
        }
    }

    /// Pearson's chi-squared statistic of `counts` over its degrees of freedom: about 1 for uniform counts.
    fn unevenness(counts: &[u64]) -> f64 {
        let mean = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        counts.iter().map(|&count| (count as f64 - mean).powi(2) / mean).sum::<f64>()
            / (counts.len() - 1) as f64
    }

    #[test]
    fn all_orders_of_few_samples_are_equally_likely() {
        for (size, orders) in [(2, 2), (3, 6), (4, 24), (5, 120)] {
            let mut counts = std::collections::BTreeMap::new();
            for epoch in 0..120_000 {
                let permutation = Permutation::new(size, 7, epoch);
                let order: Vec<u64> = (0..size).map(|place| permutation.at(place)).collect();
                *counts.entry(order).or_insert(0) += 1;
            }
            let counts: Vec<u64> = counts.into_values().collect();
            assert_eq!(counts.len(), orders, "of {size} samples");
            // About 1 for a uniform distribution; 10 would mean a deviation of a tenth with 1,000 counts each.
            let allowed = if size < 5 { 2.0 } else { 5.0 };
            assert!(unevenness(&counts) < allowed, "{size}: {} {counts:?}", unevenness(&counts));
        }
    }

    #[test]
    fn each_sample_is_equally_likely_in_each_decile() {
        for size in [10, 50, 1_000] {
            let epochs = 4_000;
            let mut counts = vec![[0; 10]; size as usize];
            for epoch in 0..epochs {
                let permutation = Permutation::new(size, 42, epoch);
                for place in 0..size {
                    counts[permutation.at(place) as usize][(place * 10 / size) as usize] += 1;
                }
            }
            let all: Vec<f64> = counts.iter().map(|deciles| unevenness(deciles)).collect();
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let worst = all.iter().copied().fold(0.0, f64::max);
            // 9 degrees of freedom: the mean of ours varies by √(2/9/n), and 40/9 is passed once in 130,000.
            assert!((mean - 1.0).abs() < 5.0 * (2.0 / 9.0 / all.len() as f64).sqrt(), "{size}: {mean}");
            assert!(worst < 40.0 / 9.0, "{size}: {worst}");
        }
    }
}
