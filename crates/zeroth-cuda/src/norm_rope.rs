//! RoPE of q and k, and the per-head RMSNorm before it. The two are fused for heads that are rotated completely and whose threads hold
//! both elements of their pairs; other shapes run them in sequence, with bitwise equal results.

use super::driver::Address;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, THREADS, VEC, aligned16, float};
use super::rowwise::{RowPartition, add_column_sums, column_sums, norm, norm_backward, norm_gradients};
use super::scratch::rotated_back;
use zeroth_kernel::{DeviceError, Span};
use zeroth_kernel::{HeadNormRopeDims, RmsNormDims, RopeDims};

pub(super) fn rope(
    cx: &LaunchContext,
    dims: RopeDims,
    angles: [Span; 2],
    x: Span,
    y: Span,
    back: bool,
) -> Result<(), DeviceError> {
    let [cos, sin] = angles_of(cx, dims, angles)?;
    let elements = dims.rows * dims.heads * dims.head_dim;
    let (x, y) = (cx.typed("x", x, elements)?, cx.typed("y", y, elements)?);
    rotate(cx, dims, [cos, sin, x, y], back)
}

/// RoPE of checked operands.
fn rotate(
    cx: &LaunchContext,
    dims: RopeDims,
    [cos, sin, x, y]: [Address; 4],
    back: bool,
) -> Result<(), DeviceError> {
    let pairs = dims.rotated / 2;
    let whole = pairs.is_multiple_of(VEC) && dims.head_dim.is_multiple_of(VEC);
    let vectorized = whole && aligned16(&[cos, sin, x, y]);
    let items = dims.rows * dims.heads * (dims.head_dim - pairs) / if vectorized { VEC } else { 1 };
    let sizes = [dims.rows, dims.heads, dims.head_dim, dims.rotated].map(|size| size as u64);
    let [rows, heads, head_dim, rotated] = sizes;
    let sign = float(if back { -1.0 } else { 1.0 });
    let arguments = [cos, sin, x, y, rows, heads, head_dim, rotated, sign, u64::from(vectorized)];
    cx.run_elementwise(EntryPoint::Rope, &[cx.dtype], items, &arguments)
}

/// Addresses of the cosines and sines.
fn angles_of(cx: &LaunchContext, dims: RopeDims, [cos, sin]: [Span; 2]) -> Result<[Address; 2], DeviceError> {
    if dims.rotated > dims.head_dim || !dims.rotated.is_multiple_of(2) {
        let problem =
            format!("{} of {} elements of a head cannot be rotated in pairs", dims.rotated, dims.head_dim);
        return Err(cx.invalid(problem));
    }
    let angles = dims.rows * (dims.rotated / 2);
    Ok([cx.words("cos", cos, angles)?, cx.words("sin", sin, angles)?])
}

/// The partition of heads for the fused kernels; `None` if they do not support the shape.
fn fused_partition(dims: RopeDims, operands: &[Address]) -> Option<RowPartition> {
    let is_supported = matches!(dims.head_dim, 64 | 128 | 256) && dims.rotated == dims.head_dim;
    RowPartition::new(dims.head_dim).filter(|_| is_supported && aligned16(operands))
}

pub(super) fn forward(
    cx: &LaunchContext,
    dims: HeadNormRopeDims,
    [x, w]: [Span; 2],
    angles: [Span; 2],
    [y, rstd]: [Span; 2],
) -> Result<(), DeviceError> {
    let RmsNormDims { rows, width, eps, .. } = dims.norm();
    let [cos, sin] = angles_of(cx, dims.rope, angles)?;
    let (from, weight) = (cx.typed("x", x, rows * width)?, cx.typed("w", w, width)?);
    let (to, statistic) = (cx.typed("y", y, rows * width)?, cx.words("rstd", rstd, rows)?);
    let Some(partition) = fused_partition(dims.rope, &[from, weight, cos, sin, to]) else {
        norm(cx, dims.norm(), x, None, [w, y, rstd])?;
        return rope(cx, dims.rope, angles, y, y, false);
    };
    let (heads, span) = (dims.rope.heads as u64, partition.row_threads as u64);
    let arguments = [from, weight, cos, sin, to, statistic, rows as u64, heads, float(eps), span];
    let grid = [rows.div_ceil(partition.rows_per_pass()), 1, 1];
    cx.run(EntryPoint::HeadNormRope, &[cx.dtype], grid, THREADS, &arguments)
}

