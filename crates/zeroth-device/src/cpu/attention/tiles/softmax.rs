//! Softmax of 32 queries over a block of keys, streamed: from scores in f32 to weights as tiles read them.

use std::arch::x86_64::{
    __mmask16, _mm512_add_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_mask_max_ps, _mm512_mask_min_ps,
    _mm512_maskz_mov_ps, _mm512_mul_ps, _mm512_reduce_max_ps, _mm512_reduce_min_ps, _mm512_set1_ps,
    _mm512_storeu_ps, _mm512_storeu_si512,
};
use std::ops::Range;

use super::super::SLACK;
use super::super::sizes::{BLOCK, LANES, PANEL};
use super::queue::Queue;
use super::{LINE, STEP};
use crate::cpu::math;
use crate::cpu::panels::{bits, exp2, joined};

/// What 32 queries have seen so far.
pub(super) struct State<'a> {
    /// [32]: what a query's weights are relative to, as an exponent of 2.
    pub(super) peaks: &'a mut [f32],
    /// [32, 16]: the weights' total, in lanes.
    pub(super) lanes: &'a mut [f32],
    /// [32, padded]: the weighted sum of values.
    pub(super) sums: &'a mut [f32],
}

/// Turns `panels` of raw scores [32, BLOCK] into weights relative to each row's peak, and scales what was summed before
/// where a peak moves. `seen` says which keys of the block a row sees, for the rows that there are; without it they see all.
/// Does what waits in `queue` on the way.
pub(super) fn absorb(
    scores: &[f32],
    weights: &mut [u16],
    panels: Range<usize>,
    rows: usize,
    scale: f32,
    seen: Option<&dyn Fn(usize) -> Range<usize>>,
    mut state: State<'_>,
    queue: &mut Queue,
) {
    assert!(rows <= PANEL && scores.len() >= PANEL * BLOCK && weights.len() >= PANEL * BLOCK);
    assert!(panels.end * PANEL <= BLOCK && state.peaks.len() >= rows && state.lanes.len() >= rows * LANES);
    assert!(state.sums.len().is_multiple_of(PANEL * LANES));
    // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; all places were checked above.
    unsafe {
        if let Some(seen) = seen {
            run::<true>(scores, weights, panels, rows, scale, seen, &mut state, queue);
        } else {
            run::<false>(scores, weights, panels, rows, scale, &|_| 0..BLOCK, &mut state, queue);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn run<const MASKED: bool>(
    scores: &[f32],
    weights: &mut [u16],
    panels: Range<usize>,
    rows: usize,
    scale: f32,
    seen: &dyn Fn(usize) -> Range<usize>,
    state: &mut State<'_>,
    queue: &mut Queue,
) {
    let each = queue.left().div_ceil(rows.max(1));
    let scales = _mm512_set1_ps(scale);
    let width = state.sums.len() / PANEL;
    for row in 0..rows {
        let range = if MASKED { seen(row) } else { 0..BLOCK };
        let masks = |panel: usize| -> [__mmask16; 2] {
            if !MASKED {
                return [u16::MAX; 2];
            }
            let first = panel * PANEL;
            let bits = bits(range.start.saturating_sub(first), range.end.saturating_sub(first));
            [bits as u16, (bits >> 16) as u16]
        };
        let scores = scores.as_ptr().wrapping_add(row * BLOCK);
        // SAFETY: the caller has checked all places.
        unsafe {
            let load = |panel: usize, half: usize| _mm512_loadu_ps(scores.add(panel * PANEL + half * LANES));
            let new = if scale >= 0.0 {
                let mut most = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
                for panel in panels.clone() {
                    let masks = masks(panel);
                    for half in 0..2 {
                        // The second operand is what comes out where one is no number.
                        most[half] =
                            _mm512_mask_max_ps(most[half], masks[half], load(panel, half), most[half]);
                    }
                }
                _mm512_reduce_max_ps(_mm512_mask_max_ps(most[0], u16::MAX, most[0], most[1]))
            } else {
                let mut least = [_mm512_set1_ps(f32::INFINITY); 2];
                for panel in panels.clone() {
                    let masks = masks(panel);
                    for half in 0..2 {
                        least[half] =
                            _mm512_mask_min_ps(least[half], masks[half], load(panel, half), least[half]);
                    }
                }
                _mm512_reduce_min_ps(_mm512_mask_min_ps(least[0], u16::MAX, least[0], least[1]))
            } * scale;
            let lanes = state.lanes.as_mut_ptr().add(row * LANES);
            let mut total = _mm512_loadu_ps(lanes);
            let peak = state.peaks.get_unchecked_mut(row);
            if new > *peak + SLACK {
                let shrink = _mm512_set1_ps(math::exp2::<true>(*peak - new));
                *peak = new;
                total = _mm512_mul_ps(total, shrink);
                for sums in state.sums[row * width..][..width].as_chunks_mut::<LANES>().0 {
                    _mm512_storeu_ps(
                        sums.as_mut_ptr(),
                        _mm512_mul_ps(_mm512_loadu_ps(sums.as_ptr()), shrink),
                    );
                }
            }
            let peak = _mm512_set1_ps(*peak);
            let out = weights.as_mut_ptr().add(row * LINE);
            for panel in panels.clone() {
                let masks = masks(panel);
                let mut pair = [_mm512_set1_ps(0.0); 2];
                for half in 0..2 {
                    let weight = exp2(_mm512_fmsub_ps(load(panel, half), scales, peak));
                    pair[half] = if MASKED { _mm512_maskz_mov_ps(masks[half], weight) } else { weight };
                    total = _mm512_add_ps(total, pair[half]);
                }
                _mm512_storeu_si512(out.add(panel * STEP / 2).cast(), joined(pair));
            }
            _mm512_storeu_ps(lanes, total);
        }
        queue.advance(each);
    }
}
