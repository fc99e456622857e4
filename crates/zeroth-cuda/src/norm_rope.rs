//! Kernels by heads: the rotation of q and k, and the norm before it. The two are one pass for heads that turn whole and whose
//! threads each have both ends of their pairs; for others they run one after the other, with the same bits.

use super::driver::Address;
use super::line::{LOT, Line, THREADS, float, in_sixteens};
use super::programs::Entry;
use super::rows::{Spans, add_column_sums, norm, norm_backward};
use super::scratch::column_sums;
use zeroth_kernel::{DeviceError, Span};
use zeroth_kernel::{HeadNormRopeDims, RmsNormDims, RopeDims};

pub(super) fn rope(
    line: &Line,
    dims: RopeDims,
    angles: [Span; 2],
    x: Span,
    y: Span,
    back: bool,
) -> Result<(), DeviceError> {
    let [cos, sin] = angles_of(line, dims, angles)?;
    let elements = dims.rows * dims.heads * dims.head_dim;
    let (x, y) = (line.typed("x", x, elements)?, line.typed("y", y, elements)?);
    let pairs = dims.rotated / 2;
    let whole = pairs.is_multiple_of(LOT) && dims.head_dim.is_multiple_of(LOT);
    let lots = whole && in_sixteens(&[cos, sin, x, y]);
    let items = dims.rows * dims.heads * (dims.head_dim - pairs) / if lots { LOT } else { 1 };
    let sizes = [dims.rows, dims.heads, dims.head_dim, dims.rotated].map(|size| size as u64);
    let [rows, heads, head_dim, rotated] = sizes;
    let sign = float(if back { -1.0 } else { 1.0 });
    let arguments = [cos, sin, x, y, rows, heads, head_dim, rotated, sign, u64::from(lots)];
    line.each(Entry::Rope, &[line.dtype], items, &arguments)
}

/// Cosines and sines, of as many pairs as turn.
fn angles_of(line: &Line, dims: RopeDims, [cos, sin]: [Span; 2]) -> Result<[Address; 2], DeviceError> {
    if dims.rotated > dims.head_dim || !dims.rotated.is_multiple_of(2) {
        let problem =
            format!("{} of {} elements of a head cannot turn in pairs", dims.rotated, dims.head_dim);
        return Err(line.refuse(problem));
    }
    let angles = dims.rows * (dims.rotated / 2);
    Ok([line.words("cos", cos, angles)?, line.words("sin", sin, angles)?])
}

/// How heads are shared out where one pass does both; `None` where it does not.
fn one_pass(dims: RopeDims, operands: &[Address]) -> Option<Spans> {
    let known = matches!(dims.head_dim, 64 | 128 | 256) && dims.rotated == dims.head_dim;
    Spans::of(dims.head_dim).filter(|_| known && in_sixteens(operands))
}

/// `operands`: x and w; results: y and rstd.
pub(super) fn forward(
    line: &Line,
    dims: HeadNormRopeDims,
    [x, w]: [Span; 2],
    angles: [Span; 2],
    [y, rstd]: [Span; 2],
) -> Result<(), DeviceError> {
    let RmsNormDims { rows, width, eps } = dims.norm();
    let [cos, sin] = angles_of(line, dims.rope, angles)?;
    let (from, weight) = (line.typed("x", x, rows * width)?, line.typed("w", w, width)?);
    let (to, statistic) = (line.typed("y", y, rows * width)?, line.words("rstd", rstd, rows)?);
    let Some(spans) = one_pass(dims.rope, &[from, weight, cos, sin, to]) else {
        norm(line, dims.norm(), x, None, [w, y, rstd])?;
        return rope(line, dims.rope, angles, y, y, false);
    };
    let (heads, span) = (dims.rope.heads as u64, spans.span as u64);
    let arguments = [from, weight, cos, sin, to, statistic, rows as u64, heads, float(eps), span];
    let grid = [rows.div_ceil(spans.slots()), 1, 1];
    line.run(Entry::HeadNormRope, &[line.dtype], grid, THREADS, &arguments)
}

/// `operands`: dy, h, rstd and w; results: dh and dw.
pub(super) fn backward(
    line: &mut Line,
    dims: HeadNormRopeDims,
    [dy, h, rstd, w]: [Span; 4],
    angles: [Span; 2],
    [dh, dw]: [Span; 2],
) -> Result<(), DeviceError> {
    let RmsNormDims { rows, width, .. } = dims.norm();
    let [cos, sin] = angles_of(line, dims.rope, angles)?;
    let (from, normed) = (line.typed("dy", dy, rows * width)?, line.typed("h", h, rows * width)?);
    let (statistic, weight) = (line.words("rstd", rstd, rows)?, line.typed("w", w, width)?);
    let (to, total) = (line.typed("dh", dh, rows * width)?, line.words("dw", dw, width)?);
    let Some(spans) = one_pass(dims.rope, &[from, normed, weight, cos, sin, to]) else {
        rope(line, dims.rope, angles, dy, dh, true)?;
        return norm_backward(line, dims.norm(), [dh, h, rstd, w], None, [dh, dw]);
    };
    let partials = line.scratch.take(column_sums(rows, width))?;
    let ((of_block, blocks), span) = (spans.gradient(rows), spans.span as u64);
    let (heads, block_rows) = (dims.rope.heads as u64, of_block as u64);
    let arguments =
        [from, normed, statistic, weight, cos, sin, to, partials, rows as u64, heads, span, block_rows];
    line.run(Entry::HeadNormRopeBackward, &[line.dtype], [blocks, 1, 1], THREADS, &arguments)?;
    add_column_sums(line, partials, total, [blocks, width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_turn_whole_have_both_ends_of_a_pair_in_one_thread() {
        let dims = |head_dim, rotated| RopeDims { rows: 5, heads: 3, head_dim, rotated };
        for (head_dim, span) in [(64, 2), (128, 4), (256, 8)] {
            let spans = one_pass(dims(head_dim, head_dim), &[0, 16]).unwrap();
            assert_eq!(spans.span, span);
            // A thread's lots are `span` lots apart: half of a head is a whole number of them.
            assert!((head_dim / 2 / LOT).is_multiple_of(span));
        }
        for other in [dims(128, 64), dims(96, 96), dims(20, 20)] {
            assert!(one_pass(other, &[0]).is_none(), "{other:?}");
        }
        assert!(one_pass(dims(128, 128), &[0, 8]).is_none(), "not at multiples of 16 bytes");
    }
}