pub(super) fn backward(
    cx: &mut LaunchContext,
    dims: HeadNormRopeDims,
    [dy, h, rstd, w]: [Span; 4],
    angles: [Span; 2],
    dh: Option<Span>,
    dw: Option<Span>,
) -> Result<(), DeviceError> {
    let RmsNormDims { rows, width, .. } = dims.norm();
    let [cos, sin] = angles_of(cx, dims.rope, angles)?;
    let (from, normed) = (cx.typed("dy", dy, rows * width)?, cx.typed("h", h, rows * width)?);
    let (statistic, weight) = (cx.words("rstd", rstd, rows)?, cx.typed("w", w, width)?);
    let to = dh.map(|dh| cx.typed("dh", dh, rows * width)).transpose()?;
    let total = dw.map(|dw| cx.words("dw", dw, width)).transpose()?;
    let operands = [from, normed, weight, cos, sin, to.unwrap_or(0)];
    let Some(partition) = fused_partition(dims.rope, &operands) else {
        let Some(dh) = dh else {
            // The gradient of w needs dy rotated back and rounded.
            let rotated = cx.scratch.take(rotated_back(cx.dtype, dims))?;
            rotate(cx, dims.rope, [cos, sin, from, rotated], true)?;
            return norm_gradients(cx, dims.norm(), [rotated, normed, statistic, weight, 0], None, total);
        };
        rope(cx, dims.rope, angles, dy, dh, true)?;
        return norm_backward(cx, dims.norm(), [dh, h, rstd, w], None, Some(dh), dw);
    };
    // The kernel skips a gradient whose address is null.
    let partials = match total {
        Some(_) => cx.scratch.take(column_sums(rows, width))?,
        None => 0,
    };
    let ((rows_of_block, blocks), row_threads) =
        (partition.gradient_blocks(rows), partition.row_threads as u64);
    let (heads, block_rows) = (dims.rope.heads as u64, rows_of_block as u64);
    let arguments = [
        from,
        normed,
        statistic,
        weight,
        cos,
        sin,
        to.unwrap_or(0),
        partials,
        rows as u64,
        heads,
        row_threads,
        block_rows,
    ];
    cx.run(EntryPoint::HeadNormRopeBackward, &[cx.dtype], [blocks, 1, 1], THREADS, &arguments)?;
    total.map_or(Ok(()), |total| add_column_sums(cx, partials, total, [blocks, width]))
}

cuda_kernel!(Rope { dims, cos, sin, x, y, back }, |_| NO_SCRATCH, |cx| rope(
    cx,
    dims,
    [cos, sin],
    x,
    y,
    back
));

cuda_kernel!(HeadNormRope { dims, x, w, cos, sin, y, rstd }, |_| NO_SCRATCH, |cx| forward(
    cx,
    dims,
    [x, w],
    [cos, sin],
    [y, rstd]
));

cuda_kernel!(
    HeadNormRopeBackward { dims, dy, h, rstd, w, cos, sin, dh, dw },
    |dtype| {
        let (norm, rotated) = (dims.norm(), if dh.is_none() { rotated_back(dtype, dims) } else { 0 });
        if dw.is_some() { [column_sums(norm.rows, norm.width), rotated, 0] } else { NO_SCRATCH }
    },
    |cx| backward(cx, dims, [dy, h, rstd, w], [cos, sin], dh, dw)
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_heads_have_both_elements_of_a_pair_in_one_thread() {
        let dims = |head_dim, rotated| RopeDims::new(5, 3, head_dim, rotated);
        for (head_dim, row_threads) in [(64, 2), (128, 4), (256, 8)] {
            let partition = fused_partition(dims(head_dim, head_dim), &[0, 16]).unwrap();
            assert_eq!(partition.row_threads, row_threads);
            // A thread's vectors are `row_threads` vectors apart, which divides half of a head.
            assert!((head_dim / 2 / VEC).is_multiple_of(row_threads));
        }
        for other in [dims(128, 64), dims(96, 96), dims(20, 20)] {
            assert!(fused_partition(other, &[0]).is_none(), "{other:?}");
        }
        assert!(fused_partition(dims(128, 128), &[0, 8]).is_none(), "not 16-byte aligned");
    }
}
