//! Linear layers with a weight for each expert, over rows that are sorted by expert: see [`super::linear`] for the formulas.
//!
//! `offsets` holds the first row of each expert, then the number of routed rows. The rows behind belong to padding: they are
//! neither read nor written.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use super::check_len;
use super::gemm::{Epilogue, GroupMatmul, MatrixView, gemm_groups, group_scratch};
use super::launch::{cpu_kernel, floats};
use super::linear::{Accumulate, Round, RoundAndCheck};
use super::pool::Pool;
use super::rows::check_rows;
use zeroth_base::DType;
use zeroth_kernel::{DeviceError, GradStore};
use zeroth_kernel::{Element, GroupedLinearDims};

/// f32 elements of scratch that the functions of this module need with a pool of `threads`.
pub fn grouped_linear_scratch(dims: GroupedLinearDims, threads: usize) -> usize {
    let GroupedLinearDims { slots, experts, inputs, outputs, .. } = dims;
    group_scratch(experts, [slots, outputs, inputs], threads)
        .max(group_scratch(experts, [slots, inputs, outputs], threads))
        .max(group_scratch(experts, [outputs, inputs, slots], threads))
}

/// Rows of an expert.
#[track_caller]
fn rows_of(dims: GroupedLinearDims, offsets: &[i32], expert: usize) -> Range<usize> {
    let [first, end] = [offsets[expert], offsets[expert + 1]];
    assert!(0 <= first && first <= end && end as usize <= dims.slots, "rows {first} to {end} of an expert");
    first as usize..end as usize
}

/// The weight of an expert, [outputs, inputs].
fn weight_of<T>(dims: GroupedLinearDims, w: &[T], expert: usize) -> MatrixView<'_, T> {
    let matrix = dims.outputs * dims.inputs;
    MatrixView::row_major(&w[expert * matrix..][..matrix], dims.inputs)
}

/// Checks the operands of a matmul of rows.
#[track_caller]
fn check<T>(dims: GroupedLinearDims, offsets: &[i32], x: &[T], w: &[T], y: &[T]) {
    let GroupedLinearDims { slots, experts, inputs, outputs, x_stride, y_stride } = dims;
    check_len("offsets", offsets.len(), experts + 1);
    check_rows("x", x.len(), [slots, inputs], x_stride);
    check_len("w", w.len(), experts * outputs * inputs);
    check_rows("y", y.len(), [slots, outputs], y_stride);
}

fn forward<T: Element>(
    pool: &Pool,
    dims: GroupedLinearDims,
    offsets: &[i32],
    x: &[T],
    w: &[T],
    y: &mut [T],
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<T> + Sync),
) {
    check(dims, offsets, x, w, y);
    let x = MatrixView::row_major(x, dims.x_stride);
    let group = |expert: usize| {
        let rows = rows_of(dims, offsets, expert);
        let (a, b) = (x.submatrix(rows.start, 0), weight_of(dims, w, expert).transposed());
        GroupMatmul { rows, k: dims.inputs, a, b }
    };
    let (largest, shape) = ([dims.slots, dims.inputs], [dims.outputs, dims.y_stride]);
    gemm_groups(pool, dims.experts, group, largest, y, shape, scratch, epilogue);
}

/// y[p] = x[p] · w[e]ᵀ for the rows p of each expert e, rounded once.
pub fn grouped_linear<T: Element>(
    pool: &Pool,
    dims: GroupedLinearDims,
    offsets: &[i32],
    x: &[T],
    w: &[T],
    y: &mut [T],
    scratch: &mut [f32],
) {
    forward(pool, dims, offsets, x, w, y, scratch, &Round { scale: 1.0 });
}

/// y[p] += scale · x[p] · w[e]ᵀ for the rows p of each expert e, rounded once.
pub fn grouped_linear_add<T: Element>(
    pool: &Pool,
    dims: GroupedLinearDims,
    scale: f32,
    offsets: &[i32],
    x: &[T],
    w: &[T],
    y: &mut [T],
    scratch: &mut [f32],
) {
    forward(pool, dims, offsets, x, w, y, scratch, &Accumulate { scale });
}

/// dx[p] = scale · dy[p] · w[e] for the rows p of each expert e; with `add` accumulates into dx.
pub fn grouped_linear_dx<T: Element>(
    pool: &Pool,
    dims: GroupedLinearDims,
    scale: f32,
    offsets: &[i32],
    dy: &[T],
    w: &[T],
    dx: &mut [T],
    add: bool,
    scratch: &mut [f32],
) {
    check(dims, offsets, dx, w, dy);
    let dy = MatrixView::row_major(dy, dims.y_stride);
    let group = |expert: usize| {
        let rows = rows_of(dims, offsets, expert);
        GroupMatmul { a: dy.submatrix(rows.start, 0), rows, k: dims.outputs, b: weight_of(dims, w, expert) }
    };
    let (largest, shape) = ([dims.slots, dims.outputs], [dims.inputs, dims.x_stride]);
    if add {
        gemm_groups(pool, dims.experts, group, largest, dx, shape, scratch, &Accumulate { scale });
    } else {
        gemm_groups(pool, dims.experts, group, largest, dx, shape, scratch, &Round { scale });
    }
}

