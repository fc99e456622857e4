//! From sums in f32 to rows of bf16, and products of such rows.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_mask_storeu_epi16, _mm512_maskz_loadu_epi16,
    _mm512_mul_ps, _mm512_reduce_add_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};

use super::super::blocking::PANEL;
use super::{LANES, LINE};
use crate::avx512::{bits, joined, merged};
use crate::gemm::transpose_from;
use zeroth_kernel::Element;

/// Rounds the columns of a panel [padded, 32], the lanes of each row multiplied by `factors`, to one row of `width` elements
/// each. `row` says where the row of a column is; without one nobody reads it.
///
/// # Safety
/// What `row` gives has room for `width` elements, which are the caller's to write.
pub(super) unsafe fn columns<T: Element>(
    panel: &[f32],
    factors: &[f32; PANEL],
    width: usize,
    mut row: impl FnMut(usize) -> Option<*mut T>,
) {
    assert!(panel.len() >= width.next_multiple_of(PANEL) * PANEL && size_of::<T>() == size_of::<u16>());
    let rows: [Option<*mut i16>; PANEL] = std::array::from_fn(|line| row(merged(line)).map(<*mut T>::cast));
    for first in (0..width).step_by(PANEL) {
        // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; the panel has these 32 rows, and lines have room
        // by the caller's promise.
        unsafe { turn(panel[first * PANEL..].as_ptr(), factors, first, bits(0, width - first), &rows) }
    }
}

/// Writes 32 lines from as many rows of 32 columns to `first` in each of `to`, whose order is that of [`merged`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn turn(
    rows: *const f32,
    factors: &[f32; PANEL],
    first: usize,
    mask: u32,
    to: &[Option<*mut i16>; PANEL],
) {
    // SAFETY: the caller has 32 rows of 32 numbers, and room behind `first` for what is not masked.
    unsafe {
        let load = |place: *const f32| _mm512_loadu_ps(place);
        let factors = [load(factors.as_ptr()), load(factors.as_ptr().add(LANES))];
        let line = |row: usize| {
            let row = rows.add(row * PANEL);
            joined([0, 1].map(|half| _mm512_mul_ps(load(row.add(half * LANES)), factors[half])))
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

/// Rounds a row times a factor.
pub(super) fn row<T: Element>(sums: &[f32], factor: f32, out: &mut [T]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn run(sums: *const f32, factor: f32, count: usize, out: *mut i16) {
        let factor = _mm512_set1_ps(factor);
        for first in (0..count).step_by(LINE) {
            // SAFETY: the caller has whole lines of sums; what is behind the row's end is masked.
            unsafe {
                let half =
                    |half: usize| _mm512_mul_ps(_mm512_loadu_ps(sums.add(first + half * LANES)), factor);
                let line = joined([half(0), half(1)]);
                _mm512_mask_storeu_epi16(out.add(first), bits(0, count - first), line);
            }
        }
    }
    assert!(sums.len() >= out.len().next_multiple_of(LINE) && size_of::<T>() == size_of::<u16>());
    // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; lengths were checked.
    unsafe { run(sums.as_ptr(), factor, out.len(), out.as_mut_ptr().cast()) }
}

/// sums[i] = the dot product of rows i of a and b, of `width` elements each, `stride` apart.
pub(super) fn products<T: Element>(a: &[T], b: &[T], stride: usize, width: usize, sums: &mut [f32]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn run([a, b]: [*const i16; 2], width: usize) -> f32 {
        let mut lanes = _mm512_setzero_ps();
        for first in (0..width).step_by(LINE) {
            let mask = bits(0, width - first);
            // SAFETY: the caller has the elements that are not masked.
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
        // SAFETY: a machine with tiles has AVX-512 and its bf16 products; both rows have the width.
        *sum = unsafe { run(both, width) };
    }
}
