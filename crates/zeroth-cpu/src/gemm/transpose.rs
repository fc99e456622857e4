//! In-register transposes of 16 × 16 elements of 32 bits.
#![allow(unsafe_code, reason = "vector loads take pointers")]

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_castsi128_si512, _mm512_inserti32x4, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

/// [`transpose`] of 16 rows in memory, `stride` bytes apart. Quarter rows are inserted into their lane as they are loaded,
/// which halves the shuffles: there is one shuffle port, and two load ports.
///
/// # Safety
/// 64 bytes can be read at each of 16 addresses, `stride` bytes apart from `start`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn transpose_from(start: *const u8, stride: usize) -> [__m512i; 16] {
    let mut out = [_mm512_setzero_si512(); 16];
    for group in 0..4 {
        // Elements 4 · group to 4 · group + 3 of rows i, i + 4, i + 8 and i + 12.
        let quarters = |i: usize| {
            // SAFETY: the caller's promise.
            let quarter =
                |row: usize| unsafe { _mm_loadu_si128(start.add(row * stride + 16 * group).cast()) };
            let rows = _mm512_castsi128_si512(quarter(i));
            let rows = _mm512_inserti32x4::<1>(rows, quarter(i + 4));
            let rows = _mm512_inserti32x4::<2>(rows, quarter(i + 8));
            _mm512_inserti32x4::<3>(rows, quarter(i + 12))
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

/// Element j of result i is element i of row j.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Within each 128-bit lane, register 4g + c holds column c of rows 4g to 4g + 3.
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
