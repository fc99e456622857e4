//! The first pass for 32 rows and a block of the vocabulary: logits, their exponentials, and their contribution to dx.

use std::arch::x86_64::{
    _mm512_add_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_max_ps,
    _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::f32::consts::LOG2_E;

use super::super::blocking::LANES;
use super::RowStats;
use crate::avx512::{bit_range, exp2, to_bf16};
use crate::gemm::{AmxKernel, Interleaved, NoInterleave, PANEL, TILE, prefetch_read};
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::Tile;

/// A block of the vocabulary.
pub(super) struct Block<'a> {
    /// Whether it is the first block.
    pub(super) is_first: bool,
    pub(super) columns: usize,
    /// w packed for logits and for dx.
    pub(super) w: [&'a [u16]; 2],
}

/// A panel of 32 rows.
pub(super) struct Rows<'a> {
    /// Packed x, [tile steps of hidden].
    pub(super) x: &'a [u16],
    pub(super) row_stats: &'a [RowStats],
    pub(super) lanes: &'a mut [f32],
}

/// Adds a block to the lanes of the rows and, with gradients, keeps its exponentials and accumulates them times w into the
/// accumulators of dx, which are empty where dx is not wanted.
pub(super) fn advance(
    block: &Block,
    rows: Rows,
    gradients: Option<(&mut Tile<u16>, &mut [f32])>,
    scratch: &mut [f32],
) {
    assert!(rows.row_stats.len() == PANEL && rows.lanes.len() == PANEL * 2 * LANES);
    // SAFETY: `Isa::available` reports AMX only with AVX-512 and its bf16 conversions.
    unsafe {
        match gradients {
            Some((exps, sums)) => run::<true>(block, rows, Some(exps), sums, scratch),
            None => run::<false>(block, rows, None, &mut [], scratch),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn run<const KEEP: bool>(
    block: &Block,
    rows: Rows,
    mut exps: Option<&mut Tile<u16>>,
    sums: &mut [f32],
    scratch: &mut [f32],
) {
    let Rows { x, row_stats, lanes } = rows;
    if block.is_first {
        for lanes in lanes.chunks_exact_mut(2 * LANES) {
            lanes[..LANES].fill(0.0);
            lanes[LANES..].fill(f32::NEG_INFINITY);
        }
    }
    let (mut kernel, mut scratch) = (AmxKernel::configured(), ScratchSplitter::new(scratch));
    let (mut next, mut logits) = (scratch.f32(TILE), scratch.f32(TILE));
    let panels = block.columns.div_ceil(PANEL);
    let rounded = scratch.bf16(panels * TILE);
    let unmasked = row_stats.iter().all(|stats| stats.trained_mask == u32::MAX);
    let rows_per_step = PANEL.div_ceil((2 * x.len() / TILE).max(1));
    for panel in 0..=panels {
        let w = block.w[0].get(panel * x.len()..(panel + 1) * x.len());
        if panel == 0 {
            kernel.matmul_panels(x, w.unwrap_or_default(), next, false, &mut NoInterleave);
        } else {
            let exps = match &mut exps {
                Some(exps) => exps.row(panel - 1),
                None => &mut [],
            };
            assert!(!KEEP || exps.len() >= TILE, "a tile step of exponentials");
            let in_vocab = bit_range(0, block.columns - (panel - 1) * PANEL);
            let mut exps = ExpTile::<KEEP> {
                logits: logits.first_chunk().expect("32 rows of 32"),
                row_stats: row_stats.first_chunk().expect("32 rows"),
                lanes: lanes.first_chunk_mut().expect("32 rows"),
                in_vocab,
                unmasked: unmasked && in_vocab == u32::MAX,
                rounded: rounded[(panel - 1) * TILE..].first_chunk_mut().expect("a tile step"),
                exps,
                row: 0,
                rows_per_step,
            };
            if let Some(w) = w {
                kernel.matmul_panels_pipelined::<false>(x, w, next, &mut exps);
            }
            exps.finish();
        }
        (next, logits) = (logits, next);
    }
    if KEEP {
        for (sums, w) in sums.chunks_exact_mut(TILE).zip(block.w[1].chunks_exact(panels * TILE)) {
            let mut prefetch = PrefetchSums { at: sums.as_ptr().wrapping_add(2 * TILE).cast() };
            kernel.matmul_panels(rounded, w, sums, !block.is_first, &mut prefetch);
        }
    }
}

/// Prefetches the accumulators two C tiles ahead.
struct PrefetchSums {
    at: *const u8,
}

impl Interleaved for PrefetchSums {
    #[inline(always)]
    fn k_step(&mut self) {
        for line in 0..8 {
            prefetch_read(self.at.wrapping_add(64 * line));
        }
        self.at = self.at.wrapping_add(512);
    }
}

/// Turns logits [32 rows, 32 columns] into exponentials, a row at a time.
struct ExpTile<'a, const KEEP: bool> {
    logits: &'a [f32; TILE],
    row_stats: &'a [RowStats; PANEL],
    lanes: &'a mut [f32; PANEL * 2 * LANES],
    /// Mask of the columns inside the vocabulary.
    in_vocab: u32,
    /// Whether all rows are trained and no column is masked.
    unmasked: bool,
    /// Exponentials packed as A for dx, and as B for dw.
    rounded: &'a mut [u16; TILE],
    exps: &'a mut [u16],
    /// Next row, and rows per k-step.
    row: usize,
    rows_per_step: usize,
}

impl<const KEEP: bool> Interleaved for ExpTile<'_, KEEP> {
    #[inline(always)]
    fn k_step(&mut self) {
        for _ in 0..self.rows_per_step {
            self.next();
        }
    }
}

impl<const KEEP: bool> ExpTile<'_, KEEP> {
    #[inline(always)]
    fn next(&mut self) {
        if self.row < PANEL {
            // SAFETY: AMX implies AVX-512 and its bf16 conversions; the row is below 32.
            unsafe {
                if self.unmasked {
                    self.one_row::<true>();
                } else {
                    self.one_row::<false>();
                }
            }
            self.row += 1;
        }
    }

    #[inline(always)]
    fn finish(&mut self) {
        while self.row < PANEL {
            self.next();
        }
    }

    /// Inlined into a function compiled for AVX-512.
    #[inline(always)]
    unsafe fn one_row<const UNMASKED: bool>(&mut self) {
        let row = self.row;
        // SAFETY: as above; all addresses belong to one of 32 rows.
        unsafe {
            let stats = self.row_stats.get_unchecked(row);
            let (log2_e, reference) = (_mm512_set1_ps(LOG2_E), _mm512_set1_ps(stats.reference));
            let mask = self.in_vocab & stats.trained_mask;
            let logits = self.logits.as_ptr().add(row * PANEL);
            let lanes = self.lanes.as_mut_ptr().add(row * 2 * LANES);
            let (mut sum, mut max) = (_mm512_loadu_ps(lanes), _mm512_loadu_ps(lanes.add(LANES)));
            let mut exps = [_mm512_setzero_ps(); 2];
            for (half, exp) in exps.iter_mut().enumerate() {
                let logit = _mm512_loadu_ps(logits.add(half * LANES));
                let exponent = _mm512_fmsub_ps(logit, log2_e, reference);
                *exp = exp2(exponent);
                // vmaxps returns its second operand if either is NaN.
                if UNMASKED {
                    max = _mm512_max_ps(exponent, max);
                } else {
                    let mask = (mask >> (half * LANES)) as u16;
                    max = _mm512_mask_max_ps(max, mask, exponent, max);
                    *exp = _mm512_maskz_mov_ps(mask, *exp);
                }
                sum = _mm512_add_ps(sum, *exp);
            }
            _mm512_storeu_ps(lanes, sum);
            _mm512_storeu_ps(lanes.add(LANES), max);
            if KEEP {
                let line = to_bf16(exps);
                let rounded = self.rounded.as_mut_ptr().add(row * PANEL);
                _mm512_storeu_si512(rounded.cast(), line);
                if row % 2 == 1 {
                    // A tile step of B is two tiles of 16 rows, one row for each pair of rows of A.
                    let above = _mm512_loadu_si512(rounded.sub(PANEL).cast());
                    let exps = self.exps.as_mut_ptr().add(row / 2 * PANEL);
                    _mm512_storeu_si512(exps.cast(), _mm512_unpacklo_epi16(above, line));
                    _mm512_storeu_si512(exps.add(TILE / 2).cast(), _mm512_unpackhi_epi16(above, line));
                }
            }
        }
    }
}
