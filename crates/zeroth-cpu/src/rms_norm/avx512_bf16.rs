//! RMSNorm forward and backward for rows of bf16. Sums use the lanes and the tree of [`crate::math`], so that the bits are
//! those of the portable loops, subnormals aside.

use std::arch::x86_64::{_mm512_add_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_sub_ps};

use zeroth_kernel::{Element, RmsNormDims};

use crate::avx512_bf16::{
    LANES, LINE, Subnormals, lane_sum, load_f32, load_line, prefetch, store_f32, store_line, widen_line,
};
use crate::isa::Isa;
use crate::math::inverse_rms;

/// A row, or a piece of one, in cache lines.
type Lines = [[u16; LINE]];

/// How rows of this type and width are rounded here; `None` where the portable loops take them. Sums are limited in fp16 only.
pub(super) fn subnormals<T: Element>(isa: Isa, dims: RmsNormDims) -> Option<Subnormals> {
    Subnormals::of::<T>(isa).filter(|_| dims.width.is_multiple_of(LINE) && !dims.clamp)
}

fn lines(row: &[u16]) -> &Lines {
    row.as_chunks().0
}

fn lines_mut(row: &mut [u16]) -> &mut Lines {
    row.as_chunks_mut().0
}

/// The portable loop of the same name.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn add_norm_rows(
    subnormals: Subnormals,
    dims: RmsNormDims,
    stride: usize,
    x: &[u16],
    residual: &[u16],
    w: &[u16],
    h: &mut [u16],
    y: &mut [u16],
    rstd: &mut [f32],
) {
    let width = dims.width;
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let row = row * stride..row * stride + width;
        let h = lines_mut(&mut h[row.clone()]);
        let squares = add(subnormals, lines(&x[row.clone()]), lines(&residual[row.clone()]), h);
        *rstd = norm(subnormals, squares, dims, h, lines(w), lines_mut(&mut y[row]));
    }
}

/// The portable loop of the same name.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn norm_rows(
    subnormals: Subnormals,
    dims: RmsNormDims,
    stride: usize,
    h: &[u16],
    w: &[u16],
    y: &mut [u16],
    rstd: &mut [f32],
) {
    let width = dims.width;
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let row = row * stride..row * stride + width;
        let h = lines(&h[row.clone()]);
        let mut lanes = _mm512_setzero_ps();
        for h in h {
            for value in load_line(h) {
                lanes = _mm512_add_ps(lanes, _mm512_mul_ps(value, value));
            }
        }
        *rstd = norm(subnormals, lane_sum(lanes), dims, h, lines(w), lines_mut(&mut y[row]));
    }
}

/// The portable loop of the same name.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn backward_rows(
    subnormals: Subnormals,
    [width, stride]: [usize; 2],
    dy: &[u16],
    h: &[u16],
    rstd: &[f32],
    w: &[u16],
    residual_grad: Option<&[u16]>,
    dh: &mut [u16],
    mut dw: Option<&mut [f32]>,
) {
    for (dh, (row, &rstd)) in dh.chunks_exact_mut(stride).zip(rstd.iter().enumerate()) {
        let row = row * stride..row * stride + width;
        let inputs = [&dy[row.clone()], &h[row.clone()], w].map(lines);
        let grad = residual_grad.map(|grad| lines(&grad[row]));
        backward(subnormals, inputs, rstd, grad, lines_mut(&mut dh[..width]), dw.as_deref_mut());
    }
}

/// h = x + residual; returns the sum of its squares.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn add(subnormals: Subnormals, x: &Lines, residual: &Lines, h: &mut Lines) -> f32 {
    let mut lanes = _mm512_setzero_ps();
    for ((x, residual), h) in x.iter().zip(residual).zip(h) {
        prefetch(x);
        prefetch(residual);
        let (x, residual) = (load_line(x), load_line(residual));
        let sum = subnormals.narrow([0, 1].map(|i| _mm512_add_ps(residual[i], x[i])));
        store_line(sum, h);
        for value in widen_line(sum) {
            lanes = _mm512_add_ps(lanes, _mm512_mul_ps(value, value));
        }
    }
    lane_sum(lanes)
}

/// Normalizes a row with this sum of squares; returns its rstd.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn norm(subnormals: Subnormals, squares: f32, dims: RmsNormDims, h: &Lines, w: &Lines, y: &mut Lines) -> f32 {
    let rstd = inverse_rms(squares / dims.width as f32, dims.eps);
    let scale = _mm512_set1_ps(rstd);
    for ((h, w), y) in h.iter().zip(w).zip(y) {
        let normed = subnormals.round(load_line(h).map(|h| _mm512_mul_ps(h, scale)));
        let w = load_line(w);
        store_line(subnormals.narrow([0, 1].map(|i| _mm512_mul_ps(w[i], normed[i]))), y);
    }
    rstd
}

/// dh of one row, with `grad` added where there is one; adds to dw where there is one.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn backward(
    subnormals: Subnormals,
    [dy, h, w]: [&Lines; 3],
    rstd: f32,
    grad: Option<&Lines>,
    dh: &mut Lines,
    mut dw: Option<&mut [f32]>,
) {
    let (width, scale) = (dh.len() * LINE, _mm512_set1_ps(rstd));
    // dy · w, and h as it was normalized.
    let terms = |line: usize| {
        let (dy, h, w) = (load_line(&dy[line]), load_line(&h[line]), load_line(&w[line]));
        (dy, [0, 1].map(|i| _mm512_mul_ps(dy[i], w[i])), h.map(|h| _mm512_mul_ps(h, scale)))
    };
    let mut lanes = _mm512_setzero_ps();
    for line in 0..dh.len() {
        let (_, weighted, normed) = terms(line);
        for i in 0..2 {
            lanes = _mm512_add_ps(lanes, _mm512_mul_ps(weighted[i], normed[i]));
        }
    }
    let along = _mm512_set1_ps(lane_sum(lanes) / width as f32);
    for (line, dh) in dh.iter_mut().enumerate() {
        prefetch(&dy[line]);
        prefetch(&h[line]);
        let (dy, weighted, normed) = terms(line);
        if let Some(dw) = dw.as_deref_mut() {
            let (sums, _) = dw[line * LINE..][..LINE].as_chunks_mut::<LANES>();
            for i in 0..2 {
                store_f32(_mm512_add_ps(load_f32(&sums[i]), _mm512_mul_ps(dy[i], normed[i])), &mut sums[i]);
            }
        }
        let slope =
            [0, 1].map(|i| _mm512_mul_ps(scale, _mm512_sub_ps(weighted[i], _mm512_mul_ps(normed[i], along))));
        let slope = match grad {
            Some(grad) => {
                prefetch(&grad[line]);
                let grad = load_line(&grad[line]);
                [0, 1].map(|i| _mm512_add_ps(slope[i], grad[i]))
            }
            None => slope,
        };
        store_line(subnormals.narrow(slope), dh);
    }
}
