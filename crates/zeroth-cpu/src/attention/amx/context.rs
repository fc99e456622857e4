//! What tiles of 32 keys by 32 queries read besides scores: biases by distance, and the random bits of dropout.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _mm512_add_epi32, _mm512_and_si512, _mm512_cmpge_epu32_mask, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_blend_epi32, _mm512_maskz_mul_ps, _mm512_mul_epu32,
    _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi64, _mm512_srli_epi32,
    _mm512_srli_epi64, _mm512_storeu_si512, _mm512_xor_si512,
};
use std::f32::consts::LOG2_E;
use std::ops::Range;

use zeroth_base::{PHILOX_MULTIPLIERS, PHILOX_WEYL, halves};

use super::super::blocking::{PANEL, bias_table};
use super::super::dropout::HeadDropout;
use super::LANES;

/// Biases that a tile reads: one for each distance between 32 keys and 32 queries.
const TILE_DISTANCES: usize = 2 * PANEL - 1;

/// The biases of a head as exponents of 2, by the query's position less the key's. The outermost are repeated, so that every tile
/// reads a contiguous part.
pub(super) struct TileBiases<'a> {
    table: &'a mut [f32],
    most: usize,
}

impl<'a> TileBiases<'a> {
    /// An empty table in `scratch` for distances of at most `most`.
    pub(super) fn new(scratch: &'a mut [f32], most: usize) -> Self {
        Self { table: &mut scratch[..bias_table(most)], most }
    }

    /// Takes the biases of a head.
    pub(super) fn fill(&mut self, bias: &[f32]) {
        let reach = self.table.len() / 2;
        for (at, to) in self.table.iter_mut().enumerate() {
            *to = bias[(self.most + reach).saturating_sub(at).min(2 * self.most)] * LOG2_E;
        }
    }

    /// The biases of a tile, of which row r and lane l have element 31 - r + l. `query` and `key` are the positions of its first.
    pub(super) fn tile(&self, query: usize, key: usize) -> &[f32; TILE_DISTANCES] {
        // Tiles farther away read the outermost biases only.
        let middle = self.most + PANEL - 1;
        let start = (query + middle).saturating_sub(key).min(2 * middle);
        self.table[start..].first_chunk().expect("the table reaches as far")
    }
}

/// What the random bits of 32 queries follow from: the two words of the key, then the last three of the counter.
#[derive(Clone, Copy)]
pub(super) struct QueryKeys([[u32; PANEL]; 5]);

impl QueryKeys {
    /// Those of no token.
    pub(super) const NONE: Self = Self([[0; PANEL]; 5]);

    /// Those of at most 32 rows of q; further lanes are those of no token.
    pub(super) fn new(dropout: &HeadDropout<'_>, rows: Range<usize>) -> Self {
        let [mut epochs, ops, mut lows, mut highs, mut positions] =
            [0, dropout.op(), 0, 0, 0].map(|word| [word; PANEL]);
        for (lane, key) in dropout.keys(rows).iter().enumerate() {
            [lows[lane], highs[lane]] = halves(key.sample);
            (epochs[lane], positions[lane]) = (key.epoch, key.position);
        }
        let seed = dropout.seed().map(|half| [half; PANEL]);
        // SAFETY: AMX implies AVX-512.
        let own = unsafe { philox([&epochs, &ops, &lows, &highs], [&seed[0], &seed[1]]) };
        Self([own[0], own[1], positions, own[2], own[3].map(|word| word ^ dropout.head())])
    }
}

/// The dropout of a tile.
pub(super) struct TileDropout {
    /// Random bits of keys 2i and 2i + 1 in the low and the high half of each query's word.
    bits: [[u32; PANEL]; PANEL / 2],
    threshold: u32,
    scale: f32,
}

impl TileDropout {
    /// That of the keys from position `key` on, a multiple of 32.
    pub(super) fn new(dropout: &HeadDropout<'_>, queries: &QueryKeys, key: usize) -> Self {
        let mut bits = [[0; PANEL]; PANEL / 2];
        let [key_low, key_high, position, third, fourth] = &queries.0;
        for counter in 0..4 {
            let first = [(key / PANEL * 4 + counter) as u32; PANEL];
            // SAFETY: AMX implies AVX-512.
            let words = unsafe { philox([&first, position, third, fourth], [key_low, key_high]) };
            for (word, values) in words.into_iter().enumerate() {
                bits[4 * word + counter] = values;
            }
        }
        Self { bits, threshold: dropout.threshold(), scale: dropout.scale() }
    }

