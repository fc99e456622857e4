//! The sum of two ranks' bf16 with its squares, in one loop: in three, one after the other, arithmetic takes as long as
//! memory.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm256_storeu_si256, _mm512_add_ps, _mm512_castps512_ps256,
    _mm512_cvtepi32_epi16, _mm512_cvtps_pd, _mm512_extractf32x8_ps, _mm512_fmadd_pd, _mm512_loadu_pd,
    _mm512_storeu_pd, _mm512_storeu_ps, _mm512_stream_ps,
};

use crate::lines::{AHEAD, LANES, load, nearest, widened};
use crate::norm::{SQUARES, fold};
use zeroth_kernel::BLOCK;

/// to = one + two, past the caches where `past` says so; the sum of squares of a block of `to`, in the tree of
/// [`crate::norm`].
pub(super) fn sum_block(one: &[u16], two: &[u16], to: &mut [f32; BLOCK], past: bool) -> f64 {
    assert!(one.len() >= BLOCK && two.len() >= BLOCK);
    // Stores past the caches are of whole lines.
    let past = past && to.as_ptr().addr().is_multiple_of(64);
    // SAFETY: the path has the instructions, as `fit` has asked; lengths were checked.
    unsafe {
        if past {
            run::<true>(one.as_ptr(), two.as_ptr(), to)
        } else {
            run::<false>(one.as_ptr(), two.as_ptr(), to)
        }
    }
}

/// As [`sum_block`], to = one + two, rounded to bf16, and the sum of squares of that.
pub(super) fn rounded_block(one: &[u16], two: &[u16], to: &mut [u16; BLOCK]) -> f64 {
    assert!(one.len() >= BLOCK && two.len() >= BLOCK);
    // SAFETY: as above.
    unsafe { run_rounded(one.as_ptr(), two.as_ptr(), to) }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
unsafe fn run_rounded(one: *const u16, two: *const u16, to: &mut [u16; BLOCK]) -> f64 {
    let mut squares = [0.0; SQUARES];
    // SAFETY: the caller has a block in each; hints may have any address.
    unsafe {
        for at in (0..BLOCK).step_by(2 * LANES) {
            _mm_prefetch::<_MM_HINT_T0>(one.wrapping_add(at + AHEAD).cast());
            _mm_prefetch::<_MM_HINT_T0>(two.wrapping_add(at + AHEAD).cast());
            for at in [at, at + LANES] {
                let sum = nearest(_mm512_add_ps(load(one.add(at)), load(two.add(at))));
                _mm256_storeu_si256(to.as_mut_ptr().add(at).cast(), _mm512_cvtepi32_epi16(sum));
                count(widened(sum), squares.as_mut_ptr().add(at % SQUARES));
            }
        }
    }
    fold(squares)
}

#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn run<const PAST: bool>(one: *const u16, two: *const u16, to: &mut [f32; BLOCK]) -> f64 {
    let mut squares = [0.0; SQUARES];
    // SAFETY: the caller has a block in each; hints may have any address.
    unsafe {
        for at in (0..BLOCK).step_by(2 * LANES) {
            _mm_prefetch::<_MM_HINT_T0>(one.wrapping_add(at + AHEAD).cast());
            _mm_prefetch::<_MM_HINT_T0>(two.wrapping_add(at + AHEAD).cast());
            for at in [at, at + LANES] {
                let sum = _mm512_add_ps(load(one.add(at)), load(two.add(at)));
                let to = to.as_mut_ptr().add(at);
                if PAST {
                    _mm512_stream_ps(to, sum);
                } else {
                    _mm512_storeu_ps(to, sum);
                }
                count(sum, squares.as_mut_ptr().add(at % SQUARES));
            }
        }
    }
    fold(squares)
}

/// Adds the squares of 16 numbers to as many sums.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn count(values: __m512, squares: *mut f64) {
    let halves = [_mm512_castps512_ps256(values), _mm512_extractf32x8_ps::<1>(values)];
    for (half, values) in halves.into_iter().enumerate() {
        let wide = _mm512_cvtps_pd(values);
        // SAFETY: the caller has 16 sums.
        unsafe {
            let squares = squares.add(half * LANES / 2);
            _mm512_storeu_pd(squares, _mm512_fmadd_pd(wide, wide, _mm512_loadu_pd(squares)));
        }
    }
}
