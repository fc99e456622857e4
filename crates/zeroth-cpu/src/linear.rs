//! y = x · wᵀ + bias, y += scale · x · wᵀ, and their gradients. Weights are [out, in], as in Hugging Face checkpoints.
//!
//! A scale multiplies the f32 sums before anything is added to them. A scale of 1 changes no bit.

use std::sync::atomic::{AtomicBool, Ordering};

use super::gemm::{self, Epilogue, MatrixView, gemm, gemm_tn};
#[cfg(target_arch = "x86_64")]
use super::gemm::{F32x32, WIDE_ROW};
use super::launch::{cpu_kernel, floats};
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use super::{check_len, check_scratch, columns};
use zeroth_base::DType;
use zeroth_kernel::LinearDims;
use zeroth_kernel::{DeviceError, GradStore};
use zeroth_kernel::{Element, is_nonfinite};

/// Multiplies by a scale and rounds to the output type.
pub(super) struct Round {
    pub(super) scale: f32,
}

impl<T: Element> Epilogue<T> for Round {
    #[inline(always)]
    fn store_row(&self, _: usize, sums: &[f32], out: &mut [T]) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(self.scale * sum);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn store_wide_row(&self, first: usize, sums: &[f32; WIDE_ROW], out: &mut [T; WIDE_ROW]) {
        if F32x32::load(sums).times(self.scale).store(out).is_none() {
            self.store_row(first, sums, out);
        }
    }
}

/// Adds a bias per column, then rounds.
struct AddBias<'a, T>(&'a [T]);

impl<T: Element> Epilogue<T> for AddBias<'_, T> {
    #[inline(always)]
    fn store_row(&self, first: usize, sums: &[f32], out: &mut [T]) {
        for ((out, sum), bias) in out.iter_mut().zip(sums).zip(&self.0[first..]) {
            *out = T::from_f32(sum + bias.to_f32());
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn store_wide_row(&self, first: usize, sums: &[f32; WIDE_ROW], out: &mut [T; WIDE_ROW]) {
        let bias = self.0[first..].first_chunk().and_then(F32x32::widen);
        if bias.and_then(|bias| F32x32::load(sums).add(bias).store(out)).is_none() {
            self.store_row(first, sums, out);
        }
    }
}

/// Multiplies by a scale and adds to the output.
pub(super) struct Accumulate {
    pub(super) scale: f32,
}

impl<T: Element> Epilogue<T> for Accumulate {
    const READS_OUTPUT: bool = true;

    #[inline(always)]
    fn store_row(&self, _: usize, sums: &[f32], out: &mut [T]) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(out.to_f32() + self.scale * sum);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn store_wide_row(&self, first: usize, sums: &[f32; WIDE_ROW], out: &mut [T; WIDE_ROW]) {
        let sum = F32x32::widen(out).map(|there| there.add(F32x32::load(sums).times(self.scale)));
        if sum.and_then(|sum| sum.store(out)).is_none() {
            self.store_row(first, sums, out);
        }
    }
}

/// Multiplies by a scale, rounds to the output type, and sets `found_inf` if a result is not finite. The flag only ever
/// becomes true, so the order of tasks does not matter.
pub(super) struct RoundAndCheck<'a> {
    pub(super) scale: f32,
    pub(super) found_inf: &'a AtomicBool,
}

