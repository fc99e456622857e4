//! The head with a teacher: cross-entropy and the divergence from the teacher's distribution, in slices of rows.
//!
//! A slice holds the f32 logits of the student and of the teacher. Each row becomes its gradient in place, in the type of the
//! gradient, and then the slice is multiplied into dx and dw.

mod launch;
pub(super) mod rows;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use zeroth_base::DType;

use super::{RoundedGrad, TokenRows, check, check_dx};
use crate::gemm::{self, MatrixView, gemm, gemm_tn};
use crate::linear::{Accumulate, Round, RoundAndCheck};
use crate::pool::Pool;
use crate::rows::{check_rows, row_stride};
use crate::work_partition::Chunks;
use crate::{check_len, check_scratch};
use rows::{Cached, RowLosses, Terms};
use zeroth_kernel::{DivergenceSpec, Element, HeadLossDims, TeacherSpans};

/// Rows of w whose gradient is summed in f32 before it is rounded.
const BLOCK: usize = 2048;
/// Rows per rounding task.
const BAND: usize = 64;

/// The teacher of a head, with its operands: see [`TeacherSpans`].
#[derive(Debug, Clone, Copy)]
pub enum TeacherSlices<'a, T> {
    /// A hidden state x [rows, hidden] and a head w [vocab, hidden].
    Hidden {
        /// Its hidden size.
        hidden: usize,
        /// Its vocabulary.
        vocab: usize,
        /// Row stride of x.
        row_stride: usize,
        /// The hidden state.
        x: &'a [T],
        /// The head.
        w: &'a [T],
    },
    /// Log-probabilities of some tokens [rows, k].
    TopK {
        /// Tokens of a row.
        k: usize,
        /// Its vocabulary.
        vocab: usize,
        /// Whether all other tokens are one more outcome.
        tail: bool,
        /// The tokens.
        ids: &'a [i32],
        /// Their log-probabilities.
        log_probs: &'a [f32],
    },
}

/// The sizes of a teacher that scratch depends on.
#[derive(Debug, Clone, Copy)]
pub struct TeacherDims {
    hidden: usize,
    /// Columns of its logits.
    logits: usize,
    /// Cached tokens of a row.
    k: usize,
}

impl From<&TeacherSpans> for TeacherDims {
    fn from(teacher: &TeacherSpans) -> Self {
        match *teacher {
            TeacherSpans::Hidden { hidden, vocab, .. } => Self { hidden, logits: vocab, k: 0 },
            TeacherSpans::TopK { k, .. } => Self { hidden: 0, logits: 0, k },
        }
    }
}

impl<T> TeacherSlices<'_, T> {
    /// Its sizes.
    pub const fn dims(&self) -> TeacherDims {
        match *self {
            Self::Hidden { hidden, vocab, .. } => TeacherDims { hidden, logits: vocab, k: 0 },
            Self::TopK { k, .. } => TeacherDims { hidden: 0, logits: 0, k },
        }
    }

    fn check(&self, rows: usize) {
        match *self {
            Self::Hidden { hidden, vocab, row_stride, x, w } => {
                check_rows("the teacher's x", x.len(), [rows, hidden], row_stride);
                check_len("the teacher's w", w.len(), vocab * hidden);
            }
            Self::TopK { k, ids, log_probs, .. } => {
                check_len("the teacher's ids", ids.len(), rows * k);
                check_len("the teacher's log-probabilities", log_probs.len(), rows * k);
            }
        }
    }
}

/// Where the gradient of a weight is stored.
pub enum DistillDw<'a, T> {
    /// In f32, accumulated or overwritten.
    F32 {
        /// The gradient.
        dw: &'a mut [f32],
        /// Whether it is accumulated.
        add: bool,
    },
    /// Rounded once. The rows must be one slice.
    Rounded {
        /// The gradient.
        dw: &'a mut [T],
        /// See [`TokenRows`].
        token_rows: Option<TokenRows<'a>>,
    },
}

