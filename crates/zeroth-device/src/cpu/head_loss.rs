//! The head: projection to the vocabulary, softmax and cross-entropy in slices of tokens.
//!
//! No [tokens, vocab] tensor exists: a slice's logits live in scratch, in f32, become their own gradient there, and are
//! used up before the next slice. How many rows a slice has depends on the sizes only.

use super::cut::Chunks;
use super::element::Element;
use super::matmul::{self, View, matmul};
use super::path::each_path;
use super::pool::Pool;
use super::{check_len, check_scratch, math};

/// Elements of a slice's logits, about: 64 MiB of f32.
const SLICE: usize = 16 << 20;

/// The sizes of the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLossDims {
    /// Tokens.
    pub rows: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Rows of the projection.
    pub vocab: usize,
}

impl HeadLossDims {
    /// Rows of a slice.
    pub const fn slice_rows(self) -> usize {
        let fitting = match SLICE.checked_div(self.vocab) {
            Some(rows) => rows,
            None => 512,
        };
        let rows = if fitting < 16 {
            16
        } else if fitting > 512 {
            512
        } else {
            fitting
        };
        if rows < self.rows { rows } else { self.rows }
    }

    fn check<T>(self, x: &[T], w: &[T], labels: &[i32]) {
        check_len("x", x.len(), self.rows * self.hidden);
        check_len("w", w.len(), self.vocab * self.hidden);
        check_len("labels", labels.len(), self.rows);
        if let Some(label) = labels.iter().find(|&&label| label >= 0 && label as usize >= self.vocab) {
            panic!("label {label} for a vocabulary of {}; the data is checked when it is read", self.vocab);
        }
    }
}

/// f32 elements of scratch that the functions here need with a pool of `threads`.
pub fn head_loss_scratch(dims: HeadLossDims, threads: usize) -> usize {
    let HeadLossDims { hidden, vocab, .. } = dims;
    let rows = dims.slice_rows();
    let product = matmul::scratch(rows, vocab, hidden, threads)
        .max(matmul::scratch(rows, hidden, vocab, threads))
        .max(matmul::scratch(vocab, hidden, rows, threads));
    rows * vocab + rows + product
}

/// The sum of the losses of trained tokens, without gradients. A negative label (-100) is not trained.
pub fn head_loss<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scratch: &mut [f32],
) -> f64 {
    dims.check(x, w, labels);
    check_scratch(scratch.len(), head_loss_scratch(dims, pool.threads()));
    let mut total = 0.0;
    for first in (0..dims.rows).step_by(dims.slice_rows().max(1)) {
        let rows = dims.slice_rows().min(dims.rows - first);
        let labels = &labels[first..first + rows];
        total += slice_loss(pool, dims, &x[first * dims.hidden..], w, labels, 0.0, scratch);
    }
    total
}

/// The sum of the losses of trained tokens. Writes dx and adds dw, both times `scale`, in the same pass.
///
/// `scale` is 1 / (trained tokens of the step), times the loss scale. The sum returned is without it.
pub fn head_loss_backward<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scale: f32,
    dx: &mut [T],
    dw: &mut [f32],
    scratch: &mut [f32],
) -> f64 {
    let HeadLossDims { hidden, vocab, .. } = dims;
    dims.check(x, w, labels);
    check_len("dx", dx.len(), x.len());
    check_len("dw", dw.len(), w.len());
    check_scratch(scratch.len(), head_loss_scratch(dims, pool.threads()));
    let mut total = 0.0;
    for first in (0..dims.rows).step_by(dims.slice_rows().max(1)) {
        let rows = dims.slice_rows().min(dims.rows - first);
        let place = first * hidden..(first + rows) * hidden;
        let labels = &labels[first..first + rows];
        total += slice_loss(pool, dims, &x[place.clone()], w, labels, scale, scratch);
        let (logits, scratch) = scratch.split_at_mut(rows * vocab);
        let grads = View::rows(&*logits, vocab);
        let (dx, x) = (&mut dx[place.clone()], View::rows(&x[place], hidden));
        matmul(pool, [rows, hidden, vocab], grads, View::rows(w, hidden), dx, scratch, |_, sums, dx| {
            for (dx, &sum) in dx.iter_mut().zip(sums) {
                *dx = T::from_f32(sum);
            }
        });
        matmul(pool, [vocab, hidden, rows], grads.transposed(), x, dw, scratch, |_, sums, dw| {
            for (dw, sum) in dw.iter_mut().zip(sums) {
                *dw += sum;
            }
        });
    }
    total
}

/// The losses of one slice, summed in the order of rows; leaves the gradients of its logits at the start of scratch.
fn slice_loss<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scale: f32,
    scratch: &mut [f32],
) -> f64 {
    let HeadLossDims { hidden, vocab, .. } = dims;
    let rows = labels.len();
    let (logits, scratch) = scratch.split_at_mut(rows * vocab);
    let (losses, scratch) = scratch.split_at_mut(rows);
    let (x, w) = (View::rows(x, hidden), View::rows(w, hidden).transposed());
    matmul(pool, [rows, vocab, hidden], x, w, logits, scratch, |_, sums, logits| {
        logits.copy_from_slice(sums);
    });
    pool.each((Chunks::new(logits, vocab), Chunks::new(losses, 1)), |row, (logits, loss)| {
        loss[0] = row_loss(pool.path(), logits, labels[row], scale);
    });
    losses.iter().map(|&loss| f64::from(loss)).sum()
}

each_path! {
    /// Turns a row of logits into their gradient and returns the loss.
    fn row_loss(logits: &mut [f32], label: i32, scale: f32) -> f32 {
        let Ok(label) = usize::try_from(label) else {
            logits.fill(0.0);
            return 0.0;
        };
        let peak = math::largest(logits);
        let chosen = logits[label] - peak;
        for logit in logits.iter_mut() {
            *logit = math::exp(*logit - peak);
        }
        let total = math::sum(logits.len(), |i| logits[i]);
        let share = scale / total;
        for logit in logits.iter_mut() {
            *logit *= share;
        }
        logits[label] -= scale;
        total.ln() - chosen
    }
}
