//! RMSNorm, with the residual add that precedes it in every transformer block.
//!
//! Rounding follows transformers' LlamaRMSNorm: h = round(r + x), where r + x may be limited first; the mean of h² and rstd = 1/√(mean + eps) in f32;
//! n = round(h · rstd); y = round(w · n). Backward uses the unrounded n in f32 and rounds dh once.

#![allow(unsafe_code, reason = "vector kernels run where their instructions were detected")]

#[cfg(target_arch = "x86_64")]
mod avx512_bf16;

#[cfg(target_arch = "x86_64")]
use bytemuck::{cast_slice, cast_slice_mut};

use super::isa::each_isa;
use super::launch::{cpu_kernel, floats};
use super::pool::Pool;
use super::rows::check_rows;
use super::stream::{self, STAGE};
use super::work_partition::{Chunks, Optional};
use super::{check_len, check_scratch, columns, math};
use zeroth_kernel::Element;
use zeroth_kernel::{MAX_CLAMPED, RmsNormDims};

/// Rows per task.
const ROWS: usize = columns::BLOCK;

/// y = norm(h) · w with h = residual + x, limited where the dimensions say so. Writes h, y and `rstd [rows]`, which backward needs.
pub fn rms_norm_residual<T: Element>(
    pool: &Pool,
    dims: RmsNormDims,
    x: &[T],
    residual: &[T],
    w: &[T],
    h: &mut [T],
    y: &mut [T],
    rstd: &mut [f32],
) {
    let stride = dims.row_stride;
    check_rows("x", x.len(), [dims.rows, dims.width], stride);
    check_len("residual", residual.len(), x.len());
    check_len("w", w.len(), dims.width);
    check_len("h", h.len(), x.len());
    check_len("y", y.len(), x.len());
    check_len("rstd", rstd.len(), dims.rows);
    let piece = ROWS * stride;
    let parts = (Chunks::new(h, piece), Chunks::new(y, piece), Chunks::new(rstd, ROWS));
    pool.each(parts, |block, (h, y, rstd)| {
        let x = columns::block_of(x, stride, block);
        let residual = columns::block_of(residual, stride, block);
        #[cfg(target_arch = "x86_64")]
        if let Some(subnormals) = avx512_bf16::subnormals::<T>(pool.isa(), dims) {
            let [x, residual, w] = [x, residual, w].map(cast_slice);
            let (h, y) = (cast_slice_mut(h), cast_slice_mut(y));
            // SAFETY: `subnormals` has found the instructions.
            unsafe { avx512_bf16::add_norm_rows(subnormals, dims, stride, x, residual, w, h, y, rstd) };
            return;
        }
        add_norm_rows(pool.isa(), dims, stride, x, residual, w, h, y, rstd);
    });
}

/// y = norm(x) · w. Writes y and `rstd [rows]`.
pub fn rms_norm<T: Element>(pool: &Pool, dims: RmsNormDims, x: &[T], w: &[T], y: &mut [T], rstd: &mut [f32]) {
    let stride = dims.row_stride;
    check_rows("x", x.len(), [dims.rows, dims.width], stride);
    check_len("w", w.len(), dims.width);
    check_len("y", y.len(), x.len());
    check_len("rstd", rstd.len(), dims.rows);
    let parts = (Chunks::new(y, ROWS * stride), Chunks::new(rstd, ROWS));
    pool.each(parts, |block, (y, rstd)| {
        let x = columns::block_of(x, stride, block);
        #[cfg(target_arch = "x86_64")]
        if let Some(subnormals) = avx512_bf16::subnormals::<T>(pool.isa(), dims) {
            let (x, w, y) = (cast_slice(x), cast_slice(w), cast_slice_mut(y));
            // SAFETY: `subnormals` has found the instructions.
            unsafe { avx512_bf16::norm_rows(subnormals, dims, stride, x, w, y, rstd) };
            return;
        }
        norm_rows(pool.isa(), dims, stride, x, w, y, rstd);
    });
}

/// f32 elements of scratch that [`rms_norm_backward`] needs.
pub const fn rms_norm_scratch(dims: RmsNormDims) -> usize {
    columns::partials(dims.rows, dims.width)
}

