//! y = x · wᵀ + bias and its gradients. Weights are [out, in], as Hugging Face files hold them.

use std::sync::atomic::{AtomicBool, Ordering};

use super::cut::Chunks;
use super::matmul::{self, Store, View, over_rows, product};
#[cfg(target_arch = "x86_64")]
use super::matmul::{LINE, Line};
use super::pool::Pool;
use super::rows::stride as pitch;
use super::{check_len, check_scratch, columns};
use zeroth_kernel::LinearDims;
use zeroth_kernel::{Element, is_nonfinite};

/// Sums are rounded and written.
struct Rounded;

impl<T: Element> Store<T> for Rounded {
    #[inline(always)]
    fn row(&self, _: usize, sums: &[f32], out: &mut [T]) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(sum);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn line(&self, first: usize, sums: &[f32; LINE], out: &mut [T; LINE]) {
        if Line::of(sums).write(out).is_none() {
            self.row(first, sums, out);
        }
    }
}

/// The same with a number for every column added before.
struct Biased<'a, T>(&'a [T]);

impl<T: Element> Store<T> for Biased<'_, T> {
    #[inline(always)]
    fn row(&self, first: usize, sums: &[f32], out: &mut [T]) {
        for ((out, sum), bias) in out.iter_mut().zip(sums).zip(&self.0[first..]) {
            *out = T::from_f32(sum + bias.to_f32());
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn line(&self, first: usize, sums: &[f32; LINE], out: &mut [T; LINE]) {
        let bias = self.0[first..].first_chunk().and_then(Line::read);
        if bias.and_then(|bias| Line::of(sums).plus(bias).write(out)).is_none() {
            self.row(first, sums, out);
        }
    }
}

/// Sums are added to what is there.
struct Added;

impl<T: Element> Store<T> for Added {
    const READS: bool = true;

    #[inline(always)]
    fn row(&self, _: usize, sums: &[f32], out: &mut [T]) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(out.to_f32() + sum);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn line(&self, first: usize, sums: &[f32; LINE], out: &mut [T; LINE]) {
        let sum = Line::read(out).map(|there| there.plus(Line::of(sums)));
        if sum.and_then(|sum| sum.write(out)).is_none() {
            self.row(first, sums, out);
        }
    }
}

/// Sums are rounded and written, and `broken` becomes true where one is not finite. It only ever becomes true, so the
/// order of the tasks means nothing.
struct Checked<'a> {
    broken: &'a AtomicBool,
}

impl<T: Element> Store<T> for Checked<'_> {
    #[inline(always)]
    fn row(&self, _: usize, sums: &[f32], out: &mut [T]) {
        let mut endless = false;
        for (out, sum) in out.iter_mut().zip(sums) {
            // A sum of -0 becomes 0.
            *out = T::from_f32(0.0 + sum);
            endless |= is_nonfinite(*out);
        }
        if endless {
            self.broken.store(true, Ordering::Relaxed);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn line(&self, first: usize, sums: &[f32; LINE], out: &mut [T; LINE]) {
        match Line::of(sums).plus_zero().write(out) {
            Some(endless) => {
                if endless {
                    self.broken.store(true, Ordering::Relaxed);
                }
            }
            None => self.row(first, sums, out),
        }
    }
}

/// f32 elements of scratch that any of the functions here needs with a pool of `threads`.
pub fn linear_scratch(dims: LinearDims, threads: usize) -> usize {
    let LinearDims { rows, inputs, outputs } = dims;
    matmul::scratch(rows, outputs, inputs, threads)
        .max(matmul::scratch(rows, inputs, outputs, threads))
        .max(matmul::over_rows_scratch(outputs, inputs, rows, threads))
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
    let LinearDims { rows, inputs, outputs } = dims;
    let x = View::rows(x, pitch("x", x.len(), [rows, inputs]));
    check_len("w", w.len(), outputs * inputs);
    if let Some(bias) = bias {
        check_len("bias", bias.len(), outputs);
    }
    let (sizes, w) = ([rows, outputs, inputs], View::rows(w, inputs).transposed());
    match bias {
        Some(bias) => product(pool, sizes, x, w, y, scratch, &Biased(bias)),
        None => product(pool, sizes, x, w, y, scratch, &Rounded),
    }
}

/// dx[rows, inputs] = dy[rows, outputs] · w[outputs, inputs]; with `add` the result is added to what dx holds.
pub fn linear_dx<T: Element>(
    pool: &Pool,
    dims: LinearDims,
    dy: &[T],
    w: &[T],
    dx: &mut [T],
    add: bool,
    scratch: &mut [f32],
) {
    let LinearDims { rows, inputs, outputs } = dims;
    let dy = View::rows(dy, pitch("dy", dy.len(), [rows, outputs]));
    check_len("w", w.len(), outputs * inputs);
    let (sizes, w) = ([rows, inputs, outputs], View::rows(w, inputs));
    if add {
        product(pool, sizes, dy, w, dx, scratch, &Added);
    } else {
        product(pool, sizes, dy, w, dx, scratch, &Rounded);
    }
}

/// What gradients of weights are products of.
fn rows_of<'a, T>(dims: LinearDims, dy: &'a [T], x: &'a [T]) -> (View<'a, T>, View<'a, T>) {
    let LinearDims { rows, inputs, outputs } = dims;
    let dy = View::rows(dy, pitch("dy", dy.len(), [rows, outputs]));
    (dy, View::rows(x, pitch("x", x.len(), [rows, inputs])))
}

