//! Softmax weights of 32 keys by 32 queries and the gradients of their scores, packed for AMX.

use std::arch::x86_64::{
    _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_maskz_mov_ps, _mm512_maskz_mul_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};

use super::super::blocking::{PANEL, SKEWED};
use super::context::TileContext;
use super::tile_matmul::PipelinedMatmuls;
use super::{LANES, STEP, TILE_ROW, exp2_fast};
use crate::avx512::to_bf16;

/// Raw scores and gradients of weights of 32 keys and 32 queries.
pub(super) struct ScoreTile<'a> {
    /// [32 keys, 32 queries].
    pub(super) scores: &'a [f32],
    /// Gradients of the weights after dropout [32 keys, 32 queries].
    pub(super) grads: &'a [f32],
    /// Row statistics of each query.
    pub(super) lse: &'a [f32],
    pub(super) delta: &'a [f32],
    pub(super) scale: f32,
    /// For each key a mask of the queries that see it; without it all do.
    pub(super) visible: Option<&'a [u32; PANEL]>,
    pub(super) context: TileContext<'a>,
}

/// Outputs of a tile, one tile step of a panel each.
pub(super) struct ScoreGrads<'a> {
    /// Weights after dropout, packed as A [keys, queries].
    pub(super) weights: &'a mut [u16],
    /// Score gradients packed as A [keys, queries].
    pub(super) grads: &'a mut [u16],
    /// Score gradients packed as B [keys, queries], columns in [`crate::avx512::unpack_order`].
    pub(super) ds_b: &'a mut [u16],
    /// Score gradients as f32, where that of biases is computed: row r is shifted by 31 - r in 64 columns. The others stay as they
    /// are.
    pub(super) skewed: Option<&'a mut [f32; SKEWED]>,
}

/// Computes weights and score gradients. Masked elements are zeros. Advances `pipelined` on the way.
pub(super) fn softmax_backward(
    tile: &ScoreTile<'_>,
    mut out: ScoreGrads<'_>,
    pipelined: Option<&mut PipelinedMatmuls<2>>,
) {
    for input in [tile.scores, tile.grads] {
        assert!(input.len() >= PANEL * PANEL);
    }
    assert!(tile.lse.len() >= PANEL && tile.delta.len() >= PANEL);
    for out in [&out.weights, &out.grads, &out.ds_b] {
        assert!(out.len() >= STEP / 2);
    }
    let TileContext { bias, dropout } = &tile.context;
    let is_plain = bias.is_none() && dropout.is_none() && out.skewed.is_none();
    // SAFETY: AMX implies AVX-512 and its bf16 conversions; all lengths were checked above.
    unsafe {
        match (is_plain, tile.visible) {
            (true, None) => run::<false, false>(tile, &mut out, pipelined),
            (true, Some(_)) => run::<true, false>(tile, &mut out, pipelined),
            (false, _) => run::<true, true>(tile, &mut out, pipelined),
        }
    }
}

/// The sums of the columns of a skewed tile: of column c, the gradients with the query's position less the key's c - 31 from that of
/// the tile's first.
pub(super) fn diagonal_sums(skewed: &[f32; SKEWED]) -> [f32; 2 * PANEL] {
    #[target_feature(enable = "avx512f")]
    fn run(skewed: &[f32; SKEWED]) -> [f32; 2 * PANEL] {
        let mut sums = [0.0; 2 * PANEL];
        for row in skewed.as_chunks::<{ 2 * PANEL }>().0 {
            sums.iter_mut().zip(row).for_each(|(sum, grad)| *sum += grad);
        }
        sums
    }
    // SAFETY: AMX implies AVX-512.
    unsafe { run(skewed) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn run<const MASKED: bool, const CONTEXT: bool>(
    tile: &ScoreTile<'_>,
    out: &mut ScoreGrads<'_>,
    mut pipelined: Option<&mut PipelinedMatmuls<2>>,
) {
    let (scores, grads, scale) = (tile.scores, tile.grads, _mm512_set1_ps(tile.scale));
    let visible = tile.visible.unwrap_or(&[u32::MAX; PANEL]);
    // SAFETY: the caller has checked all lengths.
    unsafe {
        let both = |from: &[f32]| [_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(LANES))];
        let (lse, delta) = (both(tile.lse), both(tile.delta));
        for pair in 0..PANEL / 2 {
            let mut rows = [_mm512_setzero_si512(); 2];
            for (odd, row) in rows.iter_mut().enumerate() {
                let key = 2 * pair + odd;
                let (mut weights, mut ds) = ([_mm512_set1_ps(0.0); 2], [_mm512_set1_ps(0.0); 2]);
                for half in 0..2 {
                    let offset = key * PANEL + half * LANES;
                    let score = _mm512_loadu_ps(scores.as_ptr().add(offset));
                    let mut grad = _mm512_loadu_ps(grads.as_ptr().add(offset));
                    let exponent = if CONTEXT {
                        _mm512_sub_ps(tile.context.exponents(key, half, score, scale), lse[half])
                    } else {
                        _mm512_fmsub_ps(score, scale, lse[half])
                    };
                    let weight = exp2_fast(exponent);
                    if CONTEXT && let Some(dropout) = tile.context.dropout {
                        grad = dropout.apply(key, half, grad);
                    }
                    let centered = _mm512_sub_ps(grad, delta[half]);
                    if MASKED {
                        let mask = (visible[key] >> (half * LANES)) as u16;
                        weights[half] = _mm512_maskz_mov_ps(mask, weight);
                        ds[half] = _mm512_maskz_mul_ps(mask, weight, centered);
                    } else {
                        weights[half] = weight;
                        ds[half] = _mm512_mul_ps(weight, centered);
                    }
                    if CONTEXT && let Some(dropout) = tile.context.dropout {
                        weights[half] = dropout.apply(key, half, weights[half]);
                    }
                    if CONTEXT && let Some(skewed) = &mut out.skewed {
                        // Row 31 with lane 31 ends at column 62 of the last row.
                        let place = key * 2 * PANEL + PANEL - 1 - key + half * LANES;
                        _mm512_storeu_ps(skewed.as_mut_ptr().add(place), ds[half]);
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
