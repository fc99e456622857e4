//! Both directions for heads of bf16 that turn as a whole, in registers, with the processor's own conversions. Sums are
//! in the lanes and the tree of [`crate::math`].
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps, _mm512_sub_ps,
};

use zeroth_base::DType;

use super::heads::{Heads, Places};
use crate::isa::Isa;
use crate::lines::{self, AHEAD, LANES, load, rounded, store, total};
use zeroth_kernel::Element;
use zeroth_kernel::HeadNormRopeDims;
use zeroth_kernel::RopeDims;

/// Whether heads of this type and size are done here.
pub(super) fn fit<T: Element>(path: Isa, dims: HeadNormRopeDims) -> bool {
    let RopeDims { head_dim, rotated, .. } = dims.rope;
    lines::fit::<T>(path) && [64, 128].contains(&head_dim) && rotated == head_dim
}

/// As the plain loop of the same name.
pub(super) fn norm_and_turn(
    dims: HeadNormRopeDims,
    places: Places,
    x: &[u16],
    w: &[u16],
    angles: [&[f32]; 2],
    y: &mut Heads<impl Element>,
    rstd: &mut [f32],
) {
    check(dims, y, w, angles);
    // SAFETY: the path has the instructions, as `fit` has asked; lengths were checked.
    unsafe {
        match dims.rope.head_dim {
            64 => forward::<4>(dims, places, x, w.as_ptr(), angles, y, rstd),
            _ => forward::<8>(dims, places, x, w.as_ptr(), angles, y, rstd),
        }
    }
}

/// As the plain loop of the same name; dw is written.
pub(super) fn backward_heads(
    dims: HeadNormRopeDims,
    places: Places,
    both: [&[u16]; 2],
    rstd: &[f32],
    w: &[u16],
    angles: [&[f32]; 2],
    dh: &mut Heads<impl Element>,
    dw: &mut [f32],
) {
    check(dims, dh, w, angles);
    assert!(dw.len() == dims.rope.head_dim, "dw of a head");
    // SAFETY: the path has the instructions, as `fit` has asked; lengths were checked.
    unsafe {
        match dims.rope.head_dim {
            64 => backward::<4>(dims, places, both, rstd, w.as_ptr(), angles, dh, dw),
            _ => backward::<8>(dims, places, both, rstd, w.as_ptr(), angles, dh, dw),
        }
    }
}

