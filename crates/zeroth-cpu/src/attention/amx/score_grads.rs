//! Softmax weights of 32 keys by 32 queries and the gradients of their scores, as tiles read them.

use std::arch::x86_64::{
    _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_maskz_mov_ps, _mm512_maskz_mul_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_si512, _mm512_sub_ps, _mm512_unpackhi_epi16,
    _mm512_unpacklo_epi16,
};

use super::super::blocking::PANEL;
use super::tile_matmul::Woven;
use super::{LANES, LINE, STEP, power};
use crate::avx512::joined;

/// What becomes of a tile: a step of a panel each.
pub(super) struct Turned<'a> {
    /// Weights, keys as rows.
    pub(super) weights: &'a mut [u16],
    /// Gradients, keys as rows.
    pub(super) grads: &'a mut [u16],
    /// Gradients as columns over keys; [`crate::avx512::merged`] says which query is in which column.
    pub(super) columns: &'a mut [u16],
}

/// From raw scores and the gradients of weights, both [32 keys, 32 queries]. `seen` has the bits of queries that see a key; without
/// it all do. Others get zeros. Does what is woven in on the way.
pub(super) fn differentiate(
    [scores, grads]: [&[f32]; 2],
    [lse, delta]: [&[f32]; 2],
    scale: f32,
    seen: Option<&[u32; PANEL]>,
    mut out: Turned<'_>,
    woven: Option<&mut Woven<2>>,
) {
    for input in [scores, grads] {
        assert!(input.len() >= PANEL * PANEL);
    }
    assert!(lse.len() >= PANEL && delta.len() >= PANEL);
    for out in [&out.weights, &out.grads, &out.columns] {
        assert!(out.len() >= STEP / 2);
    }
    // SAFETY: a machine with tiles has AVX-512 and its bf16 conversions; all places were checked above.
    unsafe {
        if let Some(seen) = seen {
            run::<true>([scores, grads], [lse, delta], scale, seen, &mut out, woven);
        } else {
            run::<false>([scores, grads], [lse, delta], scale, &[u32::MAX; PANEL], &mut out, woven);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn run<const MASKED: bool>(
    [scores, grads]: [&[f32]; 2],
    [lse, delta]: [&[f32]; 2],
    scale: f32,
    seen: &[u32; PANEL],
    out: &mut Turned<'_>,
    mut woven: Option<&mut Woven<2>>,
) {
    let scale = _mm512_set1_ps(scale);
    // SAFETY: the caller has checked all places.
    unsafe {
        let both = |from: &[f32]| [_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(LANES))];
        let (lse, delta) = (both(lse), both(delta));
        for pair in 0..PANEL / 2 {
            let mut lines = [_mm512_setzero_si512(); 2];
            for (odd, line) in lines.iter_mut().enumerate() {
                let key = 2 * pair + odd;
                let (mut weights, mut slopes) = ([_mm512_set1_ps(0.0); 2], [_mm512_set1_ps(0.0); 2]);
                for half in 0..2 {
                    let place = key * PANEL + half * LANES;
                    let score = _mm512_loadu_ps(scores.as_ptr().add(place));
                    let grad = _mm512_loadu_ps(grads.as_ptr().add(place));
                    let weight = power(_mm512_fmsub_ps(score, scale, lse[half]));
                    let slope = _mm512_sub_ps(grad, delta[half]);
                    if MASKED {
                        let mask = (seen[key] >> (half * LANES)) as u16;
                        weights[half] = _mm512_maskz_mov_ps(mask, weight);
                        slopes[half] = _mm512_maskz_mul_ps(mask, weight, slope);
                    } else {
                        weights[half] = weight;
                        slopes[half] = _mm512_mul_ps(weight, slope);
                    }
                }
                *line = joined(slopes);
                _mm512_storeu_si512(out.weights.as_mut_ptr().add(key * LINE).cast(), joined(weights));
                _mm512_storeu_si512(out.grads.as_mut_ptr().add(key * LINE).cast(), *line);
            }
            let columns = out.columns.as_mut_ptr().add(pair * LINE);
            let (low, high) =
                (_mm512_unpacklo_epi16(lines[0], lines[1]), _mm512_unpackhi_epi16(lines[0], lines[1]));
            _mm512_storeu_si512(columns.cast(), low);
            _mm512_storeu_si512(columns.add(STEP / 4).cast(), high);
            if let Some(woven) = &mut woven {
                woven.beat();
            }
        }
        if let Some(woven) = woven {
            woven.finish();
        }
    }
}
