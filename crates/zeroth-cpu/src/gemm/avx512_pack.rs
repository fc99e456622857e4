//! Packing for the AVX-512 f32 micro-kernel: panels of A, read in place or packed one cache line at a time, and panels of B.
//!
//! The micro-kernel broadcasts single elements of A, so their layout matters little. Row-major f32 is read in place: packing
//! it took 6 to 8 % of a GEMM, even interleaved with the FMAs. Row-major bf16 and f16 are widened row by row. A column-major A
//! is packed k-major.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, _mm256_maskz_loadu_epi16, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cvtepu16_epi32,
    _mm512_cvtph_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_storeu_ps,
};
use std::marker::PhantomData;

use zeroth_base::DType;

use super::MatrixView;
use super::prefetch::prefetch_read;
use super::transpose::{transpose, transpose_from};
use zeroth_kernel::Element;

/// Rows and columns of a C tile.
pub(super) const MR: usize = 9;
pub(super) const NR: usize = 48;
/// f32 lanes of a vector register.
pub(super) const LANES: usize = 16;
/// Panels packed together. One term of their 45 rows is three cache lines of a column-major A. Single panels would read most
/// lines twice, and lines a power of two apart are evicted in between (conflict misses).
pub(super) const GROUP_PANELS: usize = 5;
/// Cache lines of a row, and terms of k, prefetched before they are packed, in time for L3. Near the end of a row the prefetch
/// moves to the next row: a demand miss at the start of each row cost 4 % of a GEMM.
const PREFETCH_LINES: usize = 16;
const PREFETCH_K: usize = 4;

/// One panel of A.
#[derive(Clone, Copy)]
pub(super) struct APanel<'a> {
    pub(super) start: *const f32,
    /// Elements between rows, and between terms of k.
    pub(super) row_stride: usize,
    pub(super) k_stride: usize,
    /// Rows that may be read, and depth.
    pub(super) rows: usize,
    pub(super) kc: usize,
    data: PhantomData<&'a f32>,
}

impl<'a> APanel<'a> {
    /// The rows themselves, if they are row-major f32.
    #[inline(always)]
    pub(super) fn in_place<T: Element>(source: MatrixView<'a, T>, rows: usize, kc: usize) -> Option<Self> {
        if !readable_in_place(source) {
            return None;
        }
        let start = source.checked_ptr(rows, kc).cast();
        Some(Self { start, row_stride: source.row_stride, k_stride: 1, rows, kc, data: PhantomData })
    }

    /// A panel packed by [`PanelPacker`].
    #[inline(always)]
    pub(super) fn packed(data: &'a [f32], kc: usize, transposed: bool) -> Self {
        let [row_stride, k_stride] = if transposed { [1, MR] } else { [kc.next_multiple_of(LANES), 1] };
        assert!(data.len() >= panel_len(kc));
        Self { start: data.as_ptr(), row_stride, k_stride, rows: MR, kc, data: PhantomData }
    }

    /// Whether the panel is k-major.
    pub(super) fn is_k_major(self) -> bool {
        self.k_stride != 1
    }

    /// Pointers to each row; missing rows repeat the last one.
    #[inline(always)]
    pub(super) fn row_ptrs<const ROWS: usize>(self) -> [*const f32; ROWS] {
        std::array::from_fn(|i| self.start.wrapping_add(i.min(self.rows - 1) * self.row_stride))
    }
}

/// Whether the micro-kernel reads this A in place.
pub(super) fn readable_in_place<T: Element>(source: MatrixView<T>) -> bool {
    T::DTYPE == DType::F32 && !source.is_transposed()
}

/// Elements of a packed panel.
pub(super) const fn panel_len(kc: usize) -> usize {
    MR * kc.next_multiple_of(LANES)
}

/// Packs a group of panels incrementally. Missing rows are not written; their accumulators are discarded.
pub(super) struct PanelPacker<'a, T> {
    source: MatrixView<'a, T>,
    rows: usize,
    kc: usize,
    /// Source of the next line (16 terms of a row, or one term of all rows), and its destination in the first panel.
    from: *const T,
    to: *mut f32,
    /// Lines left of this row, or terms left.
    left: usize,
    row: usize,
    /// Elements from the end of a row's last line to the next row; wraps below zero where that line overlaps the next row.
    skip: usize,
    group: PhantomData<&'a mut [f32]>,
}

