//! RMSNorm of every head followed by RoPE in one pass, as Qwen 3 applies them to q and k, and their gradient.
//!
//! The norm is rounded before the rotation, and the gradient is rounded after it is rotated back: the bits are those of
//! [`super::rms_norm()`] followed by [`super::rope()`].

#![allow(unsafe_code, reason = "vector kernels run where their instructions were detected")]

#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod heads;

#[cfg(target_arch = "x86_64")]
use bytemuck::cast_slice;
use heads::{HeadBlocks, HeadLayout, Heads};

use super::isa::each_isa;
use super::launch::{cpu_kernel, floats};
use super::pool::Pool;
use super::rms_norm::{along, norm_row, rms_norm_scratch, slope, weight_row};
use super::rope::{rotate_head, rotate_head_from, rotate_pair};
use super::stream;
use super::work_partition::{Chunks, Optional};
use super::{check_len, check_scratch, columns};
use zeroth_kernel::Element;
use zeroth_kernel::HeadNormRopeDims;
use zeroth_kernel::RmsNormDims;
use zeroth_kernel::RopeDims;

fn check(dims: HeadNormRopeDims, cos: &[f32], sin: &[f32]) {
    let RopeDims { rows, head_dim, rotated, .. } = dims.rope;
    assert!(
        rotated <= head_dim && rotated.is_multiple_of(2),
        "{rotated} of {head_dim} elements of a head cannot be rotated in pairs"
    );
    check_len("cos", cos.len(), rows * (rotated / 2));
    check_len("sin", sin.len(), rows * (rotated / 2));
}

/// y = RoPE(norm(x) · w) per head. Writes y and `rstd [rows, heads]`.
pub fn head_norm_rope<T: Element>(
    pool: &Pool,
    dims: HeadNormRopeDims,
    x: &[T],
    w: &[T],
    cos: &[f32],
    sin: &[f32],
    y: &mut [T],
    rstd: &mut [f32],
) {
    let RmsNormDims { rows, width, .. } = dims.norm();
    check(dims, cos, sin);
    let layout = HeadLayout::new("x", x.len(), dims.rope);
    check_len("w", w.len(), width);
    check_len("y", y.len(), x.len());
    check_len("rstd", rstd.len(), rows);
    if rows * width == 0 {
        return;
    }
    let parts = (HeadBlocks::new("y", y, dims.rope), Chunks::new(rstd, columns::BLOCK));
    pool.each(parts, |_, (mut y, rstd)| {
        #[cfg(target_arch = "x86_64")]
        if let Some(subnormals) = avx512_bf16::subnormals::<T>(pool.isa(), dims) {
            let (x, w, angles) = (cast_slice(x), cast_slice(w), [cos, sin]);
            // SAFETY: `subnormals` has found the instructions.
            unsafe { avx512_bf16::norm_and_rotate(subnormals, dims, layout, x, w, angles, &mut y, rstd) };
            return;
        }
        norm_and_rotate(pool.isa(), dims, layout, x, w, cos, sin, &mut y, rstd);
    });
}

/// f32 elements of scratch that [`head_norm_rope_backward`] needs.
pub const fn head_norm_rope_scratch(dims: HeadNormRopeDims) -> usize {
    rms_norm_scratch(dims.norm())
}

