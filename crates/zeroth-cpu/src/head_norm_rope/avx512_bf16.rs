//! Head norm and rotation, forward and backward, for bf16 heads of 64 or 128 elements that are rotated whole: a head stays in
//! registers. Sums use the lanes and the tree of [`crate::math`], so that the bits are those of the portable loops,
//! subnormals aside.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_sub_ps,
};

use zeroth_kernel::{Element, HeadNormRopeDims, RopeDims};

use super::heads::{HeadLayout, Heads};
use crate::avx512_bf16::{
    LANES, LINE, Subnormals, lane_sum, load, load_f32, prefetch, store_f32, store_line,
};
use crate::isa::Isa;
use crate::math::inverse_rms;

/// How heads of this type and size are rounded here; `None` where the portable loops take them.
pub(super) fn subnormals<T: Element>(isa: Isa, dims: HeadNormRopeDims) -> Option<Subnormals> {
    let RopeDims { head_dim, rotated, .. } = dims.rope;
    Subnormals::of::<T>(isa).filter(|_| [64, 128].contains(&head_dim) && rotated == head_dim)
}

/// The portable loop of the same name.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn norm_and_rotate(
    subnormals: Subnormals,
    dims: HeadNormRopeDims,
    layout: HeadLayout,
    x: &[u16],
    w: &[u16],
    angles: [&[f32]; 2],
    y: &mut Heads<impl Element>,
    rstd: &mut [f32],
) {
    match dims.rope.head_dim {
        64 => forward::<4>(subnormals, dims, layout, x, w, angles, y, rstd),
        _ => forward::<8>(subnormals, dims, layout, x, w, angles, y, rstd),
    }
}