impl<'a, T: Element> PanelPacker<'a, T> {
    /// Starts packing `rows` rows of `kc` terms, at least one of each.
    pub(super) fn new((source, rows, kc): (MatrixView<'a, T>, usize, usize), out: &'a mut [f32]) -> Self {
        assert!((1..=GROUP_PANELS * MR).contains(&rows) && kc > 0, "{rows} rows of {kc} terms");
        let to = out[..rows.div_ceil(MR) * panel_len(kc)].as_mut_ptr();
        let (from, transposed) = (source.checked_ptr(rows, kc), source.is_transposed());
        let left = if transposed { kc } else { kc.div_ceil(LANES) };
        let skip = source.row_stride.wrapping_sub(kc.div_ceil(LANES) * LANES);
        Self { source, rows, kc, from, to, left, row: 0, skip, group: PhantomData }
    }

    /// Cache lines to pack in total.
    pub(super) fn lines(&self) -> usize {
        if self.source.is_transposed() { self.kc } else { self.rows * self.kc.div_ceil(LANES) }
    }

    /// Packs at most `count` more lines. Always inlined: a call inside the micro-kernel would spill all of its accumulators.
    #[inline(always)]
    pub(super) fn step(&mut self, count: usize) {
        for _ in 0..count {
            if self.left == 0 {
                return;
            }
            if self.source.is_transposed() { self.pack_k() } else { self.pack_line() }
        }
    }

    /// Packs one term of all rows.
    #[inline(always)]
    fn pack_k(&mut self) {
        for (panel, first) in (0..self.rows).step_by(MR).enumerate() {
            let from = self.from.wrapping_add(first);
            // SAFETY: `Isa::available` has found AVX-512, `new` has checked all addresses, and a prefetch never faults.
            unsafe {
                prefetch_read(from.wrapping_add(PREFETCH_K * self.source.col_stride).cast());
                let to = self.to.add(panel * panel_len(self.kc));
                _mm512_mask_storeu_ps(to, lane_mask(MR), load_f32(from, MR.min(self.rows - first)));
            }
        }
        self.from = self.from.wrapping_add(self.source.col_stride);
        self.to = self.to.wrapping_add(MR);
        self.left -= 1;
    }

    /// Packs 16 terms of a row, or what is left of it.
    #[inline(always)]
    fn pack_line(&mut self) {
        // SAFETY: as above.
        unsafe {
            let skip = if self.left <= PREFETCH_LINES { self.skip } else { 0 };
            prefetch_read(self.from.wrapping_add(PREFETCH_LINES * LANES).wrapping_add(skip).cast());
            let partial = self.left == 1 && !self.kc.is_multiple_of(LANES);
            let count = if partial { self.kc % LANES } else { LANES };
            _mm512_storeu_ps(self.to, load_f32(self.from, count));
        }
        self.from = self.from.wrapping_add(LANES);
        self.to = self.to.wrapping_add(LANES);
        self.left -= 1;
        if self.left == 0 && self.row + 1 < self.rows {
            self.row += 1;
            self.left = self.kc.div_ceil(LANES);
            self.from = self.from.wrapping_add(self.skip);
        }
    }

    /// Packs the remaining lines.
    pub(super) fn finish(mut self) {
        // SAFETY: `Isa::available` has found AVX-512.
        unsafe { self.rest() }
    }

    /// [`Self::step`] to the end, compiled for AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn rest(&mut self) {
        self.step(usize::MAX);
    }
}

/// A mask of the `count` lowest lanes.
pub(super) const fn lane_mask(count: usize) -> u16 {
    if count >= LANES { u16::MAX } else { (1 << count) - 1 }
}

/// Loads up to 16 elements as f32; the rest is zeros. Only for code compiled for AVX-512.
#[inline(always)]
pub(super) unsafe fn load_f32<T: Element>(at: *const T, count: usize) -> __m512 {
    let mask = lane_mask(count);
    // SAFETY: the caller guarantees `count` elements; the rest is masked.
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

/// Packs columns of B, given as `lines` rows of Bᵀ, k-major: element k of every column, then element k + 1. Missing columns
/// are zeros.
pub(super) fn pack_b<T: Element>(source: MatrixView<T>, lines: usize, kc: usize, out: &mut [f32]) {
    let start = source.checked_ptr(lines, kc);
    assert!(lines <= NR && out.len() >= NR * kc);
    // SAFETY: `Isa::available` has found AVX-512, and all addresses were checked above.
    unsafe {
        if source.col_stride == 1 {
            pack_b_transposing(start, source.row_stride, lines, kc, out.as_mut_ptr());
        } else {
            pack_b_copying(start, source.col_stride, lines, kc, out.as_mut_ptr());
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_b_transposing<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    kc: usize,
    out: *mut f32,
) {
    for first in (0..kc).step_by(LANES) {
        for part in (0..NR).step_by(LANES) {
            let (from, extent) = (start.wrapping_add(part * stride + first), lines.saturating_sub(part));
            let whole = extent >= LANES && kc - first >= LANES;
            let tile = if whole && T::DTYPE == DType::F32 {
                // SAFETY: the caller has checked all addresses.
                unsafe { transpose_from(from.cast(), stride * size_of::<T>()) }
            } else {
                let mut tile = [_mm512_setzero_si512(); LANES];
                // Constant lengths keep the tile in registers.
                let [extent, count] = if whole { [LANES; 2] } else { [extent, kc - first] };
                for (i, tile) in tile.iter_mut().enumerate().take(extent) {
                    // SAFETY: as above.
                    *tile = _mm512_castps_si512(unsafe { load_f32(from.wrapping_add(i * stride), count) });
                }
                transpose(tile)
            };
            for (i, &line) in tile.iter().enumerate().take(kc - first) {
                // SAFETY: as above.
                unsafe { _mm512_storeu_ps(out.add((first + i) * NR + part), _mm512_castsi512_ps(line)) };
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_b_copying<T: Element>(start: *const T, stride: usize, lines: usize, kc: usize, out: *mut f32) {
    for k_index in 0..kc {
        for part in (0..NR).step_by(LANES) {
            // SAFETY: the caller has checked all addresses; elements past the last column are masked.
            unsafe {
                let line = load_f32(start.wrapping_add(k_index * stride + part), lines.saturating_sub(part));
                _mm512_storeu_ps(out.add(k_index * NR + part), line);
            }
        }
    }
}
