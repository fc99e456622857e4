//! Packing for AMX: panels of 32 rows of A or 32 columns of B, in tile steps of 32 terms of k.
//!
//! A tile step is two tiles of 16 rows of 64 bytes. A row of an A tile is 32 consecutive terms of one row of A. A row of a
//! B tile is one pair of terms of 16 columns, the two terms of a column adjacent (VNNI layout). As 32-bit pairs, one
//! layout is the transpose of the other. So an operand whose terms are in tile order is copied, and the other one is
//! transposed in registers. f32 is rounded to bf16 on the way.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm256_maskz_loadu_epi16, _mm512_add_epi16, _mm512_cvtepu16_epi32,
    _mm512_cvtne2ps_pbh, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps,
    _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_permutexvar_epi16, _mm512_set1_epi16,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_si512, _mm512_unpackhi_epi16,
    _mm512_unpacklo_epi16,
};

use zeroth_base::DType;

use super::MatrixView;
use super::prefetch::prefetch_read_l2;
use super::transpose::{transpose, transpose_from};
use crate::avx512::bit_range;
use zeroth_kernel::Element;

/// The operand that a panel belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    /// Rows of A.
    A,
    /// Columns of B.
    B,
}

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Terms of k of a tile step.
const TILE_K: usize = 32;
/// Terms of k whose rows are read ahead where k is the strided dimension: a row of a block is a few lines of a page, which no
/// hardware prefetcher follows.
const TERMS_AHEAD: usize = 32;
/// bf16 elements of a tile.
const TILE_LEN: usize = TILE_ROWS * TILE_K;

/// Packs `lines` rows of A or columns of B with `kc` terms, 32 to a panel. Terms up to the next multiple of 32 are zeros.
/// Missing lines are not written, because TILECFG excludes them.
///
/// Where k is the strided dimension, all panels are packed in one pass: neighbours share the cache lines that are read.
pub(crate) fn pack<T: Element>(
    operand: Operand,
    source: MatrixView<T>,
    lines: usize,
    kc: usize,
    out: &mut [u16],
) {
    let start = source.checked_ptr(lines, kc);
    let panel = kc.next_multiple_of(TILE_K) * 2 * TILE_ROWS;
    assert!(out.len() >= lines.div_ceil(2 * TILE_ROWS) * panel);
    assert!(T::DTYPE != DType::F16, "AMX multiplies bf16, not f16");
    let out = out.as_mut_ptr();
    // SAFETY: AMX implies AVX-512 and its bf16 conversions. All elements read are inside the slice and all elements written
    // inside `out`, as checked above.
    unsafe {
        match (operand, source.col_stride == 1) {
            (Operand::B, false) => pack_b_interleaving(start, source.col_stride, lines, kc, out),
            (Operand::A, false) => pack_a_transposing(start, source.col_stride, lines, kc, out),
            (operand, true) => {
                for (at, first) in (0..lines).step_by(2 * TILE_ROWS).enumerate() {
                    let (start, out) = (start.add(first * source.row_stride), out.add(at * panel));
                    let lines = (lines - first).min(2 * TILE_ROWS);
                    match operand {
                        Operand::A => pack_a_copying(start, source.row_stride, lines, kc, out),
                        Operand::B => pack_b_transposing(start, source.row_stride, lines, kc, out),
                    }
                }
            }
        }
    }
}

/// Loads `count` elements of a row, at most 32, as bf16; the rest is zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn load_row<T: Element>(at: *const T, count: usize) -> __m512i {
    let mask = bit_range(0, count);
    // SAFETY: the caller guarantees `count` elements; the rest is masked.
    unsafe {
        if T::DTYPE == DType::Bf16 {
            return _mm512_maskz_loadu_epi16(mask, at.cast());
        }
        let left = _mm512_maskz_loadu_ps(mask as u16, at.cast());
        let right = _mm512_maskz_loadu_ps((mask >> 16) as u16, at.cast::<f32>().wrapping_add(16));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(right, left))
    }
}