impl<T: Element> Epilogue<T> for RoundAndCheck<'_> {
    #[inline(always)]
    fn store_row(&self, _: usize, sums: &[f32], out: &mut [T]) {
        let mut infinite = false;
        for (out, sum) in out.iter_mut().zip(sums) {
            // Adding 0 turns -0 into 0.
            *out = T::from_f32(0.0 + self.scale * sum);
            infinite |= is_nonfinite(*out);
        }
        if infinite {
            self.found_inf.store(true, Ordering::Relaxed);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn store_wide_row(&self, first: usize, sums: &[f32; WIDE_ROW], out: &mut [T; WIDE_ROW]) {
        match F32x32::load(sums).times(self.scale).add_zero().store(out) {
            Some(infinite) => {
                if infinite {
                    self.found_inf.store(true, Ordering::Relaxed);
                }
            }
            None => self.store_row(first, sums, out),
        }
    }
}

/// f32 elements of scratch that the functions of this module need with a pool of `threads`.
pub fn linear_scratch(dims: LinearDims, threads: usize) -> usize {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    gemm::scratch(rows, outputs, inputs, threads)
        .max(gemm::scratch(rows, inputs, outputs, threads))
        .max(gemm::gemm_tn_scratch(outputs, inputs, rows, threads))
        .max(columns::partials(rows, outputs))
}

/// y[rows, outputs] = x[rows, inputs] · w[outputs, inputs]ᵀ + bias, rounded once.
pub fn linear<T: Element>(
    pool: &Pool,
    dims: LinearDims,
    x: &[T],
    w: &[T],
    bias: Option<&[T]>,
    y: &mut [T],
    scratch: &mut [f32],
) {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    check_rows("x", x.len(), [rows, inputs], dims.x_stride);
    let x = MatrixView::row_major(x, dims.x_stride);
    check_len("w", w.len(), outputs * inputs);
    if let Some(bias) = bias {
        check_len("bias", bias.len(), outputs);
    }
    let (shape, w) = ([rows, outputs, inputs], MatrixView::row_major(w, inputs).transposed());
    match bias {
        Some(bias) => gemm(pool, shape, x, w, y, dims.y_stride, scratch, &AddBias(bias)),
        None => gemm(pool, shape, x, w, y, dims.y_stride, scratch, &Round { scale: 1.0 }),
    }
}

/// y[rows, outputs] += scale · x[rows, inputs] · w[outputs, inputs]ᵀ, rounded once.
pub fn linear_add<T: Element>(
    pool: &Pool,
    dims: LinearDims,
    scale: f32,
    x: &[T],
    w: &[T],
    y: &mut [T],
    scratch: &mut [f32],
) {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    check_rows("x", x.len(), [rows, inputs], dims.x_stride);
    let x = MatrixView::row_major(x, dims.x_stride);
    check_len("w", w.len(), outputs * inputs);
    let (shape, w) = ([rows, outputs, inputs], MatrixView::row_major(w, inputs).transposed());
    gemm(pool, shape, x, w, y, dims.y_stride, scratch, &Accumulate { scale });
}

/// dx[rows, inputs] = scale · dy[rows, outputs] · w[outputs, inputs]; with `add` accumulates into dx.
pub fn linear_dx<T: Element>(
    pool: &Pool,
    dims: LinearDims,
    scale: f32,
    dy: &[T],
    w: &[T],
    dx: &mut [T],
    add: bool,
    scratch: &mut [f32],
) {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    check_rows("dy", dy.len(), [rows, outputs], dims.y_stride);
    let dy = MatrixView::row_major(dy, dims.y_stride);
    check_len("w", w.len(), outputs * inputs);
    let (shape, w) = ([rows, inputs, outputs], MatrixView::row_major(w, inputs));
    if add {
        gemm(pool, shape, dy, w, dx, dims.x_stride, scratch, &Accumulate { scale });
    } else {
        gemm(pool, shape, dy, w, dx, dims.x_stride, scratch, &Round { scale });
    }
}

/// The operands of a weight gradient, [rows, outputs] and [rows, inputs].
fn dw_operands<'a, T>(dims: LinearDims, dy: &'a [T], x: &'a [T]) -> (MatrixView<'a, T>, MatrixView<'a, T>) {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    check_rows("dy", dy.len(), [rows, outputs], dims.y_stride);
    check_rows("x", x.len(), [rows, inputs], dims.x_stride);
    (MatrixView::row_major(dy, dims.y_stride), MatrixView::row_major(x, dims.x_stride))
}

/// dw[outputs, inputs] += scale · dy[rows, outputs]ᵀ · x[rows, inputs], in f32.
pub fn linear_dw<T: Element>(
    pool: &Pool,
    dims: LinearDims,
    scale: f32,
    dy: &[T],
    x: &[T],
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    let (dy, x) = dw_operands(dims, dy, x);
    gemm_tn(pool, [outputs, inputs, rows], dy, x, dw, scratch, &Accumulate { scale });
}

/// dw[outputs, inputs] = scale · dy[rows, outputs]ᵀ · x[rows, inputs], rounded once; returns whether a result is not finite.
/// The bits are those that [`linear_dw`] adds to zeros, rounded.
pub fn linear_dw_rounded<T: Element, O: Element>(
    pool: &Pool,
    dims: LinearDims,
    scale: f32,
    dy: &[T],
    x: &[T],
    dw: &mut [O],
    scratch: &mut [f32],
) -> bool {
    let LinearDims { rows, inputs, outputs, .. } = dims;
    let (dy, x) = dw_operands(dims, dy, x);
    let found_inf = AtomicBool::new(false);
    let epilogue = RoundAndCheck { scale, found_inf: &found_inf };
    gemm_tn(pool, [outputs, inputs, rows], dy, x, dw, scratch, &epilogue);
    found_inf.into_inner()
}