/// The gradient of [`head_norm_rope`] with input `h`. Writes dh; dw is accumulated in f32. A gradient without a destination is
/// not computed; only dw needs scratch.
pub fn head_norm_rope_backward<T: Element>(
    pool: &Pool,
    dims: HeadNormRopeDims,
    dy: &[T],
    h: &[T],
    rstd: &[f32],
    w: &[T],
    cos: &[f32],
    sin: &[f32],
    dh: Option<&mut [T]>,
    dw: Option<&mut [f32]>,
    scratch: &mut [f32],
) {
    let RmsNormDims { rows, width, .. } = dims.norm();
    check(dims, cos, sin);
    let layout = HeadLayout::new("dy", dy.len(), dims.rope);
    check_len("h", h.len(), dy.len());
    check_len("rstd", rstd.len(), rows);
    check_len("w", w.len(), width);
    if let Some(dh) = &dh {
        check_len("dh", dh.len(), dy.len());
    }
    let partials = if let Some(dw) = &dw {
        check_len("dw", dw.len(), width);
        check_scratch(scratch.len(), head_norm_rope_scratch(dims));
        &mut scratch[..head_norm_rope_scratch(dims)]
    } else {
        &mut []
    };
    if rows * width == 0 {
        return;
    }
    let blocks = rows.div_ceil(columns::BLOCK);
    let sums = dw.is_some().then(|| Chunks::new(&mut *partials, width));
    let dh = dh.map(|dh| HeadBlocks::new("dh", dh, dims.rope));
    pool.each((Optional::new(dh, blocks), Optional::new(sums, blocks)), |block, (dh, mut dw)| {
        let Some(mut dh) = dh else {
            if let Some(dw) = dw {
                dw.fill(0.0);
                weight_heads(pool.isa(), dims, layout, block, dy, h, rstd, cos, sin, dw);
            }
            return;
        };
        #[cfg(target_arch = "x86_64")]
        if let Some(subnormals) = avx512_bf16::subnormals::<T>(pool.isa(), dims) {
            let (inputs, w, angles) = ([dy, h].map(cast_slice), cast_slice(w), [cos, sin]);
            // SAFETY: `subnormals` has found the instructions.
            unsafe {
                avx512_bf16::backward_heads(subnormals, dims, layout, inputs, rstd, w, angles, &mut dh, dw);
            }
            return;
        }
        if let Some(dw) = dw.as_deref_mut() {
            dw.fill(0.0);
        }
        backward_heads(pool.isa(), dims, layout, dy, h, rstd, w, cos, sin, &mut dh, dw);
    });
    if let Some(dw) = dw {
        columns::add_partials(pool, partials, dw);
    }
}

/// The angles of the token that a head belongs to.
#[inline(always)]
fn of_token(dims: HeadNormRopeDims, head: usize, angles: &[f32]) -> &[f32] {
    let pairs = dims.rope.rotated / 2;
    &angles[head / dims.rope.heads * pairs..][..pairs]
}

each_isa! {
    /// Head by head, so that the head is still in L1 when it is rotated.
    fn norm_and_rotate<T>(
        dims: HeadNormRopeDims,
        layout: HeadLayout,
        x: &[T],
        w: &[T],
        cos: &[f32],
        sin: &[f32],
        all_y: &mut Heads<T>,
        rstd: &mut [f32],
    ) {
        for (head, rstd) in all_y.numbers().zip(rstd) {
            let y = all_y.head(head);
            *rstd = norm_row(dims.eps, &x[layout.range(head)], w, y);
            rotate_head(y, of_token(dims, head, cos), of_token(dims, head, sin), 1.0);
        }
    }
}

each_isa! {
    fn backward_heads<T>(
        dims: HeadNormRopeDims,
        layout: HeadLayout,
        all_dy: &[T],
        all_h: &[T],
        rstd: &[f32],
        w: &[T],
        cos: &[f32],
        sin: &[f32],
        all_dh: &mut Heads<T>,
        dw: Option<&mut [f32]>,
    ) {
        let mut dw = dw;
        let w = &w[..dims.rope.head_dim];
        for head in all_dh.numbers() {
            let (dy, h, dh, rstd) =
                (&all_dy[layout.range(head)], &all_h[layout.range(head)], all_dh.head(head), rstd[head]);
            // Prefetches the next head while this one is computed.
            for values in [all_dy, all_h] {
                stream::prefetch_read(values.get(layout.range(head + 1)).unwrap_or_default());
            }
            rotate_head_from(dy, dh, of_token(dims, head, cos), of_token(dims, head, sin), -1.0);
            let along = along(dh, w, h, rstd);
            if let Some(dw) = dw.as_deref_mut() {
                weight_row(dh, h, rstd, dw);
            }
            for ((dh, h), w) in dh.iter_mut().zip(h).zip(w) {
                *dh = T::from_f32(slope(dh.to_f32(), h.to_f32(), w.to_f32(), rstd, along));
            }
        }
    }
}

