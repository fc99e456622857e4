//! Packing for AMX tiles: panels of 32 rows of a, or 32 columns of b, in steps of 32 terms.
//!
//! A step is two tiles of 16 lines. A tile of a has a line for each row: 32 terms, one after the other. A tile of b has a
//! line for each pair of terms: 16 columns, the two terms of a column side by side. Seen as pairs of 32 bits, one is the
//! other turned over; so a factor whose terms lie the way its tile wants them is copied, the other is turned over in
//! registers. Numbers in f32 are rounded to bf16 on the way.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm256_maskz_loadu_epi16, _mm512_add_epi16, _mm512_cvtepu16_epi32,
    _mm512_cvtne2ps_pbh, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps,
    _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_permutexvar_epi16, _mm512_set1_epi16,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_si512, _mm512_unpackhi_epi16,
    _mm512_unpacklo_epi16,
};

use zeroth_base::DType;

use super::View;
use super::transpose::{transpose, transpose_from};
use zeroth_kernel::Element;

/// Which factor a panel belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Rows of a.
    Rows,
    /// Columns of b.
    Columns,
}

/// Lines of a tile.
const LINES: usize = 16;
/// Terms of a step.
const TERMS: usize = 32;
/// Elements of a tile.
const TILE: usize = LINES * TERMS;

/// Packs `lines` rows or columns of `depth` terms, 32 a panel. Terms up to the next multiple of 32 become zeros; lines that
/// are not there are left as they were, because the tiles are configured without them.
///
/// Where the lines of a term lie side by side, panels are packed together: two of them share what the processor reads.
pub(crate) fn pack<T: Element>(side: Side, source: View<T>, lines: usize, depth: usize, out: &mut [u16]) {
    let start = source.checked(lines, depth);
    let panel = depth.next_multiple_of(TERMS) * 2 * LINES;
    assert!(out.len() >= lines.div_ceil(2 * LINES) * panel);
    assert!(T::DTYPE != DType::F16, "tiles multiply bf16");
    let out = out.as_mut_ptr();
    // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; `Isa::available` has looked. All elements
    // read are within the slice, all written within `out`, as checked above.
    unsafe {
        match (side, source.column == 1) {
            (Side::Columns, false) => pairs_as_they_are(start, source.column, lines, depth, out),
            (Side::Rows, false) => pairs_turned(start, source.column, lines, depth, out),
            (side, true) => {
                for (at, first) in (0..lines).step_by(2 * LINES).enumerate() {
                    let (start, out) = (start.add(first * source.row), out.add(at * panel));
                    let lines = (lines - first).min(2 * LINES);
                    match side {
                        Side::Rows => lines_as_they_are(start, source.row, lines, depth, out),
                        Side::Columns => lines_turned(start, source.row, lines, depth, out),
                    }
                }
            }
        }
    }
}

/// A mask of the lowest bits.
const fn low(count: usize) -> u32 {
    if count >= 32 { u32::MAX } else { (1 << count) - 1 }
}

/// The numbers of a row that are there, `count` of 32 at most, zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn line<T: Element>(at: *const T, count: usize) -> __m512i {
    let mask = low(count);
    // SAFETY: the caller has `count` elements there; the rest is masked.
    unsafe {
        if T::DTYPE == DType::Bf16 {
            return _mm512_maskz_loadu_epi16(mask, at.cast());
        }
        let left = _mm512_maskz_loadu_ps(mask as u16, at.cast());
        let right = _mm512_maskz_loadu_ps((mask >> 16) as u16, at.cast::<f32>().wrapping_add(16));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(right, left))
    }
}

/// Pairs of what stands in two rows, `count` columns of 16 at most; a row that is not there counts as zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs<T: Element>(upper: *const T, lower: Option<*const T>, count: usize) -> __m512i {
    /// Lane 2i takes number i of the first 16, lane 2i + 1 number i of the second.
    const INTERLEAVE: [u16; 32] = interleave(16);
    let mask = low(count) as u16;
    // SAFETY: the caller has `count` elements in each row given; the rest is masked.
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

const fn interleave(second: u16) -> [u16; 32] {
    let (mut lanes, mut i) = ([0; 32], 0);
    while i < 32 {
        lanes[i as usize] = i / 2 + if i % 2 == 1 { second } else { 0 };
        i += 1;
    }
    lanes
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn lines_as_they_are<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut u16,
) {
    // SAFETY: the caller has checked all places.
    unsafe {
        for (step, first) in (0..depth).step_by(TERMS).enumerate() {
            for i in 0..lines {
                let line = line(start.add(i * stride + first), depth - first);
                _mm512_storeu_si512(out.add(step * 2 * TILE + i * TERMS).cast(), line);
            }
        }
    }
}