/// dw[outputs, inputs] += dy[rows, outputs]ᵀ · x[rows, inputs], in f32.
pub fn linear_dw<T: Element>(
    pool: &Pool,
    dims: LinearDims,
    dy: &[T],
    x: &[T],
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let LinearDims { rows, inputs, outputs } = dims;
    let (dy, x) = rows_of(dims, dy, x);
    over_rows(pool, [outputs, inputs, rows], dy, x, dw, scratch, &Added);
}

/// dw[outputs, inputs] = dy[rows, outputs]ᵀ · x[rows, inputs], rounded once; whether a result is not finite. The bits are
/// those that [`linear_dw`] leaves where zeros were, rounded.
pub fn linear_dw_once<T: Element, O: Element>(
    pool: &Pool,
    dims: LinearDims,
    dy: &[T],
    x: &[T],
    dw: &mut [O],
    scratch: &mut [f32],
) -> bool {
    let LinearDims { rows, inputs, outputs } = dims;
    let (dy, x) = rows_of(dims, dy, x);
    let broken = AtomicBool::new(false);
    over_rows(pool, [outputs, inputs, rows], dy, x, dw, scratch, &Checked { broken: &broken });
    broken.into_inner()
}

/// `db[outputs]` += the column sums of dy[rows, outputs], in f32.
pub fn linear_db<T: Element>(pool: &Pool, dims: LinearDims, dy: &[T], db: &mut [f32], scratch: &mut [f32]) {
    let LinearDims { rows, outputs, .. } = dims;
    let pitch = pitch("dy", dy.len(), [rows, outputs]);
    check_len("db", db.len(), outputs);
    if outputs == 0 {
        return;
    }
    check_scratch(scratch.len(), columns::partials(rows, outputs));
    let partials = &mut scratch[..columns::partials(rows, outputs)];
    pool.each(Chunks::new(partials, outputs), |block, sums| {
        sums.fill(0.0);
        for dy in columns::block_of(dy, pitch, block).chunks_exact(pitch) {
            for (sum, dy) in sums.iter_mut().zip(dy) {
                *sum += dy.to_f32();
            }
        }
    });
    columns::add_partials(pool, partials, db);
}