/// f32 elements of the parts of a slice: the student's logits, the teacher's, and the losses of its rows.
fn slice_scratch(dims: HeadLossDims, teacher: TeacherDims) -> [usize; 3] {
    let rows = dims.distill_slice_rows(teacher.logits);
    let stride = |vocab: usize| row_stride(vocab, DType::F32);
    [rows * stride(dims.vocab), rows * stride(teacher.logits.min(dims.vocab)), 2 * rows]
}

/// f32 elements of scratch that [`distill_loss_backward`] needs with a pool of `threads`; `rounds` for a rounded dw.
pub fn distill_loss_scratch(dims: HeadLossDims, teacher: TeacherDims, threads: usize, rounds: bool) -> usize {
    let HeadLossDims { hidden, vocab, .. } = dims;
    let (rows, shared) = (dims.distill_slice_rows(teacher.logits), teacher.logits.min(vocab));
    let of_dw = if rounds { BLOCK.min(vocab) } else { vocab };
    let gemm = gemm::scratch(rows, vocab, hidden, threads)
        .max(gemm::scratch(rows, shared, teacher.hidden, threads))
        .max(gemm::scratch(rows, hidden, vocab, threads))
        .max(gemm::scratch(of_dw, hidden, rows, threads))
        .max(gemm::gemm_tn_scratch(of_dw, hidden, rows, threads));
    let rounded = if rounds { BLOCK.min(vocab) * hidden } else { 0 };
    let slice: usize = slice_scratch(dims, teacher).iter().sum();
    slice + (gemm + rounded).max(threads * Cached::scratch(teacher.k))
}

/// The sums over trained tokens of the cross-entropy and of the divergence from the teacher, and whether a rounded dw is not finite.
/// In the same pass writes dx and stores dw, of both losses times their `scales`. See
/// [`head_loss_backward`](super::head_loss_backward).
///
/// # Panics
/// If dw is rounded and the rows are several slices.
pub fn distill_loss_backward<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    distillation: DivergenceSpec,
    teacher: TeacherSlices<T>,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scales: [f32; 2],
    dx: Option<&mut [T]>,
    dw: Option<DistillDw<T>>,
    scratch: &mut [f32],
) -> ([f64; 2], bool) {
    check(dims, x, w, labels);
    check_dx(x, dx.as_deref());
    teacher.check(dims.rows);
    let rounds = matches!(dw, Some(DistillDw::Rounded { .. }));
    check_scratch(scratch.len(), distill_loss_scratch(dims, teacher.dims(), pool.threads(), rounds));
    match &dw {
        None => {}
        Some(DistillDw::F32 { dw, .. }) => check_len("dw", dw.len(), w.len()),
        Some(DistillDw::Rounded { dw, token_rows }) => {
            check_len("dw", dw.len(), w.len());
            if let Some(token_rows) = token_rows {
                check_len("ids", token_rows.ids.len(), dims.rows);
                check_len("token rows", token_rows.rows.len(), dims.rows * dims.hidden);
            }
            assert!(
                dims.is_one_distill_slice(teacher.dims().logits),
                "{dims:?} is more than one slice; several slices accumulate their gradients in f32"
            );
        }
    }
    let terms = Terms::new(distillation, scales);
    match T::DTYPE {
        DType::Bf16 => run::<T, bf16>(pool, dims, terms, teacher, x, w, labels, dx, dw, scratch),
        DType::F16 | DType::F32 => run::<T, f32>(pool, dims, terms, teacher, x, w, labels, dx, dw, scratch),
    }
}

