//! 16 by 16 numbers of 32 bits turned over in registers.
#![allow(unsafe_code, reason = "vector loads take pointers")]

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_castsi128_si512, _mm512_inserti32x4, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

/// As [`transpose`] of 16 lines in memory, `stride` bytes apart. Quarters of lines go to their lane as they are loaded,
/// which leaves half of the shuffles; there is one unit for these, and two for loads.
///
/// # Safety
/// 64 bytes can be read at `start` and at every `stride` bytes of the 15 after it.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn transpose_from(start: *const u8, stride: usize) -> [__m512i; 16] {
    let mut out = [_mm512_setzero_si512(); 16];
    for group in 0..4 {
        // Numbers 4 · group to 4 · group + 3 of lines i, i + 4, i + 8 and i + 12.
        let quarters = |i: usize| {
            // SAFETY: the caller's promise.
            let quarter =
                |line: usize| unsafe { _mm_loadu_si128(start.add(line * stride + 16 * group).cast()) };
            let lines = _mm512_castsi128_si512(quarter(i));
            let lines = _mm512_inserti32x4::<1>(lines, quarter(i + 4));
            let lines = _mm512_inserti32x4::<2>(lines, quarter(i + 8));
            _mm512_inserti32x4::<3>(lines, quarter(i + 12))
        };
        let (a, b, c, d) = (quarters(0), quarters(1), quarters(2), quarters(3));
        let (left, right) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        out[4 * group] = _mm512_unpacklo_epi64(left, right);
        out[4 * group + 1] = _mm512_unpackhi_epi64(left, right);
        let (left, right) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        out[4 * group + 2] = _mm512_unpacklo_epi64(left, right);
        out[4 * group + 3] = _mm512_unpackhi_epi64(left, right);
    }
    out
}

/// Element j of result i is element i of line j.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(lines: [__m512i; 16]) -> [__m512i; 16] {
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