each_isa! {
    /// The gradient of w alone, for a block of heads: dy is rotated back and rounded a pair at a time.
    fn weight_heads<T>(
        dims: HeadNormRopeDims,
        layout: HeadLayout,
        block: usize,
        all_dy: &[T],
        all_h: &[T],
        rstd: &[f32],
        cos: &[f32],
        sin: &[f32],
        dw: &mut [f32],
    ) {
        let first = block * columns::BLOCK;
        for head in first..rstd.len().min(first + columns::BLOCK) {
            let (dy, h, rstd) = (&all_dy[layout.range(head)], &all_h[layout.range(head)], rstd[head]);
            let angles = of_token(dims, head, cos).iter().zip(of_token(dims, head, sin));
            let pairs = dims.rope.rotated / 2;
            for (a, (&cos, &sin)) in angles.enumerate() {
                let b = a + pairs;
                let rotated = rotate_pair(dy[a], dy[b], cos, -sin);
                for (at, dy) in [a, b].into_iter().zip(rotated) {
                    dw[at] += dy.to_f32() * (h[at].to_f32() * rstd);
                }
            }
            weight_row(&dy[2 * pairs..], &h[2 * pairs..], rstd, &mut dw[2 * pairs..]);
        }
    }
}

cpu_kernel!(HeadNormRope { dims, x, w, cos, sin, y, rstd }, |_| 0, |cx| {
    let (x, w, cos, sin) = (cx.read::<T>(x)?, cx.read(w)?, cx.read(cos)?, cx.read(sin)?);
    head_norm_rope(cx.pool, dims, x, w, cos, sin, cx.write(y)?, cx.write(rstd)?);
});