/// Gradients of logits are stored as `E`.
fn run<T: Element, E: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    terms: Terms,
    teacher: TeacherSlices<T>,
    x: &[T],
    w: &[T],
    labels: &[i32],
    mut dx: Option<&mut [T]>,
    mut dw: Option<DistillDw<T>>,
    scratch: &mut [f32],
) -> ([f64; 2], bool) {
    let found_inf = AtomicBool::new(false);
    if dims.rows == 0 {
        match &mut dw {
            Some(DistillDw::F32 { dw, add: false }) => dw.fill(0.0),
            Some(DistillDw::Rounded { dw, .. }) => dw.fill(T::default()),
            _ => {}
        }
    }
    let [student, of_teacher, losses] = slice_scratch(dims, teacher.dims());
    let (student, scratch) = scratch.split_at_mut(student);
    let (of_teacher, scratch) = scratch.split_at_mut(of_teacher);
    let (losses, scratch) = scratch.split_at_mut(losses);
    let losses: &mut [RowLosses] = bytemuck::cast_slice_mut(losses);
    let most = dims.distill_slice_rows(teacher.dims().logits);
    let mut sums = [0.0; 2];
    for first in (0..dims.rows).step_by(most.max(1)) {
        let rows = most.min(dims.rows - first);
        let range = first * dims.row_stride..(first + rows) * dims.row_stride;
        let slice =
            Slice { pool, dims, terms, first, x: &x[range.clone()], w, labels: &labels[first..][..rows] };
        let losses = &mut losses[..rows];
        slice.losses::<E>(teacher, student, of_teacher, losses, scratch);
        for RowLosses { ce, kd } in losses {
            sums[0] += f64::from(*ce);
            sums[1] += f64::from(*kd) * f64::from(terms.factor);
        }
        let gradient = slice.gradient::<E>(student);
        if let Some(dx) = &mut dx {
            let (shape, w) = ([rows, dims.hidden, dims.vocab], MatrixView::row_major(w, dims.hidden));
            let dx = &mut dx[range];
            gemm(pool, shape, gradient, w, dx, dims.row_stride, scratch, &Round { scale: 1.0 });
        }
        match &mut dw {
            None => {}
            Some(DistillDw::F32 { dw, add }) => {
                slice.dw(gradient, dw, *add, scratch);
                *add = true;
            }
            Some(DistillDw::Rounded { dw, token_rows }) => {
                let token_rows =
                    token_rows.as_mut().map(|own| TokenRows { ids: own.ids, rows: &mut *own.rows });
                let mut rounded = RoundedGrad { dw, token_rows, found_inf: &found_inf };
                slice.rounded_dw(gradient, &mut rounded, scratch);
            }
        }
    }
    (sums, found_inf.into_inner())
}

/// One slice of rows.
struct Slice<'a, T> {
    pool: &'a Pool,
    dims: HeadLossDims,
    terms: Terms,
    /// Its first row.
    first: usize,
    x: &'a [T],
    w: &'a [T],
    labels: &'a [i32],
}