/// The gradient of every expert's weight. With `skip_empty`, that of an expert without rows is not passed to the epilogue.
fn dw<T: Element, O: Send>(
    pool: &Pool,
    dims: GroupedLinearDims,
    offsets: &[i32],
    dy: &[T],
    x: &[T],
    dw: &mut [O],
    skip_empty: bool,
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    let GroupedLinearDims { slots, experts, inputs, outputs, x_stride, y_stride } = dims;
    check_len("offsets", offsets.len(), experts + 1);
    check_rows("dy", dy.len(), [slots, outputs], y_stride);
    check_rows("x", x.len(), [slots, inputs], x_stride);
    check_len("dw", dw.len(), experts * outputs * inputs);
    let (dy, x) = (MatrixView::row_major(dy, y_stride), MatrixView::row_major(x, x_stride));
    let group = |expert: usize| {
        let terms = rows_of(dims, offsets, expert);
        let own = if skip_empty && terms.is_empty() { 0 } else { outputs };
        GroupMatmul {
            rows: expert * outputs..expert * outputs + own,
            k: terms.len(),
            a: dy.submatrix(terms.start, 0).transposed(),
            b: x.submatrix(terms.start, 0),
        }
    };
    gemm_groups(pool, experts, group, [outputs, slots], dw, [inputs; 2], scratch, epilogue);
}

/// dw[e] += scale · dyᵀ · x over the rows of each expert e, in f32.
pub fn grouped_linear_dw<T: Element>(
    pool: &Pool,
    dims: GroupedLinearDims,
    scale: f32,
    offsets: &[i32],
    dy: &[T],
    x: &[T],
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    self::dw(pool, dims, offsets, dy, x, dw, true, scratch, &Accumulate { scale });
}

/// dw[e] = scale · dyᵀ · x over the rows of each expert e, rounded once; returns whether a result is not finite. The bits are those
/// that [`grouped_linear_dw`] adds to zeros, rounded.
pub fn grouped_linear_dw_rounded<T: Element, O: Element>(
    pool: &Pool,
    dims: GroupedLinearDims,
    scale: f32,
    offsets: &[i32],
    dy: &[T],
    x: &[T],
    dw: &mut [O],
    scratch: &mut [f32],
) -> bool {
    let found_inf = AtomicBool::new(false);
    let epilogue = RoundAndCheck { scale, found_inf: &found_inf };
    self::dw(pool, dims, offsets, dy, x, dw, false, scratch, &epilogue);
    found_inf.into_inner()
}

cpu_kernel!(
    GroupedLinear { dims, offsets, x, w, y },
    |threads| floats(grouped_linear_scratch(dims, threads)),
    |cx| {
        let (offsets, x, w) = (cx.read(offsets)?, cx.read::<T>(x)?, cx.read(w)?);
        grouped_linear(cx.pool, dims, offsets, x, w, cx.write(y)?, cx.scratch()?);
    }
);

cpu_kernel!(
    GroupedLinearAdd { dims, scale, offsets, x, w, y },
    |threads| floats(grouped_linear_scratch(dims, threads)),
    |cx| {
        let (offsets, x, w) = (cx.read(offsets)?, cx.read::<T>(x)?, cx.read(w)?);
        grouped_linear_add(cx.pool, dims, scale, offsets, x, w, cx.write(y)?, cx.scratch()?);
    }
);

cpu_kernel!(
    GroupedLinearDx { dims, scale, offsets, dy, w, dx, add },
    |threads| floats(grouped_linear_scratch(dims, threads)),
    |cx| {
        let (offsets, dy, w) = (cx.read(offsets)?, cx.read::<T>(dy)?, cx.read(w)?);
        grouped_linear_dx(cx.pool, dims, scale, offsets, dy, w, cx.write(dx)?, add, cx.scratch()?);
    }
);

cpu_kernel!(
    GroupedLinearDw { dims, scale, offsets, dy, x, dw, store },
    |threads| floats(grouped_linear_scratch(dims, threads)),
    |cx| {
        let (at, dy, x) = (cx.read(offsets)?, cx.read::<T>(dy)?, cx.read(x)?);
        let s = cx.scratch()?;
        match store {
            GradStore::Add => grouped_linear_dw(cx.pool, dims, scale, at, dy, x, cx.write(dw)?, s),
            GradStore::Write => {
                let dw = cx.write::<f32>(dw)?;
                grouped_linear_dw_rounded(cx.pool, dims, scale, at, dy, x, dw, s);
            }
            GradStore::Round { to, found_inf } => {
                let found = if to == DType::F32 {
                    let dw = cx.write::<f32>(dw)?;
                    grouped_linear_dw_rounded(cx.pool, dims, scale, at, dy, x, dw, s)
                } else if to == T::DTYPE {
                    let dw = cx.write::<T>(dw)?;
                    grouped_linear_dw_rounded(cx.pool, dims, scale, at, dy, x, dw, s)
                } else {
                    let problem = format!("matmuls of {} are not rounded to {to}", T::DTYPE);
                    return Err(DeviceError::Operands { what: cx.what, problem });
                };
                if found {
                    *cx.write_one::<u64>(found_inf)? = 1;
                }
            }
        }
    }
);