/// The gradient of [`rms_norm_residual`] and [`rms_norm`]. `h` is the input of the norm: the sum with the residual, or x.
///
/// dh = the norm's gradient + `residual_grad`, the gradient of h from its other uses; it is the gradient of both x and the
/// residual. dw is accumulated in f32. A gradient without a destination is not computed; only dw needs scratch.
pub fn rms_norm_backward<T: Element>(
    pool: &Pool,
    dims: RmsNormDims,
    dy: &[T],
    h: &[T],
    rstd: &[f32],
    w: &[T],
    residual_grad: Option<&[T]>,
    dh: Option<&mut [T]>,
    dw: Option<&mut [f32]>,
    scratch: &mut [f32],
) {
    let width = dims.width;
    let stride = dims.row_stride;
    check_rows("dy", dy.len(), [dims.rows, width], stride);
    check_len("h", h.len(), dy.len());
    check_len("rstd", rstd.len(), dims.rows);
    check_len("w", w.len(), width);
    if let Some(grad) = residual_grad {
        check_len("residual_grad", grad.len(), dy.len());
    }
    if let Some(dh) = &dh {
        check_len("dh", dh.len(), dy.len());
    }
    let partials = if let Some(dw) = &dw {
        check_len("dw", dw.len(), width);
        check_scratch(scratch.len(), rms_norm_scratch(dims));
        &mut scratch[..rms_norm_scratch(dims)]
    } else {
        &mut []
    };
    if dims.rows * width == 0 {
        return;
    }
    let blocks = dims.rows.div_ceil(ROWS);
    let sums = dw.is_some().then(|| Chunks::new(&mut *partials, width));
    let dh = dh.map(|dh| Chunks::new(dh, ROWS * stride));
    pool.each((Optional::new(dh, blocks), Optional::new(sums, blocks)), |block, (dh, mut dw)| {
        if let Some(dw) = dw.as_deref_mut() {
            dw.fill(0.0);
        }
        let dy = columns::block_of(dy, stride, block);
        let h = columns::block_of(h, stride, block);
        let grad = residual_grad.map(|grad| columns::block_of(grad, stride, block));
        let rstd = &rstd[block * ROWS..];
        let Some(dh) = dh else {
            if let Some(dw) = dw {
                weight_rows(pool.isa(), width, stride, dy, h, rstd, dw);
            }
            return;
        };
        #[cfg(target_arch = "x86_64")]
        if let Some(subnormals) = avx512_bf16::subnormals::<T>(pool.isa(), dims) {
            let ([dy, h, w], grad, dh) =
                ([dy, h, w].map(cast_slice), grad.map(cast_slice), cast_slice_mut(dh));
            // SAFETY: `subnormals` has found the instructions.
            unsafe { avx512_bf16::backward_rows(subnormals, [width, stride], dy, h, rstd, w, grad, dh, dw) };
            return;
        }
        backward_rows(pool.isa(), width, stride, dy, h, rstd, w, grad, dh, dw);
    });
    if let Some(dw) = dw {
        columns::add_partials(pool, partials, dw);
    }
}

each_isa! {
    pub(super) fn add<T>(x: &[T], residual: &[T], h: &mut [T]) {
        add_row::<T, false>(x, residual, 0, h);
    }
}

/// h = residual + x for the elements from `first` on; with `CLAMP` limited to ±[`MAX_CLAMPED`].
#[inline(always)]
fn add_row<T: Element, const CLAMP: bool>(x: &[T], residual: &[T], first: usize, h: &mut [T]) {
    for (piece, h) in h.chunks_mut(STAGE).enumerate() {
        let at = first + piece * STAGE;
        stream::prefetch_next_page(x, at, STAGE);
        stream::prefetch_next_page(residual, at, STAGE);
        for ((h, x), residual) in h.iter_mut().zip(&x[at..]).zip(&residual[at..]) {
            let sum = residual.to_f32() + x.to_f32();
            *h = T::from_f32(if CLAMP { sum.clamp(-MAX_CLAMPED, MAX_CLAMPED) } else { sum });
        }
    }
}

