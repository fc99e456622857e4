//! The second pass for a chunk of the vocabulary: dw as [hidden, vocabulary], transposed as it is stored.

use std::arch::x86_64::{
    _mm512_add_ps, _mm512_castsi512_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_setzero_ps,
};

use super::super::blocking::{LANES, RESIDENT};
use crate::avx512::{bit_range, unpack_order};
use crate::gemm::{AmxKernel, Interleaved, PANEL, TILE, prefetch_read, transpose_from};
use crate::scratch_splitter::ScratchSplitter;

/// Multiplies `exps` [panels of vocabulary, tile steps of rows] by `x` [panels of hidden, tile steps of rows] into dw
/// [vocabulary, hidden]; with `add` accumulates.
pub(super) fn chunk(
    exps: &[u16],
    x: &[u16],
    steps: usize,
    hidden: usize,
    dw: &mut [f32],
    add: bool,
    scratch: &mut [f32],
) {
    // SAFETY: `Isa::available` reports AMX only with AVX-512.
    unsafe {
        if add {
            run::<true>(exps, x, steps, hidden, dw, scratch);
        } else {
            run::<false>(exps, x, steps, hidden, dw, scratch);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run<const ADD: bool>(
    exps: &[u16],
    x: &[u16],
    steps: usize,
    hidden: usize,
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let (mut kernel, mut scratch) = (AmxKernel::configured(), ScratchSplitter::new(scratch));
    let (mut next, mut sums) = (scratch.f32(TILE), scratch.f32(TILE));
    let group = (RESIDENT / steps).max(1);
    let mut pending: Option<[usize; 2]> = None;
    for (index, x) in x.chunks(group * steps * TILE).enumerate() {
        for (panel, exps) in exps.chunks_exact(steps * TILE).enumerate() {
            let share = x.len().div_ceil(TILE * steps);
            for (column, x) in x.chunks_exact(steps * TILE).enumerate() {
                let part = exps.len() / share;
                let mut store = TransposedStore::<ADD> {
                    sums: &*sums,
                    dw,
                    hidden,
                    corner: pending.unwrap_or_default(),
                    quarter: if pending.is_some() { 0 } else { 4 },
                    k_steps: 0,
                    next_exps: exps.as_ptr().wrapping_add(exps.len() + column * part).cast(),
                };
                kernel.matmul_panels_pipelined::<true>(x, exps, next, &mut store);
                store.finish();
                pending = Some([panel * PANEL, (index * group + column) * PANEL]);
                (next, sums) = (sums, next);
            }
        }
    }
    let quarter = if pending.is_some() { 0 } else { 4 };
    let corner = pending.unwrap_or_default();
    TransposedStore::<ADD> { sums, dw, hidden, corner, quarter, k_steps: 0, next_exps: std::ptr::null() }
        .finish();
}

/// Stores a C tile [32 of hidden, 32 of vocabulary] transposed, a quarter at a time, and prefetches the next exponentials.
struct TransposedStore<'a, const ADD: bool> {
    sums: &'a [f32],
    dw: &'a mut [f32],
    hidden: usize,
    /// First row and column of the tile in dw.
    corner: [usize; 2],
    /// Next quarter, of 4.
    quarter: usize,
    k_steps: usize,
    next_exps: *const u8,
}

impl<const ADD: bool> Interleaved for TransposedStore<'_, ADD> {
    #[inline(always)]
    fn k_step(&mut self) {
        prefetch_read(self.next_exps);
        self.next_exps = self.next_exps.wrapping_add(64);
        self.k_steps += 1;
        // Transposing a quarter delays the next tile loads.
        if self.k_steps.is_multiple_of(4) {
            self.next();
        }
    }
}

impl<const ADD: bool> TransposedStore<'_, ADD> {
    #[inline(always)]
    fn next(&mut self) {
        if self.quarter < 4 {
            // SAFETY: AMX implies AVX-512.
            unsafe { self.transpose_quarter() }
            self.quarter += 1;
        }
    }

    #[inline(always)]
    fn finish(&mut self) {
        while self.quarter < 4 {
            self.next();
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn transpose_quarter(&mut self) {
        let [row, column] = [self.corner[0], self.corner[1] + self.quarter % 2 * LANES];
        let half = self.quarter / 2;
        let mask = bit_range(0, self.hidden.saturating_sub(column).min(LANES)) as u16;
        let rows = (self.dw.len() / self.hidden).saturating_sub(row);
        assert!(self.sums.len() >= TILE);
        // SAFETY: 16 rows of 16 elements of the C tile.
        let lines = unsafe {
            let start = self.sums.as_ptr().add(self.quarter % 2 * LANES * PANEL + half * LANES);
            transpose_from(start.cast(), PANEL * size_of::<f32>())
        };
        for (at, line) in lines.into_iter().enumerate() {
            let source_row = unpack_order(half * LANES + at);
            if source_row >= rows || mask == 0 {
                continue;
            }
            // SAFETY: the row is inside dw, and the mask excludes missing columns.
            unsafe {
                let to = self.dw.as_mut_ptr().add((row + source_row) * self.hidden + column);
                let before = if ADD { _mm512_maskz_loadu_ps(mask, to) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, _mm512_castsi512_ps(line)));
            }
        }
    }
}
