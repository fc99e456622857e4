//! Distillation: the logits of a student and of its teacher, one slice of rows at a time, and one kernel that turns the student's into
//! the gradient of cross-entropy and divergence.

use std::mem::offset_of;

use zeroth_base::DType;

use super::entry_points::EntryPoint;
use super::gpu_kernel::{CudaKernel, Libraries, cuda_kernel, stored_in_f32};
use super::launch_context::{LaunchContext, float};
use super::lm_head::{SliceMatmuls, THREADS as SUM_THREADS, is_rounded};
use super::matmuls::Matmuls;
use super::scratch::{WORKSPACE, row_stride, slice_rows, slice_rows_of};
use zeroth_kernel::{Control, DeviceError, GradStore, HeadLossDims, Span, TeacherSpans, operands};

/// Threads per row (`THREADS` in denominators.cu).
const THREADS: u32 = 512;
/// Candidates that are sorted in shared memory (`SORTED_IN_SHARED` in top_log_probs.cu).
const SORTED_IN_SHARED: usize = 2048;

/// The first kernel with cached log-probabilities, and that of the k largest.
const CACHED: usize = 3;
const TOP: usize = 6;

/// The place of a divergence among the kernels.
fn kind(beta: f32) -> usize {
    if beta == 0.0 {
        0
    } else if beta == 1.0 {
        1
    } else {
        2
    }
}

/// Bytes of a row of a slice: the student's logits, and the teacher's logits or the student's logits of cached tokens.
fn row_bytes(dims: HeadLossDims, teacher: &TeacherSpans, dtype: DType) -> [u64; 2] {
    let other = match *teacher {
        TeacherSpans::Hidden { vocab, .. } => dtype.bytes() * row_stride(vocab.min(dims.vocab)) as u64,
        TeacherSpans::TopK { k, .. } => 4 * k as u64,
    };
    [dtype.bytes() * row_stride(dims.vocab) as u64, other]
}

/// Rows of a slice.
fn rows_of_slice(dims: HeadLossDims, teacher: &TeacherSpans, dtype: DType) -> usize {
    slice_rows_of(dims.rows, row_bytes(dims, teacher, dtype).iter().sum())
}

/// Scratch of the loss: of matmuls, of a slice, and two losses per row.
pub(super) fn scratch(dims: HeadLossDims, teacher: &TeacherSpans, dtype: DType) -> [u64; 3] {
    let rows = rows_of_slice(dims, teacher, dtype) as u64;
    [WORKSPACE, rows * row_bytes(dims, teacher, dtype).iter().sum::<u64>(), 8 * dims.rows as u64]
}

/// The loss and the gradients that have a destination.
pub(super) fn loss(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    operands: operands::DistillLossBackward,
) -> Result<(), DeviceError> {
    let operands::DistillLossBackward {
        dims,
        distillation,
        teacher,
        x,
        w,
        labels,
        losses,
        loss_weights,
        control,
        dx,
        dw,
    } = operands;
    let HeadLossDims { rows, hidden, vocab, .. } = dims;
    let dtype = cx.dtype;
    let (x, w) = (cx.typed("x", x, rows * hidden)?, cx.typed("w", w, vocab * hidden)?);
    let labels = cx.words("labels", labels, rows)?;
    let [ce_loss, kd_loss] =
        [cx.structure::<f64>("loss", losses[0])?, cx.structure::<f64>("loss", losses[1])?];
    let [ce_weight, kd_weight] = [
        cx.structure::<f64>("loss_weight", loss_weights[0])?,
        cx.structure::<f64>("loss_weight", loss_weights[1])?,
    ];
    let loss_scale = cx.structure::<Control>("control", control)? + offset_of!(Control, loss_scale) as u64;
    let dx = dx.map(|dx| cx.typed("dx", dx, rows * hidden)).transpose()?;
    let dw = match dw {
        Some(dw) => Some((cx.words("dw", dw.to, vocab * hidden)?, dw.store == GradStore::Add)),
        None => None,
    };
    if let (0, Some((dw, false))) = (rows, dw) {
        cx.driver.set_bytes(dw, 0, 4 * (vocab * hidden) as u64, cx.stream)?;
    }
    let slice = rows_of_slice(dims, &teacher, dtype);
    let workspace = cx.scratch.take(WORKSPACE)?;
    let [own, other] = row_bytes(dims, &teacher, dtype).map(|bytes| slice as u64 * bytes);
    let logits = cx.scratch.take(own + other)?;
    let of_rows = cx.scratch.take(8 * rows as u64)?;
    let (other, ce_losses, kd_losses) = (logits + own, of_rows, of_rows + 4 * rows as u64);
    let student_stride = row_stride(vocab);
    let head = SliceMatmuls { dims, workspace, logits, row_stride: student_stride, x, w, dx, dw };
    let shared = vocab.min(teacher.vocab());
    let from = teacher_operands(cx, &teacher, rows)?;
    let functions = cx.modules.distill(cx.driver, dtype)?;
    let with_grad = u64::from(dx.is_some() || dw.is_some());
    let divergence = [distillation.beta, 1.0 / distillation.temperature, distillation.factor()].map(float);
    for first in (0..rows).step_by(slice.max(1)) {
        let count = slice.min(rows - first);
        head.logits(cx, matmuls, first, count)?;
        let at = 4 * first as u64;
        let common = [labels + at, ce_losses + at, kd_losses + at, vocab as u64, shared as u64];
        let weights = [ce_weight, kd_weight, loss_scale, with_grad];
        let (function, own) = match teacher {
            TeacherSpans::Hidden { hidden, .. } => {
                let [x, w] = from;
                let dims = HeadLossDims::new(rows, hidden, shared);
                let teacher_stride = row_stride(shared);
                let theirs = SliceMatmuls {
                    dims,
                    workspace,
                    logits: other,
                    row_stride: teacher_stride,
                    x,
                    w,
                    dx: None,
                    dw: None,
                };
                theirs.logits(cx, matmuls, first, count)?;
                (kind(distillation.beta), vec![other, teacher_stride as u64])
            }
            TeacherSpans::TopK { k, tail, .. } => {
                let [ids, log_probs] = from.map(|from| from + at * k as u64);
                let own = vec![ids, log_probs, other, k as u64, u64::from(tail)];
                (CACHED + kind(distillation.beta), own)
            }
        };
        let arguments: Vec<u64> = [logits, student_stride as u64]
            .into_iter()
            .chain(own)
            .chain(common)
            .chain(divergence)
            .chain(weights)
            .collect();
        cx.launch(functions[function], [count, 1, 1], THREADS, 0, &arguments)?;
        head.gradients(cx, matmuls, first, count)?;
    }
    for (of_rows, loss) in [(ce_losses, ce_loss), (kd_losses, kd_loss)] {
        cx.run(EntryPoint::SumLosses, &[], [1; 3], SUM_THREADS, &[of_rows, rows as u64, loss])?;
    }
    Ok(())
}

