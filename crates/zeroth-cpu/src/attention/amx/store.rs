//! Stores f32 accumulators as bf16 rows, and dot products of bf16 rows.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_mask_storeu_epi16, _mm512_maskz_loadu_epi16,
    _mm512_mul_ps, _mm512_reduce_add_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};

use super::super::blocking::PANEL;
use super::{LANES, TILE_ROW};
use crate::avx512::{bit_range, to_bf16, unpack_order};
use crate::gemm::transpose_from;
use zeroth_kernel::Element;

/// Transposes a panel [padded, 32], multiplied by `factors` per column, into one bf16 row of `width` elements per column. `row`
/// returns the destination of a column, or `None` to skip it.
///
/// # Safety
/// Each pointer that `row` returns is valid for writes of `width` elements.
pub(super) unsafe fn transposed_panel<T: Element>(
    panel: &[f32],
    factors: &[f32; PANEL],
    width: usize,
    mut row: impl FnMut(usize) -> Option<*mut T>,
) {
    assert!(panel.len() >= width.next_multiple_of(PANEL) * PANEL && size_of::<T>() == size_of::<u16>());
    let rows: [Option<*mut i16>; PANEL] =
        std::array::from_fn(|line| row(unpack_order(line)).map(<*mut T>::cast));
    for first in (0..width).step_by(PANEL) {
        // SAFETY: AMX implies AVX-512 and its bf16 conversions; the panel has these 32 rows, and destinations are valid by the
        // caller's promise.
        unsafe { turn(panel[first * PANEL..].as_ptr(), factors, first, bit_range(0, width - first), &rows) }
    }
}

/// Stores the transpose of 32 rows of 32 columns at offset `first` of each row of `to`, which is in [`unpack_order`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn turn(
    rows: *const f32,
    factors: &[f32; PANEL],
    first: usize,
    mask: u32,
    to: &[Option<*mut i16>; PANEL],
) {
    // SAFETY: the caller guarantees 32 rows of 32 elements, and destinations for the elements in the mask.
    unsafe {
        let load = |from: *const f32| _mm512_loadu_ps(from);
        let factors = [load(factors.as_ptr()), load(factors.as_ptr().add(LANES))];
        let line = |row: usize| {
            let row = rows.add(row * PANEL);
            to_bf16([0, 1].map(|half| _mm512_mul_ps(load(row.add(half * LANES)), factors[half])))
        };
        let mut pairs = [[_mm512_setzero_si512(); 2]; LANES];
        for (i, pair) in pairs.iter_mut().enumerate() {
            let (upper, lower) = (line(2 * i), line(2 * i + 1));
            *pair = [_mm512_unpacklo_epi16(upper, lower), _mm512_unpackhi_epi16(upper, lower)];
        }
        for (half, to) in to.chunks_exact(LANES).enumerate() {
            let lines = transpose_from(pairs.as_ptr().cast::<u8>().add(64 * half), 128);
            for (line, to) in lines.into_iter().zip(to) {
                if let Some(to) = to {
                    _mm512_mask_storeu_epi16(to.add(first), mask, line);
                }
            }
        }
    }
}

/// Multiplies a row by a factor and rounds it.
pub(super) fn row<T: Element>(sums: &[f32], factor: f32, out: &mut [T]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn run(sums: *const f32, factor: f32, count: usize, out: *mut i16) {
        let factor = _mm512_set1_ps(factor);
        for first in (0..count).step_by(TILE_ROW) {
            // SAFETY: the caller guarantees whole vectors of `sums`; elements past the end of the row are masked.
            unsafe {
                let half =
                    |half: usize| _mm512_mul_ps(_mm512_loadu_ps(sums.add(first + half * LANES)), factor);
                let line = to_bf16([half(0), half(1)]);
                _mm512_mask_storeu_epi16(out.add(first), bit_range(0, count - first), line);
            }
        }
    }
    assert!(sums.len() >= out.len().next_multiple_of(TILE_ROW) && size_of::<T>() == size_of::<u16>());
    // SAFETY: AMX implies AVX-512 and its bf16 conversions; lengths were checked.
    unsafe { run(sums.as_ptr(), factor, out.len(), out.as_mut_ptr().cast()) }
}

/// sums[i] = dot product of rows i of a and b, `width` elements each, `stride` apart.
pub(super) fn row_dots<T: Element>(a: &[T], b: &[T], stride: usize, width: usize, sums: &mut [f32]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn run([a, b]: [*const i16; 2], width: usize) -> f32 {
        let mut lanes = _mm512_setzero_ps();
        for first in (0..width).step_by(TILE_ROW) {
            let mask = bit_range(0, width - first);
            // SAFETY: the caller guarantees the elements in the mask.
            let load = |from: *const i16| unsafe {
                std::mem::transmute::<__m512i, __m512bh>(_mm512_maskz_loadu_epi16(mask, from.add(first)))
            };
            lanes = _mm512_dpbf16_ps(lanes, load(a), load(b));
        }
        _mm512_reduce_add_ps(lanes)
    }
    assert!(size_of::<T>() == size_of::<u16>());
    for (sum, (a, b)) in sums.iter_mut().zip(a.chunks(stride).zip(b.chunks(stride))) {
        let both = [&a[..width], &b[..width]].map(|row| row.as_ptr().cast());
        // SAFETY: AMX implies AVX-512 and its bf16 dot products; both rows have the width.
        *sum = unsafe { run(both, width) };
    }
}