/// Normalizes one row; returns its rstd.
#[inline(always)]
pub(super) fn norm_row<T: Element>(eps: f32, h: &[T], w: &[T], y: &mut [T]) -> f32 {
    let squares = math::sum_of(h, |h| h * h);
    let rstd = math::inverse_rms(squares / h.len() as f32, eps);
    for ((y, h), w) in y.iter_mut().zip(h).zip(w) {
        *y = T::from_f32(w.to_f32() * T::from_f32(h.to_f32() * rstd).to_f32());
    }
    rstd
}

each_isa! {
    fn norm_rows<T>(dims: RmsNormDims, stride: usize, h: &[T], w: &[T], y: &mut [T], rstd: &mut [f32]) {
        let width = dims.width;
        for ((h, y), rstd) in h.chunks_exact(stride).zip(y.chunks_exact_mut(stride)).zip(rstd) {
            *rstd = norm_row(dims.eps, &h[..width], w, &mut y[..width]);
        }
    }
}

each_isa! {
    /// Row by row, so that the sum is still in L1 when it is normalized.
    fn add_norm_rows<T>(
        dims: RmsNormDims,
        stride: usize,
        x: &[T],
        residual: &[T],
        w: &[T],
        h: &mut [T],
        y: &mut [T],
        rstd: &mut [f32],
    ) {
        let width = dims.width;
        let rows = h.chunks_exact_mut(stride).zip(y.chunks_exact_mut(stride)).zip(rstd);
        for (row, ((h, y), rstd)) in rows.enumerate() {
            let (h, y) = (&mut h[..width], &mut y[..width]);
            if dims.clamp {
                add_row::<T, true>(x, residual, row * stride, h);
            } else {
                add_row::<T, false>(x, residual, row * stride, h);
            }
            *rstd = norm_row(dims.eps, h, w, y);
        }
    }
}

/// The mean of dy · w · n over a row: the component of the gradient along n.
#[inline(always)]
pub(super) fn along<T: Element>(dy: &[T], w: &[T], h: &[T], rstd: f32) -> f32 {
    math::sum_of_three([dy, w, h], |dy, w, h| dy * w * (h * rstd)) / h.len() as f32
}

/// The gradient of one element of h.
#[inline(always)]
pub(super) fn slope(dy: f32, h: f32, w: f32, rstd: f32, along: f32) -> f32 {
    rstd * (dy * w - h * rstd * along)
}

each_isa! {
    fn backward_rows<T>(
        width: usize,
        stride: usize,
        all_dy: &[T],
        all_h: &[T],
        rstd: &[f32],
        w: &[T],
        residual_grad: Option<&[T]>,
        dh: &mut [T],
        dw: Option<&mut [f32]>,
    ) {
        let mut dw = dw;
        for (row, (dh, &rstd)) in dh.chunks_exact_mut(stride).zip(rstd).enumerate() {
            let (dy, h) = (&all_dy[row * stride..][..width], &all_h[row * stride..][..width]);
            let dh = &mut dh[..width];
            let w = &w[..width];
            let along = along(dy, w, h, rstd);
            let slope = |dy: f32, h: f32, w: f32| slope(dy, h, w, rstd, along);
            for (piece, dh) in dh.chunks_mut(STAGE).enumerate() {
                let (at, place) = (piece * STAGE, row * stride + piece * STAGE);
                // Prefetches the next row while this one is computed.
                for values in [all_dy, all_h].into_iter().chain(residual_grad) {
                    stream::prefetch_read(values.get(place + stride..place + stride + dh.len()).unwrap_or_default());
                }
                let inputs = dy[at..].iter().zip(&h[at..]).zip(&w[at..]);
                if let Some(grad) = residual_grad {
                    for ((dh, ((dy, h), w)), grad) in dh.iter_mut().zip(inputs).zip(&grad[place..]) {
                        *dh = T::from_f32(slope(dy.to_f32(), h.to_f32(), w.to_f32()) + grad.to_f32());
                    }
                } else {
                    for (dh, ((dy, h), w)) in dh.iter_mut().zip(inputs) {
                        *dh = T::from_f32(slope(dy.to_f32(), h.to_f32(), w.to_f32()));
                    }
                }
            }
            if let Some(dw) = dw.as_deref_mut() {
                weight_row(dy, h, rstd, dw);
            }
        }
    }
}