/// The portable loop of the same name; dw is written where there is one.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn backward_heads(
    subnormals: Subnormals,
    dims: HeadNormRopeDims,
    layout: HeadLayout,
    inputs: [&[u16]; 2],
    rstd: &[f32],
    w: &[u16],
    angles: [&[f32]; 2],
    dh: &mut Heads<impl Element>,
    dw: Option<&mut [f32]>,
) {
    match dims.rope.head_dim {
        64 => backward::<4>(subnormals, dims, layout, inputs, rstd, w, angles, dh, dw),
        _ => backward::<8>(subnormals, dims, layout, inputs, rstd, w, angles, dh, dw),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn forward<const N: usize>(
    subnormals: Subnormals,
    dims: HeadNormRopeDims,
    layout: HeadLayout,
    all_x: &[u16],
    w: &[u16],
    angles: [&[f32]; 2],
    all_y: &mut Heads<impl Element>,
    rstd: &mut [f32],
) {
    let width = N * LANES;
    let w = load_head::<N>(w);
    for (head, rstd) in all_y.numbers().zip(rstd) {
        let x = &all_x[layout.range(head)];
        prefetch_head(x);
        let mut h = load_head::<N>(x);
        let mut lanes = _mm512_setzero_ps();
        for h in h {
            lanes = _mm512_add_ps(lanes, _mm512_mul_ps(h, h));
        }
        *rstd = inverse_rms(lane_sum(lanes) / width as f32, dims.eps);
        let scale = _mm512_set1_ps(*rstd);
        for (h, w) in h.as_chunks_mut().0.iter_mut().zip(w.as_chunks::<2>().0) {
            let normed = subnormals.round(h.map(|h| _mm512_mul_ps(h, scale)));
            *h = subnormals.round([0, 1].map(|i| _mm512_mul_ps(w[i], normed[i])));
        }
        let [cos, sin] = angles.map(|angles| of_token::<N>(dims, head, angles));
        store_head(subnormals, rotate(h, cos, sin, false), all_y.head(head));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn backward<const N: usize>(
    subnormals: Subnormals,
    dims: HeadNormRopeDims,
    layout: HeadLayout,
    inputs: [&[u16]; 2],
    rstd: &[f32],
    w: &[u16],
    angles: [&[f32]; 2],
    all_dh: &mut Heads<impl Element>,
    dw: Option<&mut [f32]>,
) {
    let (width, sums_dw) = (N * LANES, dw.is_some());
    let w = load_head::<N>(w);
    let mut sums = [_mm512_setzero_ps(); N];
    for head in all_dh.numbers() {
        let [dy, h] = inputs.map(|values| &values[layout.range(head)]);
        prefetch_head(dy);
        prefetch_head(h);
        let [cos, sin] = angles.map(|angles| of_token::<N>(dims, head, angles));
        let mut dy = rotate(load_head::<N>(dy), cos, sin, true);
        for pair in dy.as_chunks_mut().0 {
            *pair = subnormals.round(*pair);
        }
        let scale = _mm512_set1_ps(rstd[head]);
        let normed = load_head::<N>(h).map(|h| _mm512_mul_ps(h, scale));
        let weighted: [__m512; N] = std::array::from_fn(|i| _mm512_mul_ps(dy[i], w[i]));
        let mut lanes = _mm512_setzero_ps();
        for i in 0..N {
            lanes = _mm512_add_ps(lanes, _mm512_mul_ps(weighted[i], normed[i]));
        }
        if sums_dw {
            for i in 0..N {
                sums[i] = _mm512_add_ps(sums[i], _mm512_mul_ps(dy[i], normed[i]));
            }
        }
        let along = _mm512_set1_ps(lane_sum(lanes) / width as f32);
        let slope = std::array::from_fn(|i| {
            _mm512_mul_ps(scale, _mm512_sub_ps(weighted[i], _mm512_mul_ps(normed[i], along)))
        });
        store_head::<N>(subnormals, slope, all_dh.head(head));
    }
    if let Some(dw) = dw {
        for (sums, dw) in sums.into_iter().zip(dw.as_chunks_mut().0) {
            store_f32(sums, dw);
        }
    }
}

/// The angles of the token that a head belongs to.
fn of_token<const N: usize>(dims: HeadNormRopeDims, head: usize, angles: &[f32]) -> &[[f32; LANES]] {
    let pairs = N * LANES / 2;
    angles[head / dims.rope.heads * pairs..][..pairs].as_chunks().0
}

/// A head of N vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_head<const N: usize>(head: &[u16]) -> [__m512; N] {
    let (vectors, _) = head[..N * LANES].as_chunks();
    std::array::from_fn(|i| load(&vectors[i]))
}

/// Rounds a head and stores it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn store_head<const N: usize>(subnormals: Subnormals, head: [__m512; N], to: &mut [impl Element]) {
    let (lines, _) = bytemuck::cast_slice_mut(to).as_chunks_mut::<LINE>();
    for (pair, line) in head.as_chunks().0.iter().zip(lines) {
        store_line(subnormals.narrow(*pair), line);
    }
}

/// A head rotated by its angles, or back by them; not rounded.
#[inline]
#[target_feature(enable = "avx512f")]
fn rotate<const N: usize>(
    head: [__m512; N],
    cos: &[[f32; LANES]],
    sin: &[[f32; LANES]],
    back: bool,
) -> [__m512; N] {
    let (mut out, half) = (head, N / 2);
    for i in 0..half {
        let (u, v) = (head[i], head[half + i]);
        let (cos, sin) = (load_f32(&cos[i]), load_f32(&sin[i]));
        let (u_cos, v_cos) = (_mm512_mul_ps(u, cos), _mm512_mul_ps(v, cos));
        let (u_sin, v_sin) = (_mm512_mul_ps(u, sin), _mm512_mul_ps(v, sin));
        (out[i], out[half + i]) = if back {
            (_mm512_add_ps(u_cos, v_sin), _mm512_sub_ps(v_cos, u_sin))
        } else {
            (_mm512_sub_ps(u_cos, v_sin), _mm512_add_ps(v_cos, u_sin))
        };
    }
    out
}

/// Prefetches the head a page later.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch_head(head: &[u16]) {
    for line in head.as_chunks::<LINE>().0 {
        prefetch(line);
    }
}
