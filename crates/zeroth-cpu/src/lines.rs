//! Numbers of bf16 in registers of f32: for kernels whose arithmetic, not memory, would be the limit. Rounding is the
//! processor's own, which takes what is below the smallest normal number for 0.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, __m512i, _CMP_UNORD_Q, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps,
    _mm256_add_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_si256, _mm512_add_epi32,
    _mm512_and_si512, _mm512_castps_si512, _mm512_castps512_ps256, _mm512_castsi512_ps,
    _mm512_castsi512_si256, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32, _mm512_extractf32x8_ps,
    _mm512_extracti64x4_epi64, _mm512_mask_or_epi32, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_si512,
};

use zeroth_base::DType;

use super::avx512::to_bf16;
use super::isa::Isa;
use zeroth_kernel::Element;

/// Numbers of a register.
pub(super) const LANES: usize = 16;
/// Numbers ahead of which is asked for what will be read: a page.
pub(super) const AHEAD: usize = 2048;

/// Whether the path has the instructions, and the type is theirs.
pub(super) fn fit<T: Element>(path: Isa) -> bool {
    path == Isa::Amx && T::DTYPE == DType::Bf16
}

/// 16 numbers.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load(from: *const u16) -> __m512 {
    // SAFETY: the caller's promise.
    let narrow = unsafe { _mm256_loadu_si256(from.cast()) };
    widened(_mm512_cvtepu16_epi32(narrow))
}

/// Numbers of bf16, one in the lower half of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn widened(halves: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
}

/// The nearest numbers of bf16, one in the lower half of each lane: the bits of [`Element::from_f32`], also of the smallest.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn nearest(values: __m512) -> __m512i {
    let bits = _mm512_castps_si512(values);
    let upper = _mm512_srli_epi32::<16>(bits);
    let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
    let is_none = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_mask_or_epi32(rounded, is_none, upper, _mm512_set1_epi32(0x40))
}

/// 32 numbers, rounded and read again.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn rounded(values: [__m512; 2]) -> [__m512; 2] {
    let line = to_bf16(values);
    [_mm512_castsi512_si256(line), _mm512_extracti64x4_epi64::<1>(line)]
        .map(|half| widened(_mm512_cvtepu16_epi32(half)))
}

/// Writes 32 numbers.
///
/// # Safety
/// They can be written.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn store(values: [__m512; 2], to: *mut u16) {
    // SAFETY: the caller's promise.
    unsafe { _mm512_storeu_si512(to.cast(), to_bf16(values)) }
}

/// The sum of 16 lanes, in the order of [`super::math`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) fn total(lanes: __m512) -> f32 {
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
