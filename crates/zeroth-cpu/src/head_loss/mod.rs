//! The head: projection to the vocabulary, softmax and cross-entropy in slices of tokens and blocks of the vocabulary.
//!
//! No [tokens, vocab] tensor of f32 exists: logits live for some rows and a block of the vocabulary at a time, and what is
//! kept of them are their exponentials, in the type of the gradient.
//!
//! How many rows a slice has depends on the sizes and the type only.

mod plain;
mod rounded;
mod sizes;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::sync::atomic::AtomicBool;

use half::bf16;
use zeroth_base::DType;

use super::pool::Pool;
use super::rows::stride as pitch;
use super::{check_len, check_scratch};
pub use rounded::OwnRows;
use rounded::Rounded;
use zeroth_kernel::{Element, HeadLossDims};

/// Elements from one row of x, and of dx, to the next; refuses x that has other rows.
fn x_pitch<T>(dims: HeadLossDims, x: &[T]) -> usize {
    pitch("x", x.len(), [dims.rows, dims.hidden])
}

fn check<T>(dims: HeadLossDims, x: &[T], w: &[T], labels: &[i32]) {
    x_pitch(dims, x);
    check_len("w", w.len(), dims.vocab * dims.hidden);
    check_len("labels", labels.len(), dims.rows);
    if let Some(label) = labels.iter().find(|&&label| label >= 0 && label as usize >= dims.vocab) {
        panic!("label {label} for a vocabulary of {}; the data is checked when it is read", dims.vocab);
    }
}

/// f32 elements of scratch that [`head_loss`] and [`head_loss_backward`] need with a pool of `threads`.
pub fn head_loss_scratch(dims: HeadLossDims, threads: usize) -> usize {
    plain::scratch(dims, threads, false).max(sizes::scratch(dims, threads, false))
}

/// f32 elements of scratch that [`head_loss_backward_once`] needs with a pool of `threads`.
pub fn head_loss_once_scratch(dims: HeadLossDims, threads: usize) -> usize {
    plain::scratch(dims, threads, true).max(sizes::scratch(dims, threads, true))
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
    check(dims, x, w, labels);
    check_scratch(scratch.len(), head_loss_scratch(dims, pool.threads()));
    run(pool, dims, x, w, labels, None, scratch)
}

/// The sum of the losses of trained tokens. Writes dx, and adds dw or, without `add`, writes it (the bits of what is added to
/// zeros), both times `scale`, in the same pass. Rows of dx are as far apart as those of x.
///
/// `scale` is 1 / (trained tokens of the step), times the loss scale. The sum returned is without it. Gradients of logits
/// are rounded to bf16 where the model is in bf16.
pub fn head_loss_backward<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scale: f32,
    dx: &mut [T],
    dw: &mut [f32],
    add: bool,
    scratch: &mut [f32],
) -> f64 {
    check(dims, x, w, labels);
    check_len("dx", dx.len(), x.len());
    check_len("dw", dw.len(), w.len());
    check_scratch(scratch.len(), head_loss_scratch(dims, pool.threads()));
    let gradients = Some(Gradients { scale, dx, dw: Weights::Wide { dw, add } });
    run(pool, dims, x, w, labels, gradients, scratch)
}

/// As [`head_loss_backward`] of rows that are one slice ([`HeadLossDims::is_one_slice`]), dw rounded once; the sum of the
/// losses, and whether a result of dw is not finite. The bits are those that [`head_loss_backward`] writes, rounded.
///
/// Rows of dw that are `own` go there in f32 as well: what dw has of them is for
/// [`embedding_backward_tied`](super::embedding_backward_tied) to write and to look at.
///
/// # Panics
/// When the rows are several slices.
pub fn head_loss_backward_once<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    scale: f32,
    dx: &mut [T],
    dw: &mut [T],
    own: Option<OwnRows>,
    scratch: &mut [f32],
) -> (f64, bool) {
    check(dims, x, w, labels);
    check_len("dx", dx.len(), x.len());
    check_len("dw", dw.len(), w.len());
    if let Some(own) = &own {
        check_len("ids", own.ids.len(), dims.rows);
        check_len("own rows", own.rows.len(), dims.rows * dims.hidden);
    }
    assert!(dims.is_one_slice(T::DTYPE), "{dims:?} are several slices, whose gradients are added in f32");
    check_scratch(scratch.len(), head_loss_once_scratch(dims, pool.threads()));
    let broken = AtomicBool::new(false);
    let gradients = Gradients { scale, dx, dw: Weights::Rounded(Rounded { dw, own, broken: &broken }) };
    let sum = run(pool, dims, x, w, labels, Some(gradients), scratch);
    (sum, broken.into_inner())
}

/// Where gradients go, and what they are multiplied by.
struct Gradients<'a, T> {
    scale: f32,
    dx: &'a mut [T],
    dw: Weights<'a, T>,
}

/// Where the gradient of w goes.
enum Weights<'a, T> {
    /// In f32: added to what is there, or written.
    Wide { dw: &'a mut [f32], add: bool },
    /// Rounded.
    Rounded(Rounded<'a, T>),
}

impl<T: Element> Weights<'_, T> {
    /// What it is when nothing is added to it.
    fn clear(&mut self) {
        match self {
            Self::Wide { dw, add: false } => dw.fill(0.0),
            Self::Wide { add: true, .. } => {}
            Self::Rounded(rounded) => rounded.dw.fill(T::default()),
        }
    }
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
    if let (0, Some(gradients)) = (dims.rows, &mut gradients) {
        // Otherwise the first slice writes it.
        gradients.dw.clear();
    }
    #[cfg(target_arch = "x86_64")]
    if tiles::fit::<T>(pool.isa(), dims) {
        return tiles::run(pool, dims, x, w, labels, gradients, scratch);
    }
    match T::DTYPE {
        DType::Bf16 if gradients.is_some() => {
            plain::run::<T, bf16>(pool, dims, x, w, labels, gradients, scratch)
        }
        _ => plain::run::<T, f32>(pool, dims, x, w, labels, gradients, scratch),
    }
}
