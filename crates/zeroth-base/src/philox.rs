//! Counter-based random numbers: stateless, so that any rank generates any part independently.
//!
//! Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). The tests use the
//! known answers of the authors' Random123 library.

use std::f64::consts::TAU;

/// The multipliers of the first and third words of a counter.
pub const PHILOX_MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the words of the key after each round: the golden ratio and √3 - 1, as fractions of 2^32.
pub const PHILOX_WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words of a counter and a key. Distinct counters under one key give distinct words.
#[inline]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (high0, low0) = halves_of_product(PHILOX_MULTIPLIERS[0], counter[0]);
        let (high1, low1) = halves_of_product(PHILOX_MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(PHILOX_WEYL[0]), key[1].wrapping_add(PHILOX_WEYL[1])];
    }
    counter
}

/// [`philox4x32`] of N counters with one key: element i of each word belongs to counter i. The compiler vectorizes the loop over
/// counters where the caller's instruction set allows it.
#[inline(always)]
#[allow(clippy::inline_always, reason = "it is compiled with the target features of its caller")]
pub fn philox4x32_lanes<const N: usize>(mut counters: [[u32; N]; 4], mut key: [u32; 2]) -> [[u32; N]; 4] {
    for _ in 0..10 {
        let mut next = [[0; N]; 4];
        for lane in 0..N {
            let (high0, low0) = halves_of_product(PHILOX_MULTIPLIERS[0], counters[0][lane]);
            let (high1, low1) = halves_of_product(PHILOX_MULTIPLIERS[1], counters[2][lane]);
            next[0][lane] = high1 ^ counters[1][lane] ^ key[0];
            next[1][lane] = low1;
            next[2][lane] = high0 ^ counters[3][lane] ^ key[1];
            next[3][lane] = low0;
        }
        counters = next;
        key = [key[0].wrapping_add(PHILOX_WEYL[0]), key[1].wrapping_add(PHILOX_WEYL[1])];
    }
    counters
}

/// The two halves of a number, low first.
pub const fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// The 64-bit FNV-1a hash of a name.
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

/// The normal number of an element, by the Box-Muller transform of its own two words.
pub fn normal_at(seed: u64, name: u64, element: u64) -> f64 {
    let ([low, high], [name_low, name_high]) = (halves(element / 2), halves(name));
    let words = philox4x32([low, high, name_low, name_high], halves(seed));
    let (a, b) = if element.is_multiple_of(2) { (words[0], words[1]) } else { (words[2], words[3]) };
    // In (0, 1]: the logarithm of 0 is never taken.
    let uniform = (f64::from(a) + 1.0) / 4_294_967_296.0;
    (-2.0 * uniform.ln()).sqrt() * (TAU * f64::from(b) / 4_294_967_296.0).cos()
}

#[inline]
fn halves_of_product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_match_random123() {
        let answers = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in answers {
            assert_eq!(philox4x32(counter, key), words, "counter {counter:x?}, key {key:x?}");
            let lanes = philox4x32_lanes(counter.map(|word| [0, word, 1]), key);
            assert_eq!(lanes.map(|word| word[1]), words, "counter {counter:x?}, key {key:x?}");
        }
    }

    #[test]
    fn name_keys_match_published_fnv_1a_hashes() {
        assert_eq!(name_key(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(name_key("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(name_key("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn every_word_of_counter_and_key_changes_the_output() {
        let (counter, key) = ([1, 2, 3, 4], [5, 6]);
        let mut seen = vec![philox4x32(counter, key)];
        for word in 0..4 {
            let mut other = counter;
            other[word] ^= 1 << 31;
            seen.push(philox4x32(other, key));
        }
        for word in 0..2 {
            let mut other = key;
            other[word] ^= 1 << 31;
            seen.push(philox4x32(counter, other));
        }
        for (index, words) in seen.iter().enumerate() {
            assert!(!seen[..index].contains(words), "{index}");
        }
    }
}
