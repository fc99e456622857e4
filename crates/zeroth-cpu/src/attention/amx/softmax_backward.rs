//! Softmax weights of 32 keys by 32 queries and the gradients of their scores, packed for AMX.

use std::arch::x86_64::{
    _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_maskz_mov_ps, _mm512_maskz_mul_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_si512, _mm512_sub_ps, _mm512_unpackhi_epi16,
    _mm512_unpacklo_epi16,
};

use super::super::blocking::PANEL;
use super::tile_matmul::PipelinedMatmuls;
use super::{LANES, STEP, TILE_ROW, exp2_fast};
use crate::avx512::to_bf16;

/// Outputs of a tile, one tile step of a panel each.
pub(super) struct ScoreGrads<'a> {
    /// Weights packed as A [keys, queries].
    pub(super) weights: &'a mut [u16],
    /// Score gradients packed as A [keys, queries].
    pub(super) grads: &'a mut [u16],
    /// Score gradients packed as B [keys, queries], columns in [`crate::avx512::unpack_order`].
    pub(super) ds_b: &'a mut [u16],
}

/// Computes weights and score gradients from raw scores and gradients of weights, both [32 keys, 32 queries]. `visible` masks the
/// queries that see each key; without it all do. Masked elements are zeros. Advances `pipelined` on the way.
pub(super) fn softmax_backward(
    [scores, grads]: [&[f32]; 2],
    [lse, delta]: [&[f32]; 2],
    scale: f32,
    visible: Option<&[u32; PANEL]>,
    mut out: ScoreGrads<'_>,
    pipelined: Option<&mut PipelinedMatmuls<2>>,
) {
    for input in [scores, grads] {
        assert!(input.len() >= PANEL * PANEL);
    }
    assert!(lse.len() >= PANEL && delta.len() >= PANEL);
    for out in [&out.weights, &out.grads, &out.ds_b] {
        assert!(out.len() >= STEP / 2);
    }
    // SAFETY: AMX implies AVX-512 and its bf16 conversions; all lengths were checked above.
    unsafe {
        if let Some(visible) = visible {
            run::<true>([scores, grads], [lse, delta], scale, visible, &mut out, pipelined);
        } else {
            run::<false>([scores, grads], [lse, delta], scale, &[u32::MAX; PANEL], &mut out, pipelined);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn run<const MASKED: bool>(
    [scores, grads]: [&[f32]; 2],
    [lse, delta]: [&[f32]; 2],
    scale: f32,
    visible: &[u32; PANEL],
    out: &mut ScoreGrads<'_>,
    mut pipelined: Option<&mut PipelinedMatmuls<2>>,
) {
    let scale = _mm512_set1_ps(scale);
    // SAFETY: the caller has checked all lengths.
    unsafe {
        let both = |from: &[f32]| [_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(LANES))];
        let (lse, delta) = (both(lse), both(delta));
        for pair in 0..PANEL / 2 {
            let mut rows = [_mm512_setzero_si512(); 2];
            for (odd, row) in rows.iter_mut().enumerate() {
                let key = 2 * pair + odd;
                let (mut weights, mut ds) = ([_mm512_set1_ps(0.0); 2], [_mm512_set1_ps(0.0); 2]);
                for half in 0..2 {
                    let offset = key * PANEL + half * LANES;
                    let score = _mm512_loadu_ps(scores.as_ptr().add(offset));
                    let grad = _mm512_loadu_ps(grads.as_ptr().add(offset));
                    let weight = exp2_fast(_mm512_fmsub_ps(score, scale, lse[half]));
                    let centered = _mm512_sub_ps(grad, delta[half]);
                    if MASKED {
                        let mask = (visible[key] >> (half * LANES)) as u16;
                        weights[half] = _mm512_maskz_mov_ps(mask, weight);
                        ds[half] = _mm512_maskz_mul_ps(mask, weight, centered);
                    } else {
                        weights[half] = weight;
                        ds[half] = _mm512_mul_ps(weight, centered);
                    }
                }
                *row = to_bf16(ds);
                _mm512_storeu_si512(out.weights.as_mut_ptr().add(key * TILE_ROW).cast(), to_bf16(weights));
                _mm512_storeu_si512(out.grads.as_mut_ptr().add(key * TILE_ROW).cast(), *row);
            }
            let ds_b = out.ds_b.as_mut_ptr().add(pair * TILE_ROW);
            let (low, high) =
                (_mm512_unpacklo_epi16(rows[0], rows[1]), _mm512_unpackhi_epi16(rows[0], rows[1]));
            _mm512_storeu_si512(ds_b.cast(), low);
            _mm512_storeu_si512(ds_b.add(STEP / 4).cast(), high);
            if let Some(pipelined) = &mut pipelined {
                pipelined.advance();
            }
        }
        if let Some(pipelined) = pipelined {
            pipelined.finish();
        }
    }
}
