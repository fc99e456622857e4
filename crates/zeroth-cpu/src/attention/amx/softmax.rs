//! Softmax of 32 keys by 32 queries, streamed: from scores in f32 to weights as tiles read them. A query is a lane.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _CMP_GT_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmsub_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_max_ps, _mm512_mask_mov_ps, _mm512_maskz_mov_ps,
    _mm512_max_ps, _mm512_mul_ps, _mm512_permutexvar_epi16, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::super::SLACK;
use super::super::blocking::PANEL;
use super::tile_matmul::Woven;
use super::{LANES, LINE, STEP, power};
use crate::avx512::joined;

/// What 32 queries have seen so far.
pub(super) struct State {
    /// What a query's weights are relative to, as an exponent of 2.
    pub(super) peaks: [f32; PANEL],
    /// The total of its weights.
    pub(super) totals: [f32; PANEL],
}

impl State {
    pub(super) const NEW: Self = Self { peaks: [f32::NEG_INFINITY; PANEL], totals: [0.0; PANEL] };
}

/// Raw scores of 32 keys and 32 queries.
pub(super) struct Scores<'a> {
    /// [32 keys, 32 queries].
    pub(super) raw: &'a [f32; PANEL * PANEL],
    pub(super) scale: f32,
    /// Bits of the queries that see a key; without them all do.
    pub(super) seen: Option<&'a [u32; PANEL]>,
}

impl Scores<'_> {
    /// Writes weights relative to the peaks and adds them to the totals, beside what is woven in. Where a query's scores go
    /// beyond its peak by more than `limit`, totals stay and it returns false: peaks have to move first.
    pub(super) fn absorb(
        &self,
        limit: f32,
        weights: &mut [u16; STEP / 2],
        state: &mut State,
        woven: Option<&mut Woven<1>>,
    ) -> bool {
        // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions.
        unsafe {
            match self.seen {
                Some(seen) => absorb::<true>(self.raw, self.scale, seen, limit, weights, state, woven),
                None => {
                    absorb::<false>(self.raw, self.scale, &[u32::MAX; PANEL], limit, weights, state, woven)
                }
            }
        }
    }

    /// Moves the peaks that scores pass by too far, scales their totals, and returns what sums have to be scaled by.
    pub(super) fn move_peaks(&self, state: &mut State) -> [f32; PANEL] {
        // SAFETY: as above.
        unsafe { move_peaks(self.raw, self.scale, self.seen.unwrap_or(&[u32::MAX; PANEL]), state) }
    }
}

/// The bits of half a row.
#[inline(always)]
fn half_of(bits: u32, half: usize) -> __mmask16 {
    (bits >> (half * LANES)) as u16
}

/// Lane 2i takes number i of the first 16, lane 2i + 1 number i of the others.
const INTERLEAVE: [u16; LINE] = {
    let (mut lanes, mut i) = ([0; LINE], 0);
    while i < LINE {
        lanes[i] = (i / 2 + i % 2 * LANES) as u16;
        i += 1;
    }
    lanes
};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn absorb<const MASKED: bool>(
    raw: &[f32; PANEL * PANEL],
    scale: f32,
    seen: &[u32; PANEL],
    limit: f32,
    weights: &mut [u16; STEP / 2],
    state: &mut State,
    mut woven: Option<&mut Woven<1>>,
) -> bool {
    let scale = _mm512_set1_ps(scale);
    // SAFETY: all places are within arrays whose lengths are known.
    unsafe {
        let interleave = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
        let peaks = both(&state.peaks);
        let mut totals = both(&state.totals);
        let mut most = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for pair in 0..PANEL / 2 {
            for half in 0..2 {
                let mut rows = [_mm512_setzero_ps(); 2];
                for odd in 0..2 {
                    let score = _mm512_loadu_ps(raw.as_ptr().add((2 * pair + odd) * PANEL + half * LANES));
                    let exponent = _mm512_fmsub_ps(score, scale, peaks[half]);
                    let weight = power(exponent);
                    // The second operand is what comes out where one is no number.
                    if MASKED {
                        let mask = half_of(seen[2 * pair + odd], half);
                        most[half] = _mm512_mask_max_ps(most[half], mask, exponent, most[half]);
                        rows[odd] = _mm512_maskz_mov_ps(mask, weight);
                    } else {
                        most[half] = _mm512_max_ps(exponent, most[half]);
                        rows[odd] = weight;
                    }
                    totals[half] = _mm512_add_ps(totals[half], rows[odd]);
                }
                let line: __m512i = _mm512_permutexvar_epi16(interleave, joined(rows));
                _mm512_storeu_si512(weights.as_mut_ptr().add(half * STEP / 4 + pair * LINE).cast(), line);
            }
            if let Some(woven) = &mut woven {
                woven.beat();
            }
        }
        if let Some(woven) = woven {
            woven.finish();
        }
        if _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_max_ps(most[0], most[1]), _mm512_set1_ps(limit)) != 0 {
            return false;
        }
        for (half, totals) in totals.into_iter().enumerate() {
            _mm512_storeu_ps(state.totals.as_mut_ptr().add(half * LANES), totals);
        }
        true
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn move_peaks(
    raw: &[f32; PANEL * PANEL],
    scale: f32,
    seen: &[u32; PANEL],
    state: &mut State,
) -> [f32; PANEL] {
    let scale = _mm512_set1_ps(scale);
    let mut factors = [1.0; PANEL];
    // SAFETY: all places are within arrays whose lengths are known.
    unsafe {
        let mut most = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for (key, seen) in seen.iter().enumerate() {
            for (half, most) in most.iter_mut().enumerate() {
                let score =
                    _mm512_mul_ps(_mm512_loadu_ps(raw.as_ptr().add(key * PANEL + half * LANES)), scale);
                *most = _mm512_mask_max_ps(*most, half_of(*seen, half), score, *most);
            }
        }
        let (peaks, totals) = (both(&state.peaks), both(&state.totals));
        for half in 0..2 {
            let limit = _mm512_add_ps(peaks[half], _mm512_set1_ps(SLACK));
            let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most[half], limit);
            let new = _mm512_mask_mov_ps(peaks[half], moved, most[half]);
            let shrink = power(_mm512_sub_ps(peaks[half], new));
            let shrink = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), moved, shrink);
            _mm512_storeu_ps(factors.as_mut_ptr().add(half * LANES), shrink);
            _mm512_storeu_ps(state.peaks.as_mut_ptr().add(half * LANES), new);
            let totals = _mm512_mul_ps(totals[half], shrink);
            _mm512_storeu_ps(state.totals.as_mut_ptr().add(half * LANES), totals);
        }
    }
    factors
}

/// 32 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn both(from: &[f32; PANEL]) -> [__m512; 2] {
    // SAFETY: within the array.
    unsafe { [_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(LANES))] }
}