each_isa! {
    /// The gradient of w alone.
    fn weight_rows<T>(width: usize, stride: usize, dy: &[T], h: &[T], rstd: &[f32], dw: &mut [f32]) {
        for ((dy, h), &rstd) in dy.chunks_exact(stride).zip(h.chunks_exact(stride)).zip(rstd) {
            weight_row(&dy[..width], &h[..width], rstd, dw);
        }
    }
}

/// Adds one row's part of the gradient of w.
#[inline(always)]
pub(super) fn weight_row<T: Element>(dy: &[T], h: &[T], rstd: f32, dw: &mut [f32]) {
    for ((dw, dy), h) in dw.iter_mut().zip(dy).zip(h) {
        *dw += dy.to_f32() * (h.to_f32() * rstd);
    }
}

cpu_kernel!(RmsNorm { dims, x, w, y, rstd }, |_| 0, |cx| {
    rms_norm::<T>(cx.pool, dims, cx.read(x)?, cx.read(w)?, cx.write(y)?, cx.write(rstd)?);
});

cpu_kernel!(AddRmsNorm { dims, x, residual, w, h, y, rstd }, |_| 0, |cx| {
    let (x, residual, w) = (cx.read::<T>(x)?, cx.read(residual)?, cx.read(w)?);
    rms_norm_residual(cx.pool, dims, x, residual, w, cx.write(h)?, cx.write(y)?, cx.write(rstd)?);
});

