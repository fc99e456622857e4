//! Online softmax of 32 keys by 32 queries: from f32 scores to weights packed for AMX. A query is a vector lane.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _CMP_GT_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmsub_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_max_ps, _mm512_mask_mov_ps, _mm512_maskz_mov_ps,
    _mm512_max_ps, _mm512_mul_ps, _mm512_permutexvar_epi16, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::super::blocking::PANEL;
use super::super::tasks::RESCALE_THRESHOLD;
use super::context::TileContext;
use super::tile_matmul::PipelinedMatmuls;
use super::{LANES, STEP, TILE_ROW, exp2_fast};
use crate::avx512::to_bf16;
use crate::gemm::interleave;

/// Online softmax state of 32 queries.
pub(super) struct SoftmaxState {
    /// Reference of each query's weights, as an exponent of 2.
    pub(super) running_max: [f32; PANEL],
    /// Sum of each query's weights.
    pub(super) running_sum: [f32; PANEL],
}

impl SoftmaxState {
    pub(super) const NEW: Self = Self { running_max: [f32::NEG_INFINITY; PANEL], running_sum: [0.0; PANEL] };
}

/// Raw scores of 32 keys and 32 queries.
pub(super) struct ScoreTile<'a> {
    /// [32 keys, 32 queries].
    pub(super) raw: &'a [f32; PANEL * PANEL],
    pub(super) scale: f32,
    /// For each key a mask of the queries that see it; without it all do.
    pub(super) visible: Option<&'a [u32; PANEL]>,
    pub(super) context: TileContext<'a>,
}

impl ScoreTile<'_> {
    /// Computes weights relative to the running maximum and adds them to the running sum, advancing `pipelined` on the way. If a
    /// score exceeds a maximum by more than `limit`, leaves the sum as it was and returns false: the maximum must be raised first.
    pub(super) fn update(
        &self,
        limit: f32,
        weights: &mut [u16; STEP / 2],
        state: &mut SoftmaxState,
        pipelined: Option<&mut PipelinedMatmuls<1>>,
    ) -> bool {
        let is_plain = self.context.bias.is_none() && self.context.dropout.is_none();
        // SAFETY: AMX implies AVX-512 and its bf16 conversions.
        unsafe {
            match (is_plain, self.visible) {
                (true, None) => update::<false, false>(self, limit, weights, state, pipelined),
                (true, Some(_)) => update::<true, false>(self, limit, weights, state, pipelined),
                (false, _) => update::<true, true>(self, limit, weights, state, pipelined),
            }
        }
    }

    /// Raises each maximum that is exceeded by too much, rescales its sum, and returns the factors for the accumulators.
    pub(super) fn raise_max(&self, state: &mut SoftmaxState) -> [f32; PANEL] {
        // SAFETY: as above.
        unsafe { raise_max(self, state) }
    }
}

/// The mask of half a row.
#[inline(always)]
fn half_of(bits: u32, half: usize) -> __mmask16 {
    (bits >> (half * LANES)) as u16
}

/// Lane 2i takes element i of the first 16, lane 2i + 1 element i of the second 16.
const INTERLEAVE: [u16; TILE_ROW] = interleave(16);

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn update<const MASKED: bool, const CONTEXT: bool>(
    tile: &ScoreTile<'_>,
    limit: f32,
    weights: &mut [u16; STEP / 2],
    state: &mut SoftmaxState,
    mut pipelined: Option<&mut PipelinedMatmuls<1>>,
) -> bool {
    let (raw, scale) = (tile.raw, _mm512_set1_ps(tile.scale));
    let visible = tile.visible.unwrap_or(&[u32::MAX; PANEL]);
    // SAFETY: all addresses are inside fixed-size arrays.
    unsafe {
        let interleave = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
        let running_max = both(&state.running_max);
        let mut running_sum = both(&state.running_sum);
        let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for pair in 0..PANEL / 2 {
            for half in 0..2 {
                let mut rows = [_mm512_setzero_ps(); 2];
                for (odd, row) in rows.iter_mut().enumerate() {
                    let key = 2 * pair + odd;
                    let score = _mm512_loadu_ps(raw.as_ptr().add(key * PANEL + half * LANES));
                    let exponent = if CONTEXT {
                        _mm512_sub_ps(tile.context.exponents(key, half, score, scale), running_max[half])
                    } else {
                        _mm512_fmsub_ps(score, scale, running_max[half])
                    };
                    let weight = exp2_fast(exponent);
                    // vmaxps returns its second operand if either is NaN.
                    if MASKED {
                        let mask = half_of(visible[key], half);
                        max[half] = _mm512_mask_max_ps(max[half], mask, exponent, max[half]);
                        *row = _mm512_maskz_mov_ps(mask, weight);
                    } else {
                        max[half] = _mm512_max_ps(exponent, max[half]);
                        *row = weight;
                    }
                    running_sum[half] = _mm512_add_ps(running_sum[half], *row);
                    if CONTEXT && let Some(dropout) = tile.context.dropout {
                        *row = dropout.apply(key, half, *row);
                    }
                }
                let line: __m512i = _mm512_permutexvar_epi16(interleave, to_bf16(rows));
                _mm512_storeu_si512(weights.as_mut_ptr().add(half * STEP / 4 + pair * TILE_ROW).cast(), line);
            }
            if let Some(pipelined) = &mut pipelined {
                pipelined.advance();
            }
        }
        if let Some(pipelined) = pipelined {
            pipelined.finish();
        }
        if _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_max_ps(max[0], max[1]), _mm512_set1_ps(limit)) != 0 {
            return false;
        }
        for (half, running_sum) in running_sum.into_iter().enumerate() {
            _mm512_storeu_ps(state.running_sum.as_mut_ptr().add(half * LANES), running_sum);
        }
        true
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn raise_max(tile: &ScoreTile<'_>, state: &mut SoftmaxState) -> [f32; PANEL] {
    let (raw, scale) = (tile.raw, _mm512_set1_ps(tile.scale));
    let visible = tile.visible.unwrap_or(&[u32::MAX; PANEL]);
    let mut factors = [1.0; PANEL];
    // SAFETY: all addresses are inside fixed-size arrays.
    unsafe {
        let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for (key, visible) in visible.iter().enumerate() {
            for (half, max) in max.iter_mut().enumerate() {
                let score = _mm512_loadu_ps(raw.as_ptr().add(key * PANEL + half * LANES));
                let score = tile.context.exponents(key, half, score, scale);
                *max = _mm512_mask_max_ps(*max, half_of(*visible, half), score, *max);
            }
        }
        let (running_max, running_sum) = (both(&state.running_max), both(&state.running_sum));
        for half in 0..2 {
            let limit = _mm512_add_ps(running_max[half], _mm512_set1_ps(RESCALE_THRESHOLD));
            let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(max[half], limit);
            let new = _mm512_mask_mov_ps(running_max[half], moved, max[half]);
            let shrink = exp2_fast(_mm512_sub_ps(running_max[half], new));
            let shrink = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), moved, shrink);
            _mm512_storeu_ps(factors.as_mut_ptr().add(half * LANES), shrink);
            _mm512_storeu_ps(state.running_max.as_mut_ptr().add(half * LANES), new);
            let running_sum = _mm512_mul_ps(running_sum[half], shrink);
            _mm512_storeu_ps(state.running_sum.as_mut_ptr().add(half * LANES), running_sum);
        }
    }
    factors
}

/// Loads 32 elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn both(from: &[f32; PANEL]) -> [__m512; 2] {
    // SAFETY: inside the array.
    unsafe { [_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(LANES))] }
}