/// `db[outputs]` += the column sums of dy[rows, outputs], in f32.
pub fn linear_db<T: Element>(pool: &Pool, dims: LinearDims, dy: &[T], db: &mut [f32], scratch: &mut [f32]) {
    let LinearDims { rows, outputs, .. } = dims;
    let row_stride = dims.y_stride;
    check_rows("dy", dy.len(), [rows, outputs], row_stride);
    check_len("db", db.len(), outputs);
    if outputs == 0 {
        return;
    }
    check_scratch(scratch.len(), columns::partials(rows, outputs));
    let partials = &mut scratch[..columns::partials(rows, outputs)];
    pool.each(Chunks::new(partials, outputs), |block, sums| {
        sums.fill(0.0);
        for dy in columns::block_of(dy, row_stride, block).chunks_exact(row_stride) {
            for (sum, dy) in sums.iter_mut().zip(dy) {
                *sum += dy.to_f32();
            }
        }
    });
    columns::add_partials(pool, partials, db);
}

#[cfg(test)]
mod row_stride_tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random, spread};

    fn check_padded_rows<T: Element>(pool: &Pool, dims: LinearDims) {
        let LinearDims { rows, inputs, outputs, .. } = dims;
        let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        let [x, dy, dx] = [(1, inputs), (2, outputs), (3, inputs)].map(|(name, width)| {
            let together = random::<T>(name, rows * width);
            let apart = apart(&together, width, f32::NAN);
            [together, apart]
        });
        let (w, bias, dw) =
            (random::<T>(4, outputs * inputs), random::<T>(5, outputs), random::<f32>(6, outputs * inputs));
        let mut scratch = vec![f32::NAN; linear_scratch(dims, pool.threads())];
        let padded = LinearDims { x_stride: inputs + APART, y_stride: outputs + APART, ..dims };
        let dims = [dims, padded];
        for bias in [None, Some(&bias[..])] {
            let [expected, found] = [0, 1].map(|at| {
                let mut y = vec![T::from_f32(f32::NAN); dy[at].len()];
                linear(pool, dims[at], &x[at], &w, bias, &mut y, &mut scratch);
                y
            });
            assert_eq!(bits(&found), bits(&apart(&expected, outputs, f32::NAN)), "{case}");
        }
        let [expected, found] = [0, 1].map(|at| {
            let mut y = dy[at].clone();
            linear_add(pool, dims[at], 0.3, &x[at], &w, &mut y, &mut scratch);
            y
        });
        assert_eq!(bits(&found), bits(&apart(&expected, outputs, f32::NAN)), "{case}, linear_add");
        for (add, scale) in [(false, 1.0), (true, 1.0), (false, 0.3)] {
            let [expected, found] = [0, 1].map(|at| {
                let mut dx = dx[at].clone();
                linear_dx(pool, dims[at], scale, &dy[at], &w, &mut dx, add, &mut scratch);
                dx
            });
            assert_eq!(bits(&found), bits(&apart(&expected, inputs, f32::NAN)), "{case}, dx, add: {add}");
        }
        let [expected, found] = [0, 1].map(|at| {
            let (mut added, mut once, mut db) = (dw.clone(), w.clone(), dw[..outputs].to_vec());
            linear_dw(pool, dims[at], 0.3, &dy[at], &x[at], &mut added, &mut scratch);
            let found_inf = linear_dw_rounded(pool, dims[at], 0.3, &dy[at], &x[at], &mut once, &mut scratch);
            linear_db(pool, dims[at], &dy[at], &mut db, &mut scratch);
            (found_inf, bits(&added), bits(&once), bits(&db))
        });
        assert!(found == expected && !found.0, "{case}, gradients of weights");
    }

    #[test]
    fn padded_rows_have_the_bits_of_contiguous_rows() {
        for pool in pools() {
            // Whole and partial tile steps; sums of several blocks of k.
            for (rows, inputs, outputs) in [(70, 64, 96), (33, 40, 5), (5, 1100, 33), (40, 33, 2500)] {
                let dims = LinearDims::new(rows, inputs, outputs);
                check_padded_rows::<f32>(&pool, dims);
                check_padded_rows::<bf16>(&pool, dims);
                check_padded_rows::<f16>(&pool, dims);
            }
        }
    }

    #[test]
    fn rows_read_in_place_have_the_bits_of_packed_rows() {
        // Padded as activations are: AMX reads such rows in place.
        for pool in pools() {
            let dims = LinearDims::new(70, 512, 96);
            let row_stride = crate::row_stride(512, DType::Bf16);
            let (x, w) = (random::<bf16>(1, 70 * 512), random::<bf16>(2, 96 * 512));
            let wide = spread(&x, [512, row_stride], f32::NAN);
            let mut scratch = vec![f32::NAN; linear_scratch(dims, pool.threads())];
            let padded = LinearDims { x_stride: row_stride, ..dims };
            let [expected, found] = [(dims, x), (padded, wide)].map(|(dims, x)| {
                let mut y = vec![bf16::NAN; 70 * 96];
                linear(&pool, dims, &x, &w, None, &mut y, &mut scratch);
                bits(&y)
            });
            assert!(row_stride > 512 && found == expected, "{}, {} threads", pool.isa(), pool.threads());
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::fmt::Debug;

    use half::bf16;

    use super::*;
    use crate::Isa;

    /// Accumulators that AMX can produce: halfway between two bf16, -0, infinite, NaN.
    fn sums() -> [f32; WIDE_ROW] {
        let odd = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE];
        std::array::from_fn(|at| match at {
            0..8 => odd[at],
            8 => f32::from_bits(0x7f80_0001),
            // The low 16 bits are one half, slightly more or slightly less.
            at => f32::from_bits(0x3f80_0000 + ((at as u32) << 16) + 0x7fff + at as u32 % 3),
        })
    }

    /// `store_wide_row` and `store_row` write the same bits.
    #[track_caller]
    fn agree<T: Element + PartialEq + Debug>(
        epilogue: &impl Epilogue<T>,
        sums: &[f32; WIDE_ROW],
        there: [T; WIDE_ROW],
    ) {
        let (mut line, mut row) = (there, there);
        epilogue.store_wide_row(0, sums, &mut line);
        epilogue.store_row(0, sums, &mut row);
        assert_eq!(bytemuck::bytes_of(&line), bytemuck::bytes_of(&row));
    }

    fn agree_in<T: Element + PartialEq + Debug>() {
        let there = std::array::from_fn(|at| T::from_f32(at as f32 * 0.37 - 3.0));
        let finite = sums().map(|sum| if sum.is_finite() { sum } else { -1.5 });
        for sums in [sums(), finite] {
            agree(&AddBias(&there), &sums, there);
            for scale in [1.0, 3.0] {
                agree(&Round { scale }, &sums, there);
                agree(&Accumulate { scale }, &sums, there);
                let [line, row, wide] = [(); 3].map(|()| AtomicBool::new(false));
                agree(&RoundAndCheck { scale, found_inf: &line }, &sums, there);
                let mut out = there;
                Epilogue::<T>::store_row(&RoundAndCheck { scale, found_inf: &row }, 0, &sums, &mut out);
                Epilogue::<T>::store_wide_row(&RoundAndCheck { scale, found_inf: &wide }, 0, &sums, &mut out);
                assert_eq!(wide.into_inner(), row.into_inner());
            }
        }
    }

    #[test]
    fn wide_rows_are_stored_like_any_other() {
        if Isa::available().contains(&Isa::Amx) {
            agree_in::<f32>();
            agree_in::<bf16>();
            agree_in::<half::f16>();
        }
    }
}

