//! Where gradients go; and that of w, rounded as it is computed: a band of rows is summed in f32 scratch and stored rounded.
//!
//! If w is tied to the embedding, the rows of the micro-batch's own tokens are incomplete. They are token_row in f32, one per token,
//! until the backward pass of the embedding adds its part and rounds them.
#![allow(unsafe_code, reason = "rows that belong to different bands, handed to different threads")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use crate::convert::{convert_and_check_piece, has_nonfinite};
use crate::isa::Isa;
use crate::stream;
use crate::work_partition::{Chunks, Partition};
use zeroth_kernel::Element;

/// Destinations of the gradients that are computed, at least one, and their scale.
pub(super) struct Gradients<'a, T> {
    pub(super) scale: f32,
    pub(super) dx: Option<&'a mut [T]>,
    pub(super) dw: Option<WeightGrad<'a, T>>,
}

/// Destination of the gradient of w.
pub(super) enum WeightGrad<'a, T> {
    /// f32, accumulated or overwritten.
    F32 { dw: &'a mut [f32], add: bool },
    /// Rounded to the storage type.
    Rounded(RoundedGrad<'a, T>),
}

impl<T: Element> WeightGrad<'_, T> {
    /// Sets the gradient of zero rows.
    pub(super) fn clear(&mut self) {
        match self {
            Self::F32 { dw, add: false } => dw.fill(0.0),
            Self::F32 { add: true, .. } => {}
            Self::Rounded(rounded) => rounded.dw.fill(T::default()),
        }
    }
}

/// Rows of a tied table that belong to the tokens of a micro-batch, in f32.
pub struct TokenRows<'a> {
    /// Token ids; a negative one has no row.
    pub ids: &'a [i32],
    /// [tokens, hidden]: the head's gradient of each token's row. Equal tokens have equal rows.
    pub rows: &'a mut [f32],
}

/// Destination of a rounded gradient.
pub(super) struct RoundedGrad<'a, T> {
    pub(super) dw: &'a mut [T],
    pub(super) token_rows: Option<TokenRows<'a>>,
    /// Set if a result is not finite. It only ever becomes true, so the order of tasks does not matter.
    pub(super) found_inf: &'a AtomicBool,
}

impl<T: Element> RoundedGrad<'_, T> {
    /// A partition of these rows of the gradient into bands of `length`.
    pub(super) fn bands(&mut self, rows: Range<usize>, length: usize, hidden: usize) -> Bands<'_, T> {
        let non_temporal = stream::bypasses_cache(size_of_val(self.dw));
        let token_rows = self.token_rows.as_mut().map(|token_rows| TokenRowsPtr {
            ids: token_rows.ids,
            start: token_rows.rows.as_mut_ptr(),
            rows: PhantomData,
        });
        let dw = Chunks::new(&mut self.dw[rows.start * hidden..rows.end * hidden], length * hidden);
        Bands { dw, token_rows, rows, length, hidden, non_temporal }
    }
}

/// Pointer to the token rows; each row is written by one band.
#[derive(Clone, Copy)]
struct TokenRowsPtr<'a> {
    ids: &'a [i32],
    start: *mut f32,
    rows: PhantomData<&'a mut [f32]>,
}

/// Rows of the gradient, split into bands.
pub(super) struct Bands<'a, T> {
    dw: Chunks<'a, T>,
    token_rows: Option<TokenRowsPtr<'a>>,
    rows: Range<usize>,
    length: usize,
    hidden: usize,
    non_temporal: bool,
}

// SAFETY: represents a `&mut [T]` and a `&mut [f32]` whose parts go to other threads.
unsafe impl<T: Send> Sync for Bands<'_, T> {}

// SAFETY: a band has distinct rows of the gradient, and the token rows whose token is one of them.
unsafe impl<'a, T: Send> Partition for Bands<'a, T> {
    type Part = Band<'a, T>;

    fn count(&self) -> usize {
        self.dw.count()
    }

    unsafe fn part(&self, index: usize) -> Band<'a, T> {
        let first = self.rows.start + index * self.length;
        // SAFETY: the caller's promise, passed on.
        let dw = unsafe { self.dw.part(index) };
        let rows = first..first + dw.len() / self.hidden;
        Band { dw, token_rows: self.token_rows, rows, hidden: self.hidden, non_temporal: self.non_temporal }
    }
}

/// A band of rows.
pub(super) struct Band<'a, T> {
    dw: &'a mut [T],
    token_rows: Option<TokenRowsPtr<'a>>,
    rows: Range<usize>,
    hidden: usize,
    non_temporal: bool,
}

impl<T: Element> Band<'_, T> {
    /// Elements of the band.
    pub(super) fn len(&self) -> usize {
        self.dw.len()
    }

    /// Rounds `sums` into the band and copies the rows of tokens. Returns whether a result outside of token rows is not finite.
    pub(super) fn finish(self, isa: Isa, sums: &[f32]) -> bool {
        let (hidden, found_inf) =
            (self.hidden, convert_and_check_piece(isa, sums, self.dw, self.non_temporal));
        let Some(token_rows) = self.token_rows else { return found_inf };
        for (token, &id) in token_rows.ids.iter().enumerate() {
            let row = usize::try_from(id).ok().filter(|row| self.rows.contains(row));
            let Some(row) = row.map(|row| row - self.rows.start) else { continue };
            // SAFETY: there is a row for every token, and only the band that has the token writes it.
            let token_row =
                unsafe { std::slice::from_raw_parts_mut(token_rows.start.add(token * hidden), hidden) };
            token_row.copy_from_slice(&sums[row * hidden..][..hidden]);
        }
        let is_complete = |row: usize| !token_rows.ids.iter().any(|id| usize::try_from(*id) == Ok(row));
        let mut rows = self.rows.zip(self.dw.chunks_exact(hidden));
        found_inf && rows.any(|(row, values)| has_nonfinite(isa, values) && is_complete(row))
    }
}