/// Writes a tile of lines, turned over.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_turned(tile: [__m512i; LINES], out: *mut u16) {
    for (i, line) in transpose(tile).into_iter().enumerate() {
        // SAFETY: the caller has room for a tile.
        unsafe { _mm512_storeu_si512(out.add(i * TERMS).cast(), line) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn lines_turned<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut u16,
) {
    // SAFETY: the caller has checked all places.
    unsafe {
        for (step, first) in (0..depth).step_by(TERMS).enumerate() {
            for half in (0..lines).step_by(LINES) {
                let (from, to) = (start.add(half * stride + first), out.add(step * 2 * TILE + half * TERMS));
                let mut tile = [_mm512_setzero_si512(); LINES];
                if lines - half >= LINES && depth - first >= TERMS {
                    if T::DTYPE == DType::Bf16 {
                        let turned = transpose_from(from.cast(), stride * size_of::<T>());
                        for (i, line) in turned.into_iter().enumerate() {
                            _mm512_storeu_si512(to.add(i * TERMS).cast(), line);
                        }
                        continue;
                    }
                    // Lengths that the compiler knows keep the tile in registers.
                    for (i, tile) in tile.iter_mut().enumerate() {
                        *tile = line(from.add(i * stride), TERMS);
                    }
                } else {
                    for (i, tile) in tile.iter_mut().enumerate().take(lines - half) {
                        *tile = line(from.add(i * stride), depth - first);
                    }
                }
                store_turned(tile, to);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs_as_they_are<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut u16,
) {
    /// Lane 2i takes number i of the first register, lane 2i + 1 number i of the second; the other 16 after them.
    const LEFT: [u16; 32] = interleave(32);
    // SAFETY: the caller has checked all places.
    unsafe {
        let left = _mm512_loadu_si512(LEFT.as_ptr().cast());
        let right = _mm512_add_epi16(left, _mm512_set1_epi16(16));
        let packed = depth.next_multiple_of(TERMS);
        for term in (0..packed).step_by(2) {
            for first in (0..lines).step_by(2 * LINES) {
                let lines = (lines - first).min(2 * LINES);
                let to = out.add(first * packed + term / TERMS * 2 * TILE + term % TERMS / 2 * TERMS);
                let row = |term: usize| start.add(term * stride + first);
                if T::DTYPE == DType::Bf16 {
                    let load = |term: usize| {
                        if term < depth { line(row(term), lines) } else { _mm512_setzero_si512() }
                    };
                    let (upper, lower) = (load(term), load(term + 1));
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(upper, left, lower));
                    _mm512_storeu_si512(to.add(TILE).cast(), _mm512_permutex2var_epi16(upper, right, lower));
                } else {
                    for half in (0..lines).step_by(LINES) {
                        let pairs = if term < depth {
                            let lower = (term + 1 < depth).then(|| row(term + 1).add(half));
                            pairs(row(term).add(half), lower, lines - half)
                        } else {
                            _mm512_setzero_si512()
                        };
                        _mm512_storeu_si512(to.add(half * TERMS).cast(), pairs);
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs_turned<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut u16,
) {
    // SAFETY: the caller has checked all places.
    unsafe {
        let packed = depth.next_multiple_of(TERMS);
        for first in (0..depth).step_by(TERMS) {
            for panel in (0..lines).step_by(2 * LINES) {
                let lines = (lines - panel).min(2 * LINES);
                let (from, to) =
                    (start.add(first * stride + panel), out.add(panel * packed + first * 2 * LINES));
                if T::DTYPE == DType::Bf16 && lines == 2 * LINES && depth - first >= TERMS {
                    step_turned(from.cast(), stride, to);
                    continue;
                }
                for half in (0..lines).step_by(LINES) {
                    let row = |term: usize| from.add(term * stride + half);
                    let mut tile = [_mm512_setzero_si512(); LINES];
                    if lines - half >= LINES && depth - first >= TERMS {
                        // Lengths that the compiler knows keep the tile in registers.
                        for (i, tile) in tile.iter_mut().enumerate() {
                            *tile = pairs(row(2 * i), Some(row(2 * i + 1)), LINES);
                        }
                    } else {
                        for (i, tile) in tile.iter_mut().enumerate().take((depth - first).div_ceil(2)) {
                            let lower = (first + 2 * i + 1 < depth).then(|| row(2 * i + 1));
                            *tile = pairs(row(2 * i), lower, lines - half);
                        }
                    }
                    store_turned(tile, to.add(half * TERMS));
                }
            }
        }
    }
}

/// A whole step of a that stands the other way round: 32 terms, `stride` elements apart, of 32 rows.
///
/// # Safety
/// 32 elements can be read at every `stride` of the 32 terms, and two tiles written to `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn step_turned(start: *const u16, stride: usize, out: *mut u16) {
    let mut pairs = [[_mm512_setzero_si512(); 2]; LINES];
    for (i, pair) in pairs.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let row = |term: usize| unsafe { _mm512_loadu_si512(start.add(term * stride).cast()) };
        let (upper, lower) = (row(2 * i), row(2 * i + 1));
        *pair = [_mm512_unpacklo_epi16(upper, lower), _mm512_unpackhi_epi16(upper, lower)];
    }
    for half in 0..2 {
        // SAFETY: 16 lines of two registers each.
        let turned = unsafe { transpose_from(pairs.as_ptr().cast::<u8>().add(64 * half), 128) };
        for (i, line) in turned.into_iter().enumerate() {
            // Of each 8 rows, the lower halves of registers held the first 4 and the upper halves the others.
            let row = i / 4 * 8 + half * 4 + i % 4;
            // SAFETY: the caller's promise; rows are below 32.
            unsafe { _mm512_storeu_si512(out.add(row * TERMS).cast(), line) };
        }
    }
}