cpu_kernel!(Linear { dims, x, w, bias, y }, |threads| floats(linear_scratch(dims, threads)), |cx| {
    let bias = bias.map(|bias| cx.read::<T>(bias)).transpose()?;
    linear(cx.pool, dims, cx.read(x)?, cx.read(w)?, bias, cx.write(y)?, cx.scratch()?);
});

cpu_kernel!(LinearAdd { dims, scale, x, w, y }, |threads| floats(linear_scratch(dims, threads)), |cx| {
    let (x, w) = (cx.read::<T>(x)?, cx.read(w)?);
    linear_add(cx.pool, dims, scale, x, w, cx.write(y)?, cx.scratch()?);
});

cpu_kernel!(
    LinearDx { dims, scale, dy, w, dx, add },
    |threads| floats(linear_scratch(dims, threads)),
    |cx| {
        let (dy, w) = (cx.read::<T>(dy)?, cx.read(w)?);
        linear_dx(cx.pool, dims, scale, dy, w, cx.write(dx)?, add, cx.scratch()?);
    }
);

cpu_kernel!(
    LinearDw { dims, scale, dy, x, dw, store },
    |threads| floats(linear_scratch(dims, threads)),
    |cx| {
        let (dy, x, s) = (cx.read::<T>(dy)?, cx.read(x)?, cx.scratch()?);
        match store {
            GradStore::Add => linear_dw(cx.pool, dims, scale, dy, x, cx.write(dw)?, s),
            GradStore::Write => {
                linear_dw_rounded::<T, f32>(cx.pool, dims, scale, dy, x, cx.write(dw)?, s);
            }
            GradStore::Round { to, found_inf } => {
                let found = if to == DType::F32 {
                    linear_dw_rounded::<T, f32>(cx.pool, dims, scale, dy, x, cx.write(dw)?, s)
                } else if to == T::DTYPE {
                    linear_dw_rounded::<T, T>(cx.pool, dims, scale, dy, x, cx.write(dw)?, s)
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

cpu_kernel!(LinearDb { dims, dy, db }, |threads| floats(linear_scratch(dims, threads)), |cx| {
    linear_db::<T>(cx.pool, dims, cx.read(dy)?, cx.write(db)?, cx.scratch()?);
});
