//! The identity of a frozen base model: a hash of its weights that does not depend on who reads which part of them.
//!
//! It is a sum of one hash per element, so ranks add up what each of them loads, at any stage and on any number of ranks,
//! and the base is read once. An element's hash is a bijection of its bits, so that a single changed element always changes
//! the sum.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use rayon::prelude::*;
use sha2::{Digest as _, Sha256};

/// Elements hashed per task.
const AT_ONCE: usize = 1 << 14;
/// Odd constants, so that multiplying by them loses no bit: 2^64 over the golden ratio, and splitmix64's.
const OF_PLACES: u64 = 0x9e37_79b9_7f4a_7c15;
const OF_BITS: u64 = 0xbf58_476d_1ce4_e5b9;
const OF_MIX: u64 = 0x94d0_49bb_1331_11eb;

/// The hash of some elements; those of several sets of elements add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BaseHash {
    sum: u64,
    elements: u64,
}

impl BaseHash {
    /// Adds elements of the parameter with this [`name_key`], the first of which is element `first`.
    pub(crate) fn add(&mut self, key: u64, first: u64, elements: &[f32]) {
        let part = |(part, values): (usize, &[f32])| {
            let first = first + (part * AT_ONCE) as u64;
            let hashes =
                values.iter().zip(first..).map(|(value, place)| of_element(key, place, value.to_bits()));
            hashes.fold(0_u64, u64::wrapping_add)
        };
        let sum = elements.par_chunks(AT_ONCE).enumerate().map(part).reduce(|| 0, u64::wrapping_add);
        *self = self.and(Self { sum, elements: elements.len() as u64 });
    }

    /// The hash of the elements of both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { sum: self.sum.wrapping_add(other.sum), elements: self.elements + other.elements }
    }

    /// Elements hashed.
    pub(crate) fn elements(self) -> u64 {
        self.elements
    }

    /// In the format of manifests.
    pub(crate) fn text(self) -> String {
        format!("{:016x}", self.sum)
    }
}

fn of_element(key: u64, place: u64, bits: u32) -> u64 {
    let input = key.wrapping_add(place.wrapping_mul(OF_PLACES)) ^ u64::from(bits).wrapping_mul(OF_BITS);
    // splitmix64's finaliser, a bijection.
    let mixed = (input ^ (input >> 30)).wrapping_mul(OF_BITS);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(OF_MIX);
    mixed ^ (mixed >> 31)
}

/// The part of a parameter's name in the hashes of its elements.
pub(crate) fn name_key(name: &str) -> u64 {
    let digest = Sha256::digest(name.as_bytes());
    u64::from_le_bytes(*digest.first_chunk().expect("SHA-256 has 32 bytes"))
}

/// The parts of a range that are in `owned`, ranges in any order.
pub(crate) fn overlaps<'a>(
    range: &'a Range<u64>,
    owned: &'a [Range<u64>],
) -> impl Iterator<Item = Range<u64>> + 'a {
    let overlap = |own: &Range<u64>| range.start.max(own.start)..range.end.min(own.end);
    owned.iter().map(overlap).filter(|part| part.start < part.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|place| (place as f32 * 0.37).sin()).collect()
    }

    fn hash_of(parts: &[[usize; 2]], values: &[f32]) -> BaseHash {
        let mut hash = BaseHash::default();
        for [start, end] in parts {
            hash.add(name_key("w"), *start as u64, &values[*start..*end]);
        }
        hash
    }

    #[test]
    fn the_sum_does_not_depend_on_the_parts() {
        let values = values(3 * AT_ONCE + 5);
        let whole = hash_of(&[[0, values.len()]], &values);
        assert_eq!(hash_of(&[[7, 40_000], [0, 7], [40_000, values.len()]], &values), whole);
        assert_eq!(whole.elements(), values.len() as u64);
        assert_eq!(whole.text().len(), 16);
    }

    #[test]
    fn values_places_and_names_count() {
        let values = values(1000);
        let whole = hash_of(&[[0, 1000]], &values);
        let mut other = values.clone();
        other[999] = f32::from_bits(other[999].to_bits() ^ 1);
        assert_ne!(hash_of(&[[0, 1000]], &other), whole);
        let mut swapped = values.clone();
        swapped.swap(3, 4);
        assert_ne!(hash_of(&[[0, 1000]], &swapped), whole);
        let mut renamed = BaseHash::default();
        renamed.add(name_key("v"), 0, &values);
        assert_ne!(renamed, whole);
        // Signs of zeros are part of the weights' bits.
        let mut zeros = [BaseHash::default(); 2];
        zeros[0].add(1, 0, &[0.0]);
        zeros[1].add(1, 0, &[-0.0]);
        assert_ne!(zeros[0], zeros[1]);
    }

    #[test]
    fn overlaps_are_the_common_parts() {
        let found: Vec<Range<u64>> = overlaps(&(10..20), &[0..12, 15..16, 18..40, 20..30]).collect();
        assert_eq!(found, [10..12, 15..16, 18..20]);
    }
}