impl<T: Element> Slice<'_, T> {
    /// The row stride of the student's logits.
    fn stride(&self) -> usize {
        row_stride(self.dims.vocab, DType::F32)
    }

    /// The losses of each row; replaces the student's logits by their gradient.
    fn losses<E: Element>(
        &self,
        teacher: TeacherSlices<T>,
        student: &mut [f32],
        of_teacher: &mut [f32],
        losses: &mut [RowLosses],
        scratch: &mut [f32],
    ) {
        let Self { pool, terms, first, labels, .. } = *self;
        let HeadLossDims { hidden, vocab, row_stride: x_stride, .. } = self.dims;
        let (rows, stride) = (labels.len(), self.stride());
        let student = &mut student[..rows * stride];
        logits(pool, [rows, vocab, hidden], self.x, x_stride, self.w, student, scratch);
        match teacher {
            TeacherSlices::Hidden { hidden, vocab: of_teachers, row_stride: x_stride, x, w } => {
                let shared = vocab.min(of_teachers);
                let t_stride = row_stride(shared, DType::F32);
                let of_teacher = &mut of_teacher[..rows * t_stride];
                let x = &x[first * x_stride..][..rows * x_stride];
                let w = &w[..shared * hidden];
                logits(pool, [rows, shared, hidden], x, x_stride, w, of_teacher, scratch);
                let of_teacher = &*of_teacher;
                pool.each(
                    (Chunks::new(student, stride), Chunks::new(losses, 1)),
                    |row, (student, losses)| {
                        let of_teacher = &of_teacher[row * t_stride..][..shared];
                        losses[0] = rows::online::<E>(
                            pool.isa(),
                            &mut student[..vocab],
                            of_teacher,
                            labels[row],
                            terms,
                        );
                    },
                );
            }
            TeacherSlices::TopK { k, vocab: of_teachers, tail, ids, log_probs } => {
                let parts = (Chunks::new(student, stride), Chunks::new(losses, 1));
                pool.each_with(parts, scratch, |row, (student, losses), scratch| {
                    let listed = (first + row) * k..(first + row + 1) * k;
                    let (ids, log_probs) = (&ids[listed.clone()], &log_probs[listed]);
                    let cached = Cached::new(ids, log_probs, vocab.min(of_teachers), tail, scratch);
                    losses[0] =
                        rows::offline::<E>(pool.isa(), &mut student[..vocab], cached, labels[row], terms);
                });
            }
        }
    }

    /// The gradient of the logits [rows, vocab], which has replaced them.
    fn gradient<'a, E: Element>(&self, student: &'a [f32]) -> MatrixView<'a, E> {
        let stride = self.stride();
        let gradient = bytemuck::cast_slice::<f32, E>(&student[..self.labels.len() * stride]);
        MatrixView::row_major(gradient, stride * (size_of::<f32>() / size_of::<E>()))
    }

    /// Stores or accumulates gradientᵀ · x.
    fn dw<E: Element>(&self, gradient: MatrixView<E>, dw: &mut [f32], add: bool, scratch: &mut [f32]) {
        let HeadLossDims { hidden, row_stride, .. } = self.dims;
        let (pool, shape) = (self.pool, [dw.len() / hidden.max(1), hidden, self.labels.len()]);
        // Written with the bits of a sum that starts from zeros; whether it is finite is found later.
        let write = RoundAndCheck { scale: 1.0, found_inf: &AtomicBool::new(false) };
        let accumulate = Accumulate { scale: 1.0 };
        if E::DTYPE == T::DTYPE {
            let x = MatrixView::row_major(bytemuck::cast_slice::<T, E>(self.x), row_stride);
            if add {
                gemm_tn(pool, shape, gradient, x, dw, scratch, &accumulate);
            } else {
                gemm_tn(pool, shape, gradient, x, dw, scratch, &write);
            }
        } else {
            let (x, gradient) = (MatrixView::row_major(self.x, row_stride), gradient.transposed());
            if add {
                gemm(pool, shape, gradient, x, dw, hidden, scratch, &accumulate);
            } else {
                gemm(pool, shape, gradient, x, dw, hidden, scratch, &write);
            }
        }
    }

    /// The gradient of w in blocks, each rounded when it is complete.
    fn rounded_dw<E: Element>(
        &self,
        gradient: MatrixView<E>,
        rounded: &mut RoundedGrad<T>,
        scratch: &mut [f32],
    ) {
        let HeadLossDims { hidden, vocab, .. } = self.dims;
        let (sums, scratch) = scratch.split_at_mut(BLOCK.min(vocab) * hidden);
        for first in (0..vocab).step_by(BLOCK) {
            let count = BLOCK.min(vocab - first);
            let sums = &mut sums[..count * hidden];
            self.dw(gradient.submatrix(0, first), sums, false, scratch);
            let (sums, found_inf) = (&*sums, rounded.found_inf);
            let bands = rounded.bands(first..first + count, BAND, hidden);
            self.pool.each(bands, |band, rows| {
                let sums = &sums[band * BAND * hidden..][..rows.len()];
                if rows.finish(self.pool.isa(), sums) {
                    found_inf.store(true, Ordering::Relaxed);
                }
            });
        }
    }
}

/// Writes x · wᵀ in f32; rows of `to` have the stride of f32 activations.
pub(in crate::head_loss) fn logits<T: Element>(
    pool: &Pool,
    [rows, vocab, hidden]: [usize; 3],
    x: &[T],
    x_stride: usize,
    w: &[T],
    to: &mut [f32],
    scratch: &mut [f32],
) {
    let (x, w) = (MatrixView::row_major(x, x_stride), MatrixView::row_major(w, hidden).transposed());
    let stride = row_stride(vocab, DType::F32);
    gemm(pool, [rows, vocab, hidden], x, w, to, stride, scratch, &Round { scale: 1.0 });
}
