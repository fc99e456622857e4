//! The second pass for a chunk of the vocabulary: dw as [hidden, vocabulary], turned as it is stored.

use std::arch::x86_64::{
    _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_castsi512_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_setzero_ps,
};

use super::super::blocking::{LANES, RESIDENT};
use crate::avx512::{Room, bits, merged};
use crate::gemm::{Between, PANEL, TILE, Tiles, transpose_from};

/// Writes to dw [vocabulary, hidden], or adds to it, the product of `exps` [panels, steps of rows] and `x` [panels of hidden,
/// steps of rows].
pub(super) fn chunk(
    exps: &[u16],
    x: &[u16],
    steps: usize,
    hidden: usize,
    dw: &mut [f32],
    add: bool,
    scratch: &mut [f32],
) {
    // SAFETY: a machine with tiles has AVX-512; `Isa::available` has looked.
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
    let (mut tiles, mut room) = (Tiles::ready(), Room::new(scratch));
    let (mut next, mut sums) = (room.f32(TILE), room.f32(TILE));
    let group = (RESIDENT / steps).max(1);
    let mut waiting: Option<[usize; 2]> = None;
    for (number, x) in x.chunks(group * steps * TILE).enumerate() {
        for (panel, exps) in exps.chunks_exact(steps * TILE).enumerate() {
            let share = x.len().div_ceil(TILE * steps);
            for (column, x) in x.chunks_exact(steps * TILE).enumerate() {
                let part = exps.len() / share;
                let mut storing = Storing::<ADD> {
                    sums: &*sums,
                    dw,
                    hidden,
                    place: waiting.unwrap_or_default(),
                    quarter: if waiting.is_some() { 0 } else { 4 },
                    beats: 0,
                    ahead: exps.as_ptr().wrapping_add(exps.len() + column * part).cast(),
                };
                tiles.woven::<true>(x, exps, next, &mut storing);
                storing.finish();
                waiting = Some([panel * PANEL, (number * group + column) * PANEL]);
                (next, sums) = (sums, next);
            }
        }
    }
    let quarter = if waiting.is_some() { 0 } else { 4 };
    let place = waiting.unwrap_or_default();
    Storing::<ADD> { sums, dw, hidden, place, quarter, beats: 0, ahead: std::ptr::null() }.finish();
}

/// Stores sums [32 of hidden, 32 of the vocabulary], a quarter at a time, and asks for the powers that come next.
struct Storing<'a, const ADD: bool> {
    sums: &'a [f32],
    dw: &'a mut [f32],
    hidden: usize,
    /// The first row and column of dw.
    place: [usize; 2],
    /// The quarter that comes next, of 4.
    quarter: usize,
    beats: usize,
    ahead: *const u8,
}

impl<const ADD: bool> Between for Storing<'_, ADD> {
    #[inline(always)]
    fn beat(&mut self) {
        // SAFETY: a hint, whatever the address is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.ahead.cast()) }
        self.ahead = self.ahead.wrapping_add(64);
        self.beats += 1;
        // The loads of the next steps wait behind a quarter that is turned.
        if self.beats.is_multiple_of(4) {
            self.next();
        }
    }
}

impl<const ADD: bool> Storing<'_, ADD> {
    #[inline(always)]
    fn next(&mut self) {
        if self.quarter < 4 {
            // SAFETY: a machine with tiles has AVX-512.
            unsafe { self.turn() }
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
    fn turn(&mut self) {
        let [row, column] = [self.place[0], self.place[1] + self.quarter % 2 * LANES];
        let half = self.quarter / 2;
        let mask = bits(0, self.hidden.saturating_sub(column).min(LANES)) as u16;
        let rows = (self.dw.len() / self.hidden).saturating_sub(row);
        assert!(self.sums.len() >= TILE);
        // SAFETY: 16 lines of 16 numbers of the sums.
        let lines = unsafe {
            let start = self.sums.as_ptr().add(self.quarter % 2 * LANES * PANEL + half * LANES);
            transpose_from(start.cast(), PANEL * size_of::<f32>())
        };
        for (at, line) in lines.into_iter().enumerate() {
            let own = merged(half * LANES + at);
            if own >= rows || mask == 0 {
                continue;
            }
            // SAFETY: the row is one of dw's, and the mask leaves the columns that there are.
            unsafe {
                let to = self.dw.as_mut_ptr().add((row + own) * self.hidden + column);
                let before = if ADD { _mm512_maskz_loadu_ps(mask, to) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, _mm512_castsi512_ps(line)));
            }
        }
    }
}
