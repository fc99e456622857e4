//! The f32 kernel of AVX-512: 12 by 32 sums in 24 of the 32 registers.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm256_maskz_loadu_epi16, _mm512_add_ps, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_slli_epi32,
};

use zeroth_base::DType;

use super::View;
use super::blocks::{Between, Kernel, Place, finish_rows};
use super::sizes::{self, Sizes};
use super::transpose::{transpose, transpose_from};
use crate::cpu::cut::Tile;
use crate::cpu::element::Element;

const ROWS: usize = 12;
const COLUMNS: usize = 32;
/// Lanes of a register.
const LANES: usize = 16;
/// Elements of b that are asked for before they are needed: 8 terms.
const AHEAD: usize = 8 * COLUMNS;

/// [`finish_rows`] compiled with AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn finish_avx512<O>(
    sums: &[f32],
    at: Place,
    out: &mut Tile<O>,
    store: &impl Fn(usize, &[f32], &mut [O]),
) {
    finish_rows::<COLUMNS, O>(sums, at, out, store);
}

/// The kernel; it has no state.
pub(super) struct Zmm;

impl Kernel for Zmm {
    type Packed = f32;
    const SIZES: Sizes = sizes::ZMM;

    fn start() -> Self {
        Self
    }

    type Rows<'a> = &'a [f32];

    fn pack_rows<'a, T: Element>(
        &self,
        source: View<'a, T>,
        rows: usize,
        depth: usize,
        out: &'a mut [f32],
    ) -> &'a [f32] {
        pack::<T, ROWS>(source, rows, depth, out);
        out
    }

    fn pack_columns<T: Element>(&self, source: View<T>, columns: usize, depth: usize, out: &mut [f32]) {
        pack::<T, COLUMNS>(source, columns, depth, out);
    }

    fn multiply(
        &mut self,
        a: &[f32],
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        live: [usize; 2],
        add: bool,
        _: &mut impl Between,
    ) {
        let [rows, columns] = live;
        assert!(rows <= ROWS && columns <= COLUMNS && (rows - 1) * stride + columns <= c.len());
        // SAFETY: `Path::available` has found AVX-512, and the live part of c is within the slice.
        unsafe { multiply(a, b, c.as_mut_ptr(), stride, live, add) }
    }

    fn finish<O, F: Fn(usize, &[f32], &mut [O])>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &F) {
        // SAFETY: `Path::available` has found AVX-512.
        unsafe { finish_avx512(sums, at, out, store) }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn multiply(a: &[f32], b: &[f32], c: *mut f32, stride: usize, [rows, columns]: [usize; 2], add: bool) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    for (a, b) in a.as_chunks::<ROWS>().0.iter().zip(b.as_chunks::<COLUMNS>().0) {
        // SAFETY: b has 32 elements; what lies ahead is only asked for, whatever the address is.
        let (left, right) = unsafe {
            _mm_prefetch::<_MM_HINT_T0>(b.as_ptr().wrapping_add(AHEAD).cast());
            _mm_prefetch::<_MM_HINT_T0>(b.as_ptr().wrapping_add(AHEAD + LANES).cast());
            (_mm512_loadu_ps(b.as_ptr()), _mm512_loadu_ps(b.as_ptr().add(LANES)))
        };
        for (sums, &a) in sums.iter_mut().zip(a) {
            let a = _mm512_set1_ps(a);
            sums[0] = _mm512_fmadd_ps(a, left, sums[0]);
            sums[1] = _mm512_fmadd_ps(a, right, sums[1]);
        }
    }
    let masks = [mask(columns), mask(columns.saturating_sub(LANES))];
    for (i, sums) in sums.iter().enumerate() {
        if i < rows {
            for (half, (&sum, mask)) in sums.iter().zip(masks).enumerate() {
                let at = c.wrapping_add(i * stride + half * LANES);
                // SAFETY: the caller has the live part of c; the rest is masked.
                unsafe {
                    let sum = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum) } else { sum };
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}

/// A mask of the lowest lanes.
const fn mask(count: usize) -> u16 {
    if count >= LANES { u16::MAX } else { (1 << count) - 1 }
}

/// Up to 16 numbers as f32, zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load<T: Element>(at: *const T, count: usize) -> __m512 {
    let mask = mask(count);
    // SAFETY: the caller has `count` elements there; the rest is masked.
    unsafe {
        match T::DTYPE {
            DType::F32 => _mm512_maskz_loadu_ps(mask, at.cast()),
            DType::Bf16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
                _mm256_maskz_loadu_epi16(mask, at.cast()),
            ))),
            DType::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast())),
        }
    }
}

/// Packs `lines` rows as a panel of `PANEL`, one term of every row after the other, zeros below the last row.
fn pack<T: Element, const PANEL: usize>(source: View<T>, lines: usize, depth: usize, out: &mut [f32]) {
    let start = source.checked(lines, depth);
    assert!(lines <= PANEL && out.len() >= PANEL * depth);
    // SAFETY: `Path::available` has found AVX-512, and all places were checked above.
    unsafe {
        if source.column == 1 {
            pack_turned::<T, PANEL>(start, source.row, lines, depth, out.as_mut_ptr());
        } else {
            pack_as_they_are::<T, PANEL>(start, source.column, lines, depth, out.as_mut_ptr());
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_turned<T: Element, const PANEL: usize>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut f32,
) {
    for first in (0..depth).step_by(LANES) {
        for part in (0..PANEL).step_by(LANES) {
            let mut tile = [_mm512_setzero_si512(); LANES];
            // SAFETY: the caller has checked all places.
            unsafe {
                let from = start.wrapping_add(part * stride + first);
                let live = lines.saturating_sub(part);
                if T::DTYPE == DType::F32 && live >= LANES && depth - first >= LANES {
                    let turned = transpose_from(from.cast(), stride * size_of::<T>());
                    for (i, &line) in turned.iter().enumerate() {
                        let to = out.add((first + i) * PANEL + part);
                        _mm512_mask_storeu_ps(to, mask(PANEL - part), _mm512_castsi512_ps(line));
                    }
                    continue;
                }
                if live >= LANES.min(PANEL - part) && depth - first >= LANES {
                    // Lengths that the compiler knows keep the tile in registers.
                    for (i, tile) in tile.iter_mut().enumerate().take(LANES.min(PANEL - part)) {
                        *tile = _mm512_castps_si512(load(from.add(i * stride), LANES));
                    }
                } else {
                    for (i, tile) in tile.iter_mut().enumerate().take(live) {
                        *tile = _mm512_castps_si512(load(from.add(i * stride), depth - first));
                    }
                }
            }
            let tile = transpose(tile);
            for (i, &line) in tile.iter().enumerate().take(depth - first) {
                // SAFETY: as above.
                unsafe {
                    let to = out.add((first + i) * PANEL + part);
                    _mm512_mask_storeu_ps(to, mask(PANEL - part), _mm512_castsi512_ps(line));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_as_they_are<T: Element, const PANEL: usize>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut f32,
) {
    for term in 0..depth {
        for part in (0..PANEL).step_by(LANES) {
            // SAFETY: the caller has checked all places; what lies beyond the last line is not read.
            unsafe {
                let line = load(start.wrapping_add(term * stride + part), lines.saturating_sub(part));
                _mm512_mask_storeu_ps(out.add(term * PANEL + part), mask(PANEL - part), line);
            }
        }
    }
}