    /// The values of key `key` and 16 queries, dropped or scaled.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn apply(&self, key: usize, half: usize, values: __m512) -> __m512 {
        let words = &self.bits[key / 2][half * LANES..][..LANES];
        // SAFETY: there are 16 words.
        let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
        let bits = if key.is_multiple_of(2) {
            _mm512_and_si512(words, _mm512_set1_epi32(0xffff))
        } else {
            _mm512_srli_epi32::<16>(words)
        };
        let kept: __mmask16 = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(self.threshold as i32));
        _mm512_maskz_mul_ps(kept, values, _mm512_set1_ps(self.scale))
    }
}

/// What a tile reads besides scores.
pub(super) struct TileContext<'a> {
    pub(super) bias: Option<&'a [f32; TILE_DISTANCES]>,
    pub(super) dropout: Option<&'a TileDropout>,
}

impl TileContext<'_> {
    /// The scores of a key and 16 queries as exponents of 2, with their biases.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn exponents(&self, key: usize, half: usize, scores: __m512, scale: __m512) -> __m512 {
        let Some(bias) = self.bias else { return _mm512_mul_ps(scores, scale) };
        let bias = &bias[PANEL - 1 - key + half * LANES..][..LANES];
        // SAFETY: there are 16 biases.
        _mm512_fmadd_ps(scores, scale, unsafe { _mm512_loadu_ps(bias.as_ptr()) })
    }
}

/// [`zeroth_base::philox4x32`] of 32 counters, each with its own key.
#[target_feature(enable = "avx512f")]
fn philox(counters: [&[u32; PANEL]; 4], key: [&[u32; PANEL]; 2]) -> [[u32; PANEL]; 4] {
    let mut words = [[0; PANEL]; 4];
    for half in [0, LANES] {
        // SAFETY: 16 elements from `half` on are within 32.
        let load = |from: &[u32; PANEL]| unsafe { _mm512_loadu_si512(from.as_ptr().add(half).cast()) };
        let (mut counter, mut key) = (counters.map(load), key.map(load));
        for _ in 0..10 {
            let (high0, low0) = multiply(counter[0], PHILOX_MULTIPLIERS[0]);
            let (high1, low1) = multiply(counter[2], PHILOX_MULTIPLIERS[1]);
            let mix = |high, word, key| _mm512_xor_si512(_mm512_xor_si512(high, word), key);
            counter = [mix(high1, counter[1], key[0]), low1, mix(high0, counter[3], key[1]), low0];
            for (key, weyl) in key.iter_mut().zip(PHILOX_WEYL) {
                *key = _mm512_add_epi32(*key, _mm512_set1_epi32(weyl as i32));
            }
        }
        for (word, counter) in words.iter_mut().zip(counter) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(word.as_mut_ptr().add(half).cast(), counter) };
        }
    }
    words
}

/// The high and low halves of 16 products.
#[inline]
#[target_feature(enable = "avx512f")]
fn multiply(a: __m512i, b: u32) -> (__m512i, __m512i) {
    const ODD: __mmask16 = 0xaaaa;
    let b = _mm512_set1_epi32(b as i32);
    let even = _mm512_mul_epu32(a, b);
    let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(a), b);
    let high = _mm512_mask_blend_epi32(ODD, _mm512_srli_epi64::<32>(even), odd);
    (high, _mm512_mask_blend_epi32(ODD, even, _mm512_slli_epi64::<32>(odd)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn every_lane_has_the_words_of_its_counter_and_key() {
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        let of = |word: u32| std::array::from_fn(|lane| (word + lane as u32).wrapping_mul(0x9e37_79b9));
        let (counters, key) = ([1, 101, 201, 301].map(of), [401, 501].map(of));
        // SAFETY: AMX implies AVX-512.
        let found = unsafe { philox(counters.each_ref(), key.each_ref()) };
        for lane in 0..PANEL {
            let expected =
                zeroth_base::philox4x32(counters.map(|word| word[lane]), key.map(|word| word[lane]));
            assert_eq!(found.map(|word| word[lane]), expected, "lane {lane}");
        }
    }

    #[test]
    fn a_tile_has_the_biases_of_its_distances() {
        for most in [0, 3, 40] {
            let bias: Vec<f32> = (0..=2 * most).map(|at| at as f32).collect();
            let mut table = vec![0.0; bias_table(most)];
            let mut biases = TileBiases::new(&mut table, most);
            biases.fill(&bias);
            for (query, key) in [(0, 0), (0, 64), (96, 32), (7, 32), (1000, 32), (5, 992)] {
                let tile = biases.tile(query, key);
                for row in 0..PANEL {
                    for lane in 0..PANEL {
                        let at = (key + row + most).saturating_sub(query + lane).min(2 * most);
                        assert_eq!(tile[PANEL - 1 - row + lane], bias[at] * LOG2_E, "{most}, {query}, {key}");
                    }
                }
            }
        }
    }
}