/// Interleaves `count` elements, at most 16, of two rows; a missing row is zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn load_pairs<T: Element>(upper: *const T, lower: Option<*const T>, count: usize) -> __m512i {
    /// Lane 2i takes element i of the first 16, lane 2i + 1 element i of the second 16.
    const INTERLEAVE: [u16; 32] = interleave(16);
    let mask = bit_range(0, count) as u16;
    // SAFETY: the caller guarantees `count` elements in each row; the rest is masked.
    unsafe {
        if T::DTYPE == DType::Bf16 {
            let upper = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, upper.cast()));
            let Some(lower) = lower else { return upper };
            let lower = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, lower.cast()));
            return _mm512_or_si512(upper, _mm512_slli_epi32::<16>(lower));
        }
        let upper = _mm512_maskz_loadu_ps(mask, upper.cast());
        let lower = lower.map_or(_mm512_setzero_ps(), |lower| _mm512_maskz_loadu_ps(mask, lower.cast()));
        let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(lower, upper));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(INTERLEAVE.as_ptr().cast()), both)
    }
}

/// Indices that interleave 16 elements with those from `second` on.
pub(crate) const fn interleave(second: u16) -> [u16; 32] {
    let (mut lanes, mut i) = ([0; 32], 0);
    while i < 32 {
        lanes[i as usize] = i / 2 + if i % 2 == 1 { second } else { 0 };
        i += 1;
    }
    lanes
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_a_copying<T: Element>(start: *const T, stride: usize, lines: usize, kc: usize, out: *mut u16) {
    // SAFETY: the caller has checked all addresses.
    unsafe {
        for (step, first) in (0..kc).step_by(TILE_K).enumerate() {
            for i in 0..lines {
                let line = load_row(start.add(i * stride + first), kc - first);
                _mm512_storeu_si512(out.add(step * 2 * TILE_LEN + i * TILE_K).cast(), line);
            }
        }
    }
}

/// Stores the transpose of a tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_transposed(tile: [__m512i; TILE_ROWS], out: *mut u16) {
    for (i, line) in transpose(tile).into_iter().enumerate() {
        // SAFETY: the caller guarantees space for a tile.
        unsafe { _mm512_storeu_si512(out.add(i * TILE_K).cast(), line) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_b_transposing<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    kc: usize,
    out: *mut u16,
) {
    // SAFETY: the caller has checked all addresses.
    unsafe {
        for (step, first) in (0..kc).step_by(TILE_K).enumerate() {
            for half in (0..lines).step_by(TILE_ROWS) {
                let (from, to) =
                    (start.add(half * stride + first), out.add(step * 2 * TILE_LEN + half * TILE_K));
                let mut tile = [_mm512_setzero_si512(); TILE_ROWS];
                if lines - half >= TILE_ROWS && kc - first >= TILE_K {
                    if T::DTYPE == DType::Bf16 {
                        let transposed = transpose_from(from.cast(), stride * size_of::<T>());
                        for (i, line) in transposed.into_iter().enumerate() {
                            _mm512_storeu_si512(to.add(i * TILE_K).cast(), line);
                        }
                        continue;
                    }
                    // Constant lengths keep the tile in registers.
                    for (i, tile) in tile.iter_mut().enumerate() {
                        *tile = load_row(from.add(i * stride), TILE_K);
                    }
                } else {
                    for (i, tile) in tile.iter_mut().enumerate().take(lines - half) {
                        *tile = load_row(from.add(i * stride), kc - first);
                    }
                }
                store_transposed(tile, to);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_b_interleaving<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    kc: usize,
    out: *mut u16,
) {
    /// Lane 2i takes element i of the first register, lane 2i + 1 element i of the second; 16 more for the right half.
    const LEFT: [u16; 32] = interleave(32);
    // SAFETY: the caller has checked all addresses.
    unsafe {
        let left = _mm512_loadu_si512(LEFT.as_ptr().cast());
        let right = _mm512_add_epi16(left, _mm512_set1_epi16(16));
        let packed = kc.next_multiple_of(TILE_K);
        for term in (0..packed).step_by(2) {
            for first in (0..lines).step_by(2 * TILE_ROWS) {
                let lines = (lines - first).min(2 * TILE_ROWS);
                let to = out.add(first * packed + term / TILE_K * 2 * TILE_LEN + term % TILE_K / 2 * TILE_K);
                let row = |term: usize| start.add(term * stride + first);
                for ahead in [term + TERMS_AHEAD, term + TERMS_AHEAD + 1] {
                    prefetch_read_l2(start.wrapping_add(ahead * stride + first).cast());
                }
                if T::DTYPE == DType::Bf16 {
                    let load = |term: usize| {
                        if term < kc { load_row(row(term), lines) } else { _mm512_setzero_si512() }
                    };
                    let (upper, lower) = (load(term), load(term + 1));
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(upper, left, lower));
                    _mm512_storeu_si512(
                        to.add(TILE_LEN).cast(),
                        _mm512_permutex2var_epi16(upper, right, lower),
                    );
                } else {
                    for half in (0..lines).step_by(TILE_ROWS) {
                        let pairs = if term < kc {
                            let lower = (term + 1 < kc).then(|| row(term + 1).add(half));
                            load_pairs(row(term).add(half), lower, lines - half)
                        } else {
                            _mm512_setzero_si512()
                        };
                        _mm512_storeu_si512(to.add(half * TILE_K).cast(), pairs);
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_a_transposing<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    kc: usize,
    out: *mut u16,
) {
    // SAFETY: the caller has checked all addresses.
    unsafe {
        let packed = kc.next_multiple_of(TILE_K);
        for first in (0..kc).step_by(TILE_K) {
            for panel in (0..lines).step_by(2 * TILE_ROWS) {
                let lines = (lines - panel).min(2 * TILE_ROWS);
                let (from, to) =
                    (start.add(first * stride + panel), out.add(panel * packed + first * 2 * TILE_ROWS));
                if T::DTYPE == DType::Bf16 && lines == 2 * TILE_ROWS && kc - first >= TILE_K {
                    transpose_a_step(from.cast(), stride, to);
                    continue;
                }
                for half in (0..lines).step_by(TILE_ROWS) {
                    let row = |term: usize| from.add(term * stride + half);
                    let mut tile = [_mm512_setzero_si512(); TILE_ROWS];
                    if lines - half >= TILE_ROWS && kc - first >= TILE_K {
                        // Constant lengths keep the tile in registers.
                        for (i, tile) in tile.iter_mut().enumerate() {
                            *tile = load_pairs(row(2 * i), Some(row(2 * i + 1)), TILE_ROWS);
                        }
                    } else {
                        for (i, tile) in tile.iter_mut().enumerate().take((kc - first).div_ceil(2)) {
                            let lower = (first + 2 * i + 1 < kc).then(|| row(2 * i + 1));
                            *tile = load_pairs(row(2 * i), lower, lines - half);
                        }
                    }
                    store_transposed(tile, to.add(half * TILE_K));
                }
            }
        }
    }
}

/// Transposes one full tile step of a column-major A: 32 terms, `stride` elements apart, of 32 rows.
///
/// # Safety
/// 32 elements can be read at each of the 32 terms, and two tiles written to `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_a_step(start: *const u16, stride: usize, out: *mut u16) {
    let mut pairs = [[_mm512_setzero_si512(); 2]; TILE_ROWS];
    for (i, pair) in pairs.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let row = |term: usize| unsafe { _mm512_loadu_si512(start.add(term * stride).cast()) };
        let (upper, lower) = (row(2 * i), row(2 * i + 1));
        *pair = [_mm512_unpacklo_epi16(upper, lower), _mm512_unpackhi_epi16(upper, lower)];
    }
    for half in 0..2 {
        // SAFETY: 16 rows of two registers each.
        let transposed = unsafe { transpose_from(pairs.as_ptr().cast::<u8>().add(64 * half), 128) };
        for (i, line) in transposed.into_iter().enumerate() {
            // `unpacklo` took the first 4 of every 8 rows, `unpackhi` the other 4.
            let row = i / 4 * 8 + half * 4 + i % 4;
            // SAFETY: the caller's promise; `row` is below 32.
            unsafe { _mm512_storeu_si512(out.add(row * TILE_K).cast(), line) };
        }
    }
}