/// The addresses of the teacher's operands.
fn teacher_operands(
    cx: &LaunchContext,
    teacher: &TeacherSpans,
    rows: usize,
) -> Result<[u64; 2], DeviceError> {
    match *teacher {
        TeacherSpans::Hidden { hidden, vocab, x, w, .. } => Ok([
            cx.typed("the teacher's x", x, rows * hidden)?,
            cx.typed("the teacher's w", w, vocab * hidden)?,
        ]),
        TeacherSpans::TopK { k, ids, log_probs, .. } => {
            Ok([cx.words("ids", ids, rows * k)?, cx.words("log_probs", log_probs, rows * k)?])
        }
    }
}

/// Sorted places of a row's candidates.
const fn places(k: usize) -> usize {
    k.next_power_of_two()
}

/// Bytes of a row's candidates.
const fn candidate_bytes(k: usize) -> u64 {
    if places(k) <= SORTED_IN_SHARED { 0 } else { 8 * places(k) as u64 }
}

/// Rows of a slice of the k largest.
fn top_rows(dims: HeadLossDims, k: usize, dtype: DType) -> usize {
    let bytes = dtype.bytes() * row_stride(dims.vocab) as u64 + candidate_bytes(k);
    slice_rows_of(slice_rows(dims, dtype), bytes)
}

/// Scratch of the k largest: of matmuls, of a slice's logits, and of its candidates.
pub(super) fn top_scratch(dims: HeadLossDims, k: usize, dtype: DType) -> [u64; 3] {
    let rows = top_rows(dims, k, dtype) as u64;
    [WORKSPACE, rows * dtype.bytes() * row_stride(dims.vocab) as u64, rows * candidate_bytes(k)]
}

/// The k largest logits of each row and their log-probabilities.
pub(super) fn top_log_probs(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    dims: HeadLossDims,
    k: usize,
    temperature: f32,
    [x, w, ids, log_probs]: [Span; 4],
) -> Result<(), DeviceError> {
    let HeadLossDims { rows, hidden, vocab, .. } = dims;
    if !(1..=vocab).contains(&k) {
        return Err(cx.invalid(format!("the {k} largest of a vocabulary of {vocab}")));
    }
    let (x, w) = (cx.typed("x", x, rows * hidden)?, cx.typed("w", w, vocab * hidden)?);
    let (ids, log_probs) = (cx.words("ids", ids, rows * k)?, cx.words("log_probs", log_probs, rows * k)?);
    let (slice, row_stride) = (top_rows(dims, k, cx.dtype), row_stride(vocab));
    let workspace = cx.scratch.take(WORKSPACE)?;
    let logits = cx.scratch.take((slice * row_stride) as u64 * cx.dtype.bytes())?;
    let candidates = cx.scratch.take(slice as u64 * candidate_bytes(k))?;
    let head = SliceMatmuls { dims, workspace, logits, row_stride, x, w, dx: None, dw: None };
    let function = cx.modules.distill(cx.driver, cx.dtype)?[TOP];
    for first in (0..rows).step_by(slice.max(1)) {
        let count = slice.min(rows - first);
        head.logits(cx, matmuls, first, count)?;
        let at = 4 * (first * k) as u64;
        let sizes = [row_stride, vocab, k, places(k)].map(|size| size as u64);
        let arguments: Vec<u64> = [logits]
            .into_iter()
            .chain(sizes)
            .chain([float(1.0 / temperature), candidates, ids + at, log_probs + at])
            .collect();
        cx.launch(function, [count, 1, 1], THREADS, 0, &arguments)?;
    }
    Ok(())
}

impl CudaKernel for operands::DistillLossBackward {
    fn scratch(&self, dtype: DType) -> [u64; 3] {
        scratch(self.dims, &self.teacher, dtype)
    }

    fn enqueue(self, cx: &mut LaunchContext, libraries: &mut Libraries<'_>) -> Result<(), DeviceError> {
        if self.dw.is_some_and(is_rounded) {
            return Err(stored_in_f32(cx));
        }
        loss(cx, libraries.matmuls, self)
    }
}

cuda_kernel!(
    TopLogProbs { dims, k, temperature, x, w, ids, log_probs },
    |dtype| top_scratch(dims, k, dtype),
    |cx, libraries| top_log_probs(cx, libraries.matmuls, dims, k, temperature, [x, w, ids, log_probs])
);