fn check<T: Element>(dims: HeadNormRopeDims, heads: &Heads<T>, w: &[u16], angles: [&[f32]; 2]) {
    let RopeDims { head_dim, heads: of_token, .. } = dims.rope;
    assert!(w.len() == head_dim && T::DTYPE == DType::Bf16);
    let tokens = heads.numbers().end.div_ceil(of_token);
    assert!(angles.iter().all(|angles| angles.len() >= tokens * head_dim / 2), "angles of {tokens} tokens");
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn forward<const N: usize>(
    dims: HeadNormRopeDims,
    places: Places,
    all_x: &[u16],
    w: *const u16,
    [cos, sin]: [&[f32]; 2],
    all_y: &mut Heads<impl Element>,
    rstd: &mut [f32],
) {
    let width = N * LANES;
    // SAFETY: the caller has checked angles and w; all heads have the width, and hints may have any address.
    unsafe {
        let weights: [__m512; N] = std::array::from_fn(|i| load(w.add(i * LANES)));
        for (head, rstd) in all_y.numbers().zip(rstd) {
            let x = all_x[places.of(head)].as_ptr();
            ask(x, width);
            let mut h: [__m512; N] = std::array::from_fn(|i| load(x.add(i * LANES)));
            let mut lanes = _mm512_setzero_ps();
            for h in h {
                lanes = _mm512_add_ps(lanes, _mm512_mul_ps(h, h));
            }
            let scale = 1.0 / (total(lanes) / width as f32 + dims.eps).sqrt();
            *rstd = scale;
            let scale = _mm512_set1_ps(scale);
            for (h, w) in h.chunks_exact_mut(2).zip(weights.chunks_exact(2)) {
                let normed = rounded([_mm512_mul_ps(h[0], scale), _mm512_mul_ps(h[1], scale)]);
                let normed = rounded([_mm512_mul_ps(w[0], normed[0]), _mm512_mul_ps(w[1], normed[1])]);
                h.copy_from_slice(&normed);
            }
            let place = head / dims.rope.heads * (width / 2);
            let turned = turned::<N>(h, cos.as_ptr().add(place), sin.as_ptr().add(place), false);
            let y = all_y.head(head).as_mut_ptr().cast::<u16>();
            for (i, pair) in turned.as_chunks::<2>().0.iter().enumerate() {
                store(*pair, y.add(i * 2 * LANES));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn backward<const N: usize>(
    dims: HeadNormRopeDims,
    places: Places,
    [all_dy, all_h]: [&[u16]; 2],
    rstd: &[f32],
    w: *const u16,
    [cos, sin]: [&[f32]; 2],
    all_dh: &mut Heads<impl Element>,
    dw: &mut [f32],
) {
    let width = N * LANES;
    // SAFETY: the caller has checked angles, w and dw; all heads have the width, and hints may have any address.
    unsafe {
        let weights: [__m512; N] = std::array::from_fn(|i| load(w.add(i * LANES)));
        let mut sums = [_mm512_setzero_ps(); N];
        for head in all_dh.numbers() {
            let [dy, h] = [all_dy, all_h].map(|values| values[places.of(head)].as_ptr());
            ask(dy, width);
            ask(h, width);
            let place = head / dims.rope.heads * (width / 2);
            let dy: [__m512; N] = std::array::from_fn(|i| load(dy.add(i * LANES)));
            let dy = turned::<N>(dy, cos.as_ptr().add(place), sin.as_ptr().add(place), true);
            let dy: [__m512; N] = {
                let mut near = dy;
                near.chunks_exact_mut(2).for_each(|pair| pair.copy_from_slice(&rounded([pair[0], pair[1]])));
                near
            };
            let scale = _mm512_set1_ps(rstd[head]);
            let normed: [__m512; N] = std::array::from_fn(|i| _mm512_mul_ps(load(h.add(i * LANES)), scale));
            let weighed: [__m512; N] = std::array::from_fn(|i| _mm512_mul_ps(dy[i], weights[i]));
            let mut lanes = _mm512_setzero_ps();
            for i in 0..N {
                lanes = _mm512_add_ps(lanes, _mm512_mul_ps(weighed[i], normed[i]));
                sums[i] = _mm512_add_ps(sums[i], _mm512_mul_ps(dy[i], normed[i]));
            }
            let along = _mm512_set1_ps(total(lanes) / width as f32);
            let slope =
                |i: usize| _mm512_mul_ps(scale, _mm512_sub_ps(weighed[i], _mm512_mul_ps(normed[i], along)));
            let dh = all_dh.head(head).as_mut_ptr().cast::<u16>();
            for i in (0..N).step_by(2) {
                store([slope(i), slope(i + 1)], dh.add(i * LANES));
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(dw.as_mut_ptr().add(i * LANES), sums);
        }
    }
}

/// A head after its turn, or its turn back, not rounded.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn turned<const N: usize>(
    head: [__m512; N],
    cos: *const f32,
    sin: *const f32,
    back: bool,
) -> [__m512; N] {
    let (mut out, half) = (head, N / 2);
    for i in 0..half {
        let (u, v) = (head[i], head[half + i]);
        // SAFETY: the caller has angles for half of the head.
        let (cos, sin) =
            unsafe { (_mm512_loadu_ps(cos.add(i * LANES)), _mm512_loadu_ps(sin.add(i * LANES))) };
        let (near, far) = (_mm512_mul_ps(u, cos), _mm512_mul_ps(v, cos));
        let (across, along) = (_mm512_mul_ps(v, sin), _mm512_mul_ps(u, sin));
        (out[i], out[half + i]) = if back {
            (_mm512_add_ps(near, across), _mm512_sub_ps(far, along))
        } else {
            (_mm512_sub_ps(near, across), _mm512_add_ps(far, along))
        };
    }
    out
}

/// Asks for a head that comes later.
#[inline]
#[target_feature(enable = "avx512f")]
fn ask(at: *const u16, width: usize) {
    for line in (0..width).step_by(2 * LANES) {
        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line).cast());
    }
}
