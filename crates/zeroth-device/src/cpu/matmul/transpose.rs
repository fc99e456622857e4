//! 16 by 16 numbers of 32 bits turned over in registers.

use std::arch::x86_64::{
    __m512i, _mm512_shuffle_i32x4, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

/// Element j of result i is element i of line j.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn transpose(lines: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = lines;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
    }
    // Within each quarter of 4 lanes, register 4g + c holds column c of lines 4g to 4g + 3.
    let mut fours = pairs;
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut out = fours;
    for c in 0..4 {
        let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[c], fours[4 + c]);
        let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[c], fours[4 + c]);
        let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[8 + c], fours[12 + c]);
        let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[8 + c], fours[12 + c]);
        out[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_high);
        out[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_high);
        out[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_high);
        out[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_high);
    }
    out
}
