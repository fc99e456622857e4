//! AVX-512 helpers shared by the AMX kernels: exp2, bf16 conversion, masks and prefetches.
#![allow(unsafe_code, reason = "converts between vector types")]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtne2ps_pbh, _mm512_fmadd_ps, _mm512_max_ps, _mm512_set1_ps, _mm512_slli_epi32, _mm512_sub_ps,
};

use super::gemm::prefetch_write;
use super::math::{EXP2_COEFFICIENTS, ROUND_MAGIC};

/// [`crate::math::exp2`] of 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp2(x: __m512) -> __m512 {
    exp2_with(x, &EXP2_COEFFICIENTS)
}

/// 2^x of 16 elements up to 126, from the coefficients of (2^t - 1) / t for |t| ≤ 1/2, highest order first. Below -126 the
/// result is 2^-126.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp2_with<const N: usize>(x: __m512, coefficients: &[f32; N]) -> __m512 {
    let round = _mm512_set1_ps(ROUND_MAGIC);
    // vmaxps returns its second operand if either is NaN.
    let clamped = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let shifted = _mm512_add_ps(clamped, round);
    let t = _mm512_sub_ps(clamped, _mm512_sub_ps(shifted, round));
    let mut p = _mm512_set1_ps(coefficients[0]);
    for &coefficient in &coefficients[1..] {
        p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(coefficient));
    }
    let value = _mm512_castps_si512(_mm512_fmadd_ps(p, t, _mm512_set1_ps(1.0)));
    _mm512_castsi512_ps(_mm512_add_epi32(value, _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted))))
}

/// A mask with bits `from` to `to` (exclusive) of 32 set.
#[inline]
pub(super) fn bit_range(from: usize, to: usize) -> u32 {
    let below = |count: usize| if count >= 32 { u32::MAX } else { (1 << count) - 1 };
    below(to) & !below(from)
}

/// Prefetches a row for writing. The hardware prefetcher does not follow rows with a large stride.
#[inline]
pub(super) fn prefetch_write_row<T>(row: &[T]) {
    for line in row.chunks(64 / size_of::<T>()) {
        prefetch_write(line.as_ptr().cast());
    }
}

/// Rounds 32 elements to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn to_bf16(halves: [__m512; 2]) -> __m512i {
    // SAFETY: both types are 512 bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(halves[1], halves[0])) }
}

/// The source column of column `column` after two rows of 32 bf16 were interleaved with `unpacklo` and `unpackhi`, which
/// work on 128-bit lanes. Kernels keep this order, because undoing it would take two more shuffles per row.
pub(super) const fn unpack_order(column: usize) -> usize {
    let (half, at) = (column / 16, column % 16);
    at / 4 * 8 + half * 4 + at % 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, math};

    #[test]
    fn exp2_has_the_bits_of_the_scalar_version() {
        #[target_feature(enable = "avx512f")]
        fn each(x: [f32; 16]) -> [f32; 16] {
            // SAFETY: both are 16 f32.
            unsafe { std::mem::transmute(exp2(std::mem::transmute::<[f32; 16], __m512>(x))) }
        }
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        for first in (-1400..200).step_by(16) {
            let x = std::array::from_fn(|lane| (first + lane as i32) as f32 * 0.1);
            // SAFETY: AMX implies AVX-512.
            let found = unsafe { each(x) };
            assert_eq!(found.map(f32::to_bits), x.map(|x| math::exp2::<true>(x).to_bits()));
        }
        // SAFETY: as above.
        assert!(unsafe { each([f32::NAN; 16]) }.iter().all(|value| value.is_nan()));
    }

    #[test]
    fn bit_range_sets_the_bits_in_range() {
        assert_eq!(
            [bit_range(0, 32), bit_range(0, 40), bit_range(3, 5), bit_range(5, 5), bit_range(40, 50)],
            [u32::MAX, u32::MAX, 24, 0, 0]
        );
    }
}