#[cfg(test)]
mod row_tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{apart, bits, pools, random, spread};

    fn rows_apart_are_rows<T: Element>(pool: &Pool, dims: LinearDims) {
        let LinearDims { rows, inputs, outputs } = dims;
        let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        let [x, dy, dx] = [(1, inputs), (2, outputs), (3, inputs)].map(|(name, width)| {
            let together = random::<T>(name, rows * width);
            let apart = apart(&together, width, f32::NAN);
            [together, apart]
        });
        let (w, bias, dw) =
            (random::<T>(4, outputs * inputs), random::<T>(5, outputs), random::<f32>(6, outputs * inputs));
        let mut scratch = vec![f32::NAN; linear_scratch(dims, pool.threads())];
        for bias in [None, Some(&bias[..])] {
            let [expected, found] = [0, 1].map(|at| {
                let mut y = vec![T::from_f32(f32::NAN); dy[at].len()];
                linear(pool, dims, &x[at], &w, bias, &mut y, &mut scratch);
                y
            });
            assert_eq!(bits(&found), bits(&apart(&expected, outputs, f32::NAN)), "{case}");
        }
        for add in [false, true] {
            let [expected, found] = [0, 1].map(|at| {
                let mut dx = dx[at].clone();
                linear_dx(pool, dims, &dy[at], &w, &mut dx, add, &mut scratch);
                dx
            });
            assert_eq!(bits(&found), bits(&apart(&expected, inputs, f32::NAN)), "{case}, dx, add: {add}");
        }
        let [expected, found] = [0, 1].map(|at| {
            let (mut added, mut once, mut db) = (dw.clone(), w.clone(), dw[..outputs].to_vec());
            linear_dw(pool, dims, &dy[at], &x[at], &mut added, &mut scratch);
            let broken = linear_dw_once(pool, dims, &dy[at], &x[at], &mut once, &mut scratch);
            linear_db(pool, dims, &dy[at], &mut db, &mut scratch);
            (broken, bits(&added), bits(&once), bits(&db))
        });
        assert!(found == expected && !found.0, "{case}, gradients of weights");
    }

    #[test]
    fn rows_may_be_further_apart_than_they_are_long() {
        for pool in pools() {
            // Whole steps of tiles and others; sums of several blocks.
            for (rows, inputs, outputs) in [(70, 64, 96), (33, 40, 5), (5, 1100, 33), (40, 33, 2500)] {
                let dims = LinearDims { rows, inputs, outputs };
                rows_apart_are_rows::<f32>(&pool, dims);
                rows_apart_are_rows::<bf16>(&pool, dims);
                rows_apart_are_rows::<f16>(&pool, dims);
            }
        }
    }

    #[test]
    fn rows_whole_lines_apart_are_multiplied_where_they_stand() {
        // As steps have them: tiles take such rows without a copy.
        for pool in pools() {
            let dims = LinearDims { rows: 70, inputs: 512, outputs: 96 };
            let pitch = crate::row_stride(512, zeroth_base::DType::Bf16);
            let (x, w) = (random::<bf16>(1, 70 * 512), random::<bf16>(2, 96 * 512));
            let wide = spread(&x, [512, pitch], f32::NAN);
            let mut scratch = vec![f32::NAN; linear_scratch(dims, pool.threads())];
            let [expected, found] = [x, wide].map(|x| {
                let mut y = vec![bf16::NAN; 70 * 96];
                linear(&pool, dims, &x, &w, None, &mut y, &mut scratch);
                bits(&y)
            });
            assert!(pitch > 512 && found == expected, "{}, {} threads", pool.isa(), pool.threads());
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::fmt::Debug;

    use half::bf16;

    use super::*;
    use crate::Isa;

    /// What sums of tiles may be: halfway between two numbers, -0, infinite, no number.
    fn sums() -> [f32; LINE] {
        let odd = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE];
        std::array::from_fn(|at| match at {
            0..8 => odd[at],
            8 => f32::from_bits(0x7f80_0001),
            // The last 16 bits are a half, a bit more or a bit less.
            at => f32::from_bits(0x3f80_0000 + ((at as u32) << 16) + 0x7fff + at as u32 % 3),
        })
    }

    /// `line` and `row` leave the same bits.
    #[track_caller]
    fn agree<T: Element + PartialEq + Debug>(store: &impl Store<T>, sums: &[f32; LINE], there: [T; LINE]) {
        let (mut line, mut row) = (there, there);
        store.line(0, sums, &mut line);
        store.row(0, sums, &mut row);
        assert_eq!(bytemuck::bytes_of(&line), bytemuck::bytes_of(&row));
    }

    fn agree_in<T: Element + PartialEq + Debug>() {
        let there = std::array::from_fn(|at| T::from_f32(at as f32 * 0.37 - 3.0));
        let finite = sums().map(|sum| if sum.is_finite() { sum } else { -1.5 });
        for sums in [sums(), finite] {
            agree(&Rounded, &sums, there);
            agree(&Added, &sums, there);
            agree(&Biased(&there), &sums, there);
            let [line, row] = [AtomicBool::new(false), AtomicBool::new(false)];
            agree(&Checked { broken: &line }, &sums, there);
            let mut out = there;
            Store::<T>::row(&Checked { broken: &row }, 0, &sums, &mut out);
            let broken = AtomicBool::new(false);
            Store::<T>::line(&Checked { broken: &broken }, 0, &sums, &mut out);
            assert_eq!(broken.into_inner(), row.into_inner());
        }
    }

    #[test]
    fn a_row_of_two_tiles_is_stored_as_any_other() {
        if Isa::available().contains(&Isa::Amx) {
            agree_in::<f32>();
            agree_in::<bf16>();
            agree_in::<half::f16>();
        }
    }
}