cpu_kernel!(
    HeadNormRopeBackward { dims, dy, h, rstd, w, cos, sin, dh, dw },
    |_| if dw.is_some() { floats(head_norm_rope_scratch(dims)) } else { 0 },
    |cx| {
        let (dy, h, rstd, w) = (cx.read::<T>(dy)?, cx.read(h)?, cx.read(rstd)?, cx.read(w)?);
        let (cos, sin) = (cx.read(cos)?, cx.read(sin)?);
        let dh = dh.map(|dh| cx.write(dh)).transpose()?;
        let dw = dw.map(|dw| cx.write(dw)).transpose()?;
        head_norm_rope_backward(cx.pool, dims, dy, h, rstd, w, cos, sin, dh, dw, cx.scratch()?);
    }
);

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};
    use crate::{Isa, rms_norm, rms_norm_backward, rope, rope_backward};

    fn fused_kernel_matches_two_kernels<T: Element>(
        isa: Isa,
        threads: usize,
        scale: f32,
        rope_dims: RopeDims,
    ) {
        let pool = Pool::on_isa(threads, isa).unwrap();
        let dims = HeadNormRopeDims { rope: rope_dims, eps: 1e-5 };
        let (norm, case) =
            (dims.norm(), format!("{isa}, {threads} threads, {}, {scale:e}, {rope_dims:?}", T::DTYPE));
        let (count, angles) = (norm.rows * norm.width, rope_dims.rows * rope_dims.rotated / 2);
        let scaled = |name: u64, count: usize| -> Vec<T> {
            random::<T>(name, count).iter().map(|value| T::from_f32(value.to_f32() * scale)).collect()
        };
        let (x, w, dy) = (random::<T>(1, count), scaled(2, norm.width), scaled(3, count));
        let (cos, sin) = (random::<f32>(4, angles), random::<f32>(5, angles));
        let mut scratch = vec![f32::NAN; head_norm_rope_scratch(dims)];

        let (mut y, mut rstd) = (vec![T::default(); count], vec![f32::NAN; norm.rows]);
        head_norm_rope(&pool, dims, &x, &w, &cos, &sin, &mut y, &mut rstd);
        let (mut two, mut two_rstd) = (vec![T::default(); count], vec![f32::NAN; norm.rows]);
        rms_norm(&pool, norm, &x, &w, &mut two, &mut two_rstd);
        rope(&pool, rope_dims, &cos, &sin, &mut two);
        assert_eq!((bits(&y), bits(&rstd)), (bits(&two), bits(&two_rstd)), "{case}");

        let (mut dh, mut dw) = (vec![T::default(); count], vec![0.5; norm.width]);
        let grads = (Some(&mut dh[..]), Some(&mut dw[..]));
        head_norm_rope_backward(&pool, dims, &dy, &x, &rstd, &w, &cos, &sin, grads.0, grads.1, &mut scratch);
        let (mut two, mut two_dw, mut back) = (vec![T::default(); count], vec![0.5; norm.width], dy);
        rope_backward(&pool, rope_dims, &cos, &sin, &mut back);
        scratch.fill(f32::NAN);
        let grads = (Some(&mut two[..]), Some(&mut two_dw[..]));
        rms_norm_backward(&pool, norm, &back, &x, &rstd, &w, None, grads.0, grads.1, &mut scratch);
        assert_eq!((bits(&dh), bits(&dw)), (bits(&two), bits(&two_dw)), "{case}, backward");
    }

    fn strided_rows_match_contiguous_rows<T: Element>(pool: &Pool, rope: RopeDims) {
        let dims = HeadNormRopeDims { rope, eps: 1e-5 };
        let case = format!("{}, {} threads, {}, {rope:?}", pool.isa(), pool.threads(), T::DTYPE);
        let (heads, width, angles) =
            (dims.norm().rows, rope.heads * rope.head_dim, rope.rows * rope.rotated / 2);
        let [x, dy, empty] = [1, 2, 3].map(|name| {
            let together = random::<T>(name, rope.rows * width);
            let apart = apart(&together, width, f32::NAN);
            [together, apart]
        });
        let (w, cos, sin) = (random::<T>(4, rope.head_dim), random(5, angles), random(6, angles));
        let mut scratch = vec![f32::NAN; head_norm_rope_scratch(dims)];
        let padded = HeadNormRopeDims { rope: RopeDims { row_stride: width + APART, ..rope }, ..dims };
        let [(expected, narrow), (found, wide)] = [(0, dims), (1, padded)].map(|(at, dims)| {
            let (mut y, mut dh) = (empty[at].clone(), empty[at].clone());
            let (mut rstd, mut dw) = (vec![f32::NAN; heads], vec![0.5; rope.head_dim]);
            head_norm_rope(pool, dims, &x[at], &w, &cos, &sin, &mut y, &mut rstd);
            let (dy, h) = (&dy[at], &x[at]);
            let grads = (Some(&mut dh[..]), Some(&mut dw[..]));
            head_norm_rope_backward(pool, dims, dy, h, &rstd, &w, &cos, &sin, grads.0, grads.1, &mut scratch);
            (bits(&[rstd, dw].concat()), [y, dh])
        });
        assert_eq!(found, expected, "{case}");
        for (wide, narrow) in wide.iter().zip(&narrow) {
            assert_eq!(bits(wide), bits(&apart(narrow, width, f32::NAN)), "{case}");
        }
    }

    #[test]
    fn row_stride_changes_no_bits_and_padding_is_untouched() {
        for pool in pools() {
            for (rows, heads, head_dim, rotated) in
                [(37, 5, 20, 12), (70, 3, 128, 128), (9, 16, 64, 64), (0, 2, 8, 8)]
            {
                let dims = RopeDims::new(rows, heads, head_dim, rotated);
                strided_rows_match_contiguous_rows::<f32>(&pool, dims);
                strided_rows_match_contiguous_rows::<bf16>(&pool, dims);
                strided_rows_match_contiguous_rows::<f16>(&pool, dims);
            }
        }
    }

    #[test]
    fn fused_kernel_has_the_bits_of_rms_norm_then_rope() {
        for (rows, heads, head_dim, rotated) in [
            (1, 1, 2, 2),
            (5, 3, 6, 6),
            (37, 5, 20, 12),
            (70, 3, 128, 128),
            (9, 16, 64, 64),
            (3, 2, 8, 0),
            (0, 2, 8, 8),
        ] {
            let dims = RopeDims::new(rows, heads, head_dim, rotated);
            for &isa in Isa::available() {
                for threads in 1..=3 {
                    fused_kernel_matches_two_kernels::<f32>(isa, threads, 1.0, dims);
                    fused_kernel_matches_two_kernels::<bf16>(isa, threads, 1.0, dims);
                    fused_kernel_matches_two_kernels::<f16>(isa, threads, 1.0, dims);
                }
                // Subnormal results, which AMX flushes to zero in the fused kernel alone.
                if isa != Isa::Amx {
                    fused_kernel_matches_two_kernels::<bf16>(isa, 1, 1e-39, dims);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "10 of 8 elements of a head cannot be rotated in pairs")]
    fn rotated_elements_may_not_exceed_the_head() {
        let rope = RopeDims::new(1, 1, 8, 10);
        let (x, angles, mut y) = ([0.0f32; 8], [0.0; 5], [0.0f32; 8]);
        let dims = HeadNormRopeDims { rope, eps: 1e-5 };
        head_norm_rope(&Pool::new(1), dims, &x, &x, &angles, &angles, &mut y, &mut [0.0]);
    }
}
