//! The language-model head: projection to the vocabulary, softmax and cross-entropy, in slices of tokens and blocks of the
//! vocabulary.
//!
//! No f32 [tokens, vocab] tensor exists: logits exist for some rows and one block of the vocabulary at a time, and only their
//! exponentials are kept, in the type of the gradient.
//!
//! The number of rows in a slice depends on the dimensions and the dtype only.

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocking;
mod distill;
mod launch;
mod portable;
mod rounded_grad;
#[cfg(test)]
mod tests;
mod top_log_probs;

use std::sync::atomic::AtomicBool;

use half::bf16;
use zeroth_base::DType;

use super::pool::Pool;
use super::rows::check_rows;
use super::{check_len, check_scratch};
pub use distill::{DistillDw, TeacherDims, TeacherSlices, distill_loss_backward, distill_loss_scratch};
pub use rounded_grad::TokenRows;
use rounded_grad::{Gradients, RoundedGrad, WeightGrad};
pub use top_log_probs::{top_log_probs, top_log_probs_scratch};
use zeroth_kernel::{Element, HeadLossDims};

fn check<T>(dims: HeadLossDims, x: &[T], w: &[T], labels: &[i32]) {
    check_rows("x", x.len(), [dims.rows, dims.hidden], dims.row_stride);
    check_len("w", w.len(), dims.vocab * dims.hidden);
    check_len("labels", labels.len(), dims.rows);
    if let Some(label) = labels.iter().find(|&&label| label >= 0 && label as usize >= dims.vocab) {
        panic!("label {label} is outside the vocabulary of {}; the data loader checks labels", dims.vocab);
    }
}

fn check_dx<T>(x: &[T], dx: Option<&[T]>) {
    if let Some(dx) = dx {
        check_len("dx", dx.len(), x.len());
    }
}

/// f32 elements of scratch that [`head_loss`] and [`head_loss_backward`] need with a pool of `threads`.
pub fn head_loss_scratch(dims: HeadLossDims, threads: usize) -> usize {
    portable::scratch(dims, threads, false).max(blocking::scratch(dims, threads, false))
}

/// f32 elements of scratch that [`head_loss_backward_rounded`] needs with a pool of `threads`.
pub fn head_loss_rounded_scratch(dims: HeadLossDims, threads: usize) -> usize {
    portable::scratch(dims, threads, true).max(blocking::scratch(dims, threads, true))
}

/// The sum of the losses of trained tokens, without gradients. Tokens with a negative label (-100) are not trained.
pub fn head_loss<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scratch: &mut [f32],
) -> f64 {
    check(dims, x, w, labels);
    check_scratch(scratch.len(), head_loss_scratch(dims, pool.threads()));
    run(pool, dims, x, w, labels, None, scratch)
}

/// The sum of the losses of trained tokens. In the same pass writes dx and accumulates dw, both times `scale`; without `add`
/// dw is overwritten, with the bits of a sum that starts from zeros. dx has the row stride of x. A gradient without a
/// destination is not computed.
///
/// `scale` is the loss scale over the trained tokens of the step. The returned sum is unscaled. Gradients of logits are
/// rounded to bf16 if the model is bf16.
pub fn head_loss_backward<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scale: f32,
    dx: Option<&mut [T]>,
    dw: Option<&mut [f32]>,
    add: bool,
    scratch: &mut [f32],
) -> f64 {
    check(dims, x, w, labels);
    check_dx(x, dx.as_deref());
    if let Some(dw) = &dw {
        check_len("dw", dw.len(), w.len());
    }
    check_scratch(scratch.len(), head_loss_scratch(dims, pool.threads()));
    let wants_gradients = dx.is_some() || dw.is_some();
    let gradients = Gradients { scale, dx, dw: dw.map(|dw| WeightGrad::F32 { dw, add }) };
    run(pool, dims, x, w, labels, wants_gradients.then_some(gradients), scratch)
}

/// [`head_loss_backward`] for rows that are one slice ([`HeadLossDims::is_one_slice`]), with dw rounded once; returns the sum
/// of the losses, and whether an element of dw is not finite. The bits are those of [`head_loss_backward`], rounded.
///
/// Rows of dw for `token_rows` are also stored there in f32:
/// [`embedding_backward_tied`](super::embedding_backward_tied) completes, rounds and checks them.
///
/// # Panics
/// If the rows are several slices.
pub fn head_loss_backward_rounded<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scale: f32,
    dx: Option<&mut [T]>,
    dw: &mut [T],
    token_rows: Option<TokenRows>,
    scratch: &mut [f32],
) -> (f64, bool) {
    check(dims, x, w, labels);
    check_dx(x, dx.as_deref());
    check_len("dw", dw.len(), w.len());
    if let Some(token_rows) = &token_rows {
        check_len("ids", token_rows.ids.len(), dims.rows);
        check_len("token rows", token_rows.rows.len(), dims.rows * dims.hidden);
    }
    assert!(
        dims.is_one_slice(T::DTYPE),
        "{dims:?} is more than one slice; several slices accumulate their gradients in f32"
    );
    check_scratch(scratch.len(), head_loss_rounded_scratch(dims, pool.threads()));
    let found_inf = AtomicBool::new(false);
    let gradients = Gradients {
        scale,
        dx,
        dw: Some(WeightGrad::Rounded(RoundedGrad { dw, token_rows, found_inf: &found_inf })),
    };
    let sum = run(pool, dims, x, w, labels, Some(gradients), scratch);
    (sum, found_inf.into_inner())
}

fn run<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    mut gradients: Option<Gradients<T>>,
    scratch: &mut [f32],
) -> f64 {
    if let (0, Some(Gradients { dw: Some(dw), .. })) = (dims.rows, &mut gradients) {
        // With rows, the first slice overwrites it.
        dw.clear();
    }
    #[cfg(target_arch = "x86_64")]
    if amx::supports::<T>(pool.isa(), dims) {
        return amx::run(pool, dims, x, w, labels, gradients, scratch);
    }
    match T::DTYPE {
        DType::Bf16 if gradients.is_some() => {
            portable::run::<T, bf16>(pool, dims, x, w, labels, gradients, scratch)
        }
        _ => portable::run::<T, f32>(pool, dims, x, w, labels, gradients, scratch),
    }
}