cpu_kernel!(
    RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw },
    |_| if dw.is_some() { floats(rms_norm_scratch(dims)) } else { 0 },
    |cx| {
        let (dy, h, rstd, w) = (cx.read::<T>(dy)?, cx.read(h)?, cx.read(rstd)?, cx.read(w)?);
        let residual = residual.map(|residual| cx.read(residual)).transpose()?;
        let dh = dh.map(|dh| cx.write(dh)).transpose()?;
        let dw = dw.map(|dw| cx.write(dw)).transpose()?;
        rms_norm_backward(cx.pool, dims, dy, h, rstd, w, residual, dh, dw, cx.scratch()?);
    }
);

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};
    use crate::{Isa, normal};

    fn strided_rows_match_contiguous_rows<T: Element>(pool: &Pool, dims: RmsNormDims) {
        let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        let (rows, width) = (dims.rows, dims.width);
        let [x, residual, dy, grad, empty] = [1, 2, 3, 4, 5].map(|name| {
            let together = random::<T>(name, rows * width);
            let apart = apart(&together, width, f32::NAN);
            [together, apart]
        });
        let (w, mut scratch) = (random::<T>(6, width), vec![f32::NAN; rms_norm_scratch(dims)]);
        let padded = RmsNormDims { row_stride: width + APART, ..dims };
        let [(expected, narrow), (found, wide)] = [(0, dims), (1, padded)].map(|(at, dims)| {
            let [mut alone, mut h, mut y, mut dh, mut dh_alone] = [(); 5].map(|()| empty[at].clone());
            let (mut first, mut rstd, mut dw) = (vec![0.0; rows], vec![0.0; rows], vec![0.5; width]);
            rms_norm(pool, dims, &x[at], &w, &mut alone, &mut first);
            rms_norm_residual(pool, dims, &x[at], &residual[at], &w, &mut h, &mut y, &mut rstd);
            for (grad, dh) in [(Some(&grad[at][..]), &mut dh), (None, &mut dh_alone)] {
                let (dh, dw) = (Some(&mut dh[..]), Some(&mut dw[..]));
                rms_norm_backward(pool, dims, &dy[at], &h, &rstd, &w, grad, dh, dw, &mut scratch);
            }
            (bits(&[first, rstd, dw].concat()), [alone, h, y, dh, dh_alone])
        });
        assert_eq!(found, expected, "{case}");
        for (number, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
            assert_eq!(bits(wide), bits(&apart(narrow, width, f32::NAN)), "{case}, output {number}");
        }
    }

    #[test]
    fn row_stride_changes_no_bits_and_padding_is_untouched() {
        for pool in pools() {
            for (rows, width) in [(70, 96), (3, 40), (130, 32), (0, 8)] {
                let dims = RmsNormDims::new(rows, width, 1e-6);
                strided_rows_match_contiguous_rows::<f32>(&pool, dims);
                strided_rows_match_contiguous_rows::<bf16>(&pool, dims);
                strided_rows_match_contiguous_rows::<half::f16>(&pool, dims);
            }
        }
    }

    fn overflown<T: Element>(width: usize) {
        for &isa in Isa::available() {
            let (pool, dims) = (Pool::on_isa(1, isa).unwrap(), RmsNormDims::new(3, width, 1e-6));
            let mut x = vec![T::from_f32(1.0); 3 * width];
            x[width + 5] = T::from_f32(3e38);
            let (w, mut y, mut h, mut rstd) = (vec![T::from_f32(1.0); width], x.clone(), x.clone(), [0.0; 3]);
            let residual = vec![T::from_f32(0.0); 3 * width];
            for with_residual in [false, true] {
                if with_residual {
                    rms_norm_residual(&pool, dims, &x, &residual, &w, &mut h, &mut y, &mut rstd);
                } else {
                    rms_norm(&pool, dims, &x, &w, &mut y, &mut rstd);
                }
                let is_nan = rstd.map(f32::is_nan);
                assert_eq!(is_nan, [false, true, false], "{isa}, {width}: {rstd:?}");
                for (row, y) in y.chunks(width).enumerate() {
                    assert!(y.iter().all(|y| y.to_f32().is_nan() == (row == 1)), "{isa}, {width}, row {row}");
                }
            }
        }
    }

    #[test]
    fn a_row_whose_squares_overflow_is_not_a_number_instead_of_zero() {
        for width in [8, 96] {
            overflown::<f32>(width);
            overflown::<bf16>(width);
        }
    }

    #[test]
    fn bf16_rows_have_the_same_bits_on_every_isa() {
        // Multiples of 32 and not; more rows than one task has. Numbers of 1e-39 are subnormal, which AMX flushes to zero.
        for (width, std) in [(96, 1.0), (768, 1.0), (40, 1.0), (96, 1e-39)] {
            let (dims, elements) = (RmsNormDims::new(70, width, 1e-6), 70 * width);
            let random = |name: u64, count: usize| {
                let mut values = vec![bf16::ZERO; count];
                normal(&Pool::new(1), 9, name, 0, std, &mut values);
                values
            };
            let [x, residual, dy, grad] = [1, 2, 3, 4].map(|name| random(name, elements));
            let w = random(5, width);
            let on = |isa: Isa| {
                let pool = Pool::on_isa(2, isa).unwrap();
                let [mut h, mut y, mut alone, mut dh, mut dh_alone] = [(); 5].map(|()| x.clone());
                let (mut rstd, mut dw, mut scratch) =
                    (vec![0.0; 70], vec![0.5; width], vec![f32::NAN; rms_norm_scratch(dims)]);
                rms_norm(&pool, dims, &x, &w, &mut alone, &mut rstd);
                rms_norm_residual(&pool, dims, &x, &residual, &w, &mut h, &mut y, &mut rstd);
                for (grad, dh) in [(Some(&grad[..]), &mut dh), (None, &mut dh_alone)] {
                    let (dh, dw) = (Some(&mut dh[..]), Some(&mut dw[..]));
                    rms_norm_backward(&pool, dims, &dy, &h, &rstd, &w, grad, dh, dw, &mut scratch);
                }
                let narrow: Vec<u16> =
                    [h, y, alone, dh, dh_alone].concat().into_iter().map(bf16::to_bits).collect();
                (narrow, [rstd, dw].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            let expected = on(Isa::Portable);
            for &isa in Isa::available().iter().filter(|isa| std == 1.0 || **isa != Isa::Amx) {
                assert!(on(isa) == expected, "{isa}, {width} wide, {std:e}");
            }
        }
    }
}
