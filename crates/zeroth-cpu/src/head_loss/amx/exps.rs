//! The first pass for 32 rows and a block of the vocabulary: logits, their powers, and what they bring to dx.

use std::arch::x86_64::{
    _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_max_ps, _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::f32::consts::LOG2_E;

use super::super::blocking::LANES;
use super::Mark;
use crate::avx512::{Room, bits, exp2, joined};
use crate::gemm::{Between, Nothing, PANEL, TILE, Tiles};
use crate::work_partition::Tile;

/// A block of the vocabulary.
pub(super) struct Block<'a> {
    /// Whether rows begin with it.
    pub(super) is_first: bool,
    pub(super) columns: usize,
    /// Columns of logits and of dx, packed.
    pub(super) w: [&'a [u16]; 2],
}

/// 32 rows.
pub(super) struct Rows<'a> {
    /// [steps of hidden], packed.
    pub(super) x: &'a [u16],
    pub(super) marks: &'a [Mark],
    pub(super) lanes: &'a mut [f32],
}

/// Adds a block to what rows have in their lanes and, with gradients, keeps its powers and adds them, times w, to sums of dx.
pub(super) fn advance(
    block: &Block,
    rows: Rows,
    gradients: Option<(&mut Tile<u16>, &mut [f32])>,
    scratch: &mut [f32],
) {
    assert!(rows.marks.len() == PANEL && rows.lanes.len() == PANEL * 2 * LANES);
    // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; `Isa::available` has looked.
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
    let Rows { x, marks, lanes } = rows;
    if block.is_first {
        for lanes in lanes.chunks_exact_mut(2 * LANES) {
            lanes[..LANES].fill(0.0);
            lanes[LANES..].fill(f32::NEG_INFINITY);
        }
    }
    let (mut tiles, mut room) = (Tiles::ready(), Room::new(scratch));
    let (mut next, mut logits) = (room.f32(TILE), room.f32(TILE));
    let panels = block.columns.div_ceil(PANEL);
    let rounded = room.bf16(panels * TILE);
    let whole = marks.iter().all(|mark| mark.live == u32::MAX);
    let each = PANEL.div_ceil((2 * x.len() / TILE).max(1));
    for panel in 0..=panels {
        let w = block.w[0].get(panel * x.len()..(panel + 1) * x.len());
        if panel == 0 {
            tiles.whole(x, w.unwrap_or_default(), next, false, &mut Nothing);
        } else {
            let exps = match &mut exps {
                Some(exps) => exps.row(panel - 1),
                None => &mut [],
            };
            assert!(!KEEP || exps.len() >= TILE, "a step of powers");
            let seen = bits(0, block.columns - (panel - 1) * PANEL);
            let mut powers = Powers::<KEEP> {
                logits: logits.first_chunk().expect("32 rows of 32"),
                marks: marks.first_chunk().expect("32 rows"),
                lanes: lanes.first_chunk_mut().expect("32 rows"),
                seen,
                whole: whole && seen == u32::MAX,
                rounded: rounded[(panel - 1) * TILE..].first_chunk_mut().expect("a step"),
                exps,
                row: 0,
                each,
            };
            if let Some(w) = w {
                tiles.woven::<false>(x, w, next, &mut powers);
            }
            powers.finish();
        }
        (next, logits) = (logits, next);
    }
    if KEEP {
        for (sums, w) in sums.chunks_exact_mut(TILE).zip(block.w[1].chunks_exact(panels * TILE)) {
            let mut hints = Hints { at: sums.as_ptr().wrapping_add(2 * TILE).cast() };
            tiles.whole(rounded, w, sums, !block.is_first, &mut hints);
        }
    }
}

/// Asks for the sums that come after the next ones.
struct Hints {
    at: *const u8,
}

impl Between for Hints {
    #[inline(always)]
    fn beat(&mut self) {
        for line in 0..8 {
            // SAFETY: a hint, whatever the address is.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at.wrapping_add(64 * line).cast()) }
        }
        self.at = self.at.wrapping_add(512);
    }
}

/// From logits [32 rows, 32 columns] to powers, a row at a time.
struct Powers<'a, const KEEP: bool> {
    logits: &'a [f32; TILE],
    marks: &'a [Mark; PANEL],
    lanes: &'a mut [f32; PANEL * 2 * LANES],
    /// The columns that there are.
    seen: u32,
    /// Whether all rows are trained and all columns there.
    whole: bool,
    /// As rows of dx's product, and as columns of dw's.
    rounded: &'a mut [u16; TILE],
    exps: &'a mut [u16],
    /// The row that comes next, and rows a beat.
    row: usize,
    each: usize,
}

impl<const KEEP: bool> Between for Powers<'_, KEEP> {
    #[inline(always)]
    fn beat(&mut self) {
        for _ in 0..self.each {
            self.next();
        }
    }
}

impl<const KEEP: bool> Powers<'_, KEEP> {
    #[inline(always)]
    fn next(&mut self) {
        if self.row < PANEL {
            // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; the row is one of 32.
            unsafe {
                if self.whole {
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

    /// Inlined into a function with the instructions of tiles.
    #[inline(always)]
    unsafe fn one_row<const WHOLE: bool>(&mut self) {
        let row = self.row;
        // SAFETY: as above; all places are those of one of 32 rows.
        unsafe {
            let mark = self.marks.get_unchecked(row);
            let (log2_e, reference) = (_mm512_set1_ps(LOG2_E), _mm512_set1_ps(mark.reference));
            let mask = self.seen & mark.live;
            let logits = self.logits.as_ptr().add(row * PANEL);
            let lanes = self.lanes.as_mut_ptr().add(row * 2 * LANES);
            let (mut sum, mut most) = (_mm512_loadu_ps(lanes), _mm512_loadu_ps(lanes.add(LANES)));
            let mut powers = [_mm512_setzero_ps(); 2];
            for (half, power) in powers.iter_mut().enumerate() {
                let logit = _mm512_loadu_ps(logits.add(half * LANES));
                let exponent = _mm512_fmsub_ps(logit, log2_e, reference);
                *power = exp2(exponent);
                // The second operand is what comes out where one is no number.
                if WHOLE {
                    most = _mm512_max_ps(exponent, most);
                } else {
                    let mask = (mask >> (half * LANES)) as u16;
                    most = _mm512_mask_max_ps(most, mask, exponent, most);
                    *power = _mm512_maskz_mov_ps(mask, *power);
                }
                sum = _mm512_add_ps(sum, *power);
            }
            _mm512_storeu_ps(lanes, sum);
            _mm512_storeu_ps(lanes.add(LANES), most);
            if KEEP {
                let line = joined(powers);
                let rounded = self.rounded.as_mut_ptr().add(row * PANEL);
                _mm512_storeu_si512(rounded.cast(), line);
                if row % 2 == 1 {
                    // A step of columns is two tiles of 16 lines, one for each pair of rows.
                    let above = _mm512_loadu_si512(rounded.sub(PANEL).cast());
                    let exps = self.exps.as_mut_ptr().add(row / 2 * PANEL);
                    _mm512_storeu_si512(exps.cast(), _mm512_unpacklo_epi16(above, line));
                    _mm512_storeu_si512(exps.add(TILE / 2).cast(), _mm512_unpackhi_epi16(above, line));
                }
            }
        }
    }
}
