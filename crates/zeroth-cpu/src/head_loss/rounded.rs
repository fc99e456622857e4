//! The gradient of w rounded as it is made: a band of its rows is summed in f32 in scratch, and leaves rounded.
//!
//! Where w is a table that an embedding reads as well, the rows of a micro-batch's own tokens are not complete yet: they are
//! kept in f32 beside it, one for each token, until the embedding's backward has added to them and rounds them.
#![allow(unsafe_code, reason = "rows that belong to different bands, handed to different threads")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use crate::convert::{convert_and_check_piece as look_piece, has_nonfinite as is_broken};
use crate::cut::{Chunks, Parts};
use crate::isa::Isa;
use crate::stream;
use zeroth_kernel::Element;

/// The rows of a table that a micro-batch's own tokens chose, in f32.
pub struct OwnRows<'a> {
    /// The tokens; a negative one has no row.
    pub ids: &'a [i32],
    /// [tokens, hidden]: what the head gives of each token's row. Tokens that are the same have the same.
    pub rows: &'a mut [f32],
}

/// Where a rounded gradient goes.
pub(super) struct Rounded<'a, T> {
    pub(super) dw: &'a mut [T],
    pub(super) own: Option<OwnRows<'a>>,
    /// Becomes true where a result is not finite; only ever that, so the order of the tasks means nothing.
    pub(super) broken: &'a AtomicBool,
}

impl<T: Element> Rounded<'_, T> {
    /// These rows of the gradient, cut into bands of `length`.
    pub(super) fn bands(&mut self, rows: Range<usize>, length: usize, hidden: usize) -> Bands<'_, T> {
        let past = stream::worth(size_of_val(self.dw));
        let own = self.own.as_mut().map(|own| Kept {
            ids: own.ids,
            start: own.rows.as_mut_ptr(),
            rows: PhantomData,
        });
        let dw = Chunks::new(&mut self.dw[rows.start * hidden..rows.end * hidden], length * hidden);
        Bands { dw, own, rows, length, hidden, past }
    }
}

/// The rows of tokens, each of which one band takes.
#[derive(Clone, Copy)]
struct Kept<'a> {
    ids: &'a [i32],
    start: *mut f32,
    rows: PhantomData<&'a mut [f32]>,
}

/// Rows of a gradient, cut into bands.
pub(super) struct Bands<'a, T> {
    dw: Chunks<'a, T>,
    own: Option<Kept<'a>>,
    rows: Range<usize>,
    length: usize,
    hidden: usize,
    past: bool,
}

// SAFETY: stands for a `&mut [T]` and a `&mut [f32]`, whose parts go to other threads.
unsafe impl<T: Send> Sync for Bands<'_, T> {}

// SAFETY: a band has its own rows of the gradient, and of the rows of tokens those whose token is one of them.
unsafe impl<'a, T: Send> Parts for Bands<'a, T> {
    type Part = Band<'a, T>;

    fn count(&self) -> usize {
        self.dw.count()
    }

    unsafe fn part(&self, index: usize) -> Band<'a, T> {
        let first = self.rows.start + index * self.length;
        // SAFETY: passed on.
        let dw = unsafe { self.dw.part(index) };
        let rows = first..first + dw.len() / self.hidden;
        Band { dw, own: self.own, rows, hidden: self.hidden, past: self.past }
    }
}

/// A band of rows.
pub(super) struct Band<'a, T> {
    dw: &'a mut [T],
    own: Option<Kept<'a>>,
    rows: Range<usize>,
    hidden: usize,
    past: bool,
}

impl<T: Element> Band<'_, T> {
    /// Elements of the band.
    pub(super) fn len(&self) -> usize {
        self.dw.len()
    }

    /// Rounds `sums` to their place, and keeps those of tokens. Whether a result is not finite that is no token's.
    pub(super) fn finish(self, path: Isa, sums: &[f32]) -> bool {
        let (hidden, broken) = (self.hidden, look_piece(path, sums, self.dw, self.past));
        let Some(own) = self.own else { return broken };
        for (place, &id) in own.ids.iter().enumerate() {
            let row = usize::try_from(id).ok().filter(|row| self.rows.contains(row));
            let Some(row) = row.map(|row| row - self.rows.start) else { continue };
            // SAFETY: there is a row for every token, and the token is one of this band, which alone takes it.
            let kept = unsafe { std::slice::from_raw_parts_mut(own.start.add(place * hidden), hidden) };
            kept.copy_from_slice(&sums[row * hidden..][..hidden]);
        }
        let is_whole = |row: usize| !own.ids.iter().any(|id| usize::try_from(*id) == Ok(row));
        let mut rows = self.rows.zip(self.dw.chunks_exact(hidden));
        broken && rows.any(|(row, values)| is_broken(path, values) && is_whole(row))
    }
}
