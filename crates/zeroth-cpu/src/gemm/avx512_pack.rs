//! Panels of rows of a for the f32 kernel of AVX-512: in place, or filled a line at a time.
//!
//! The kernel takes single numbers of a, so it matters little how they lie. Rows of f32 are taken as they stand: copying them
//! took 6 to 8 % of a product, even beside the multiplications. Rows of other types become rows of f32, one after the other; of
//! a matrix that is seen the other way round, all rows of a term lie side by side.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm512_mask_storeu_ps, _mm512_storeu_ps};
use std::marker::PhantomData;

use zeroth_base::DType;

use super::View;
use super::avx512::{LANES, ROWS, load, mask};
use zeroth_kernel::Element;

/// Panels that are filled together: a term of their 45 rows is three lines of a matrix that is seen the other way round. Single
/// panels would read most lines twice, and the caches keep none of those, a power of two apart, until then.
pub(super) const GROUP: usize = 5;
/// Lines of a row, and terms, that are asked for before they are copied, in time for the third-level cache to answer. Where
/// less of a row is left, lines of the next one: each row's first lines would be waited for otherwise, 4 % of a product.
const AHEAD: usize = 16;
const AHEAD_TERMS: usize = 4;

/// A panel.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) start: *const f32,
    /// Elements from one row to the next, and from one term to the next.
    pub(super) row: usize,
    pub(super) term: usize,
    /// Rows that may be read, and terms.
    pub(super) rows: usize,
    pub(super) depth: usize,
    numbers: PhantomData<&'a f32>,
}

impl<'a> Panel<'a> {
    /// Rows as they stand, if they are f32 and terms of a row lie side by side.
    #[inline(always)]
    pub(super) fn in_place<T: Element>(source: View<'a, T>, rows: usize, depth: usize) -> Option<Self> {
        if !stands(source) {
            return None;
        }
        let start = source.checked(rows, depth).cast();
        Some(Self { start, row: source.row, term: 1, rows, depth, numbers: PhantomData })
    }

    /// Numbers that were filled in from rows, or from a matrix that is seen the other way round.
    #[inline(always)]
    pub(super) fn packed(numbers: &'a [f32], depth: usize, turned: bool) -> Self {
        let [row, term] = if turned { [1, ROWS] } else { [depth.next_multiple_of(LANES), 1] };
        assert!(numbers.len() >= panel_len(depth));
        Self { start: numbers.as_ptr(), row, term, rows: ROWS, depth, numbers: PhantomData }
    }

    /// Whether all rows of a term lie side by side.
    pub(super) fn turned(self) -> bool {
        self.term != 1
    }

    /// Where each row begins; the last one again for those that are not there.
    #[inline(always)]
    pub(super) fn starts<const LIVE: usize>(self) -> [*const f32; LIVE] {
        std::array::from_fn(|i| self.start.wrapping_add(i.min(self.rows - 1) * self.row))
    }
}

/// Whether rows are taken as they stand.
pub(super) fn stands<T: Element>(source: View<T>) -> bool {
    T::DTYPE == DType::F32 && !source.turned()
}

/// Numbers from one panel of a group to the next.
pub(super) const fn panel_len(depth: usize) -> usize {
    ROWS * depth.next_multiple_of(LANES)
}

/// A group of panels on its way. Rows that there are not stay as they were; no one looks at their sums.
pub(super) struct Filling<'a, T> {
    source: View<'a, T>,
    rows: usize,
    depth: usize,
    /// The next line, 16 terms of a row or a term of all rows, and its place in the first panel.
    from: *const T,
    to: *mut f32,
    /// Lines of this row, or terms, that are left.
    left: usize,
    row: usize,
    /// Elements from the end of a row's last line to the next row; less than none where rows overlap that line.
    skip: usize,
    group: PhantomData<&'a mut [f32]>,
}

impl<'a, T: Element> Filling<'a, T> {
    /// Will take `rows` rows of `depth` terms; at least one of each.
    pub(super) fn new((source, rows, depth): (View<'a, T>, usize, usize), out: &'a mut [f32]) -> Self {
        assert!((1..=GROUP * ROWS).contains(&rows) && depth > 0, "{rows} rows of {depth} terms");
        let to = out[..rows.div_ceil(ROWS) * panel_len(depth)].as_mut_ptr();
        let (from, turned) = (source.checked(rows, depth), source.turned());
        let left = if turned { depth } else { depth.div_ceil(LANES) };
        let skip = source.row.wrapping_sub(depth.div_ceil(LANES) * LANES);
        Self { source, rows, depth, from, to, left, row: 0, skip, group: PhantomData }
    }

    /// Lines to copy.
    pub(super) fn lines(&self) -> usize {
        if self.source.turned() { self.depth } else { self.rows * self.depth.div_ceil(LANES) }
    }

    /// Copies at most `count` more lines. No function of its own: a call would cost the kernel that it stands in all of its
    /// registers.
    #[inline(always)]
    pub(super) fn step(&mut self, count: usize) {
        for _ in 0..count {
            if self.left == 0 {
                return;
            }
            if self.source.turned() { self.term() } else { self.line() }
        }
    }

    /// Copies all rows of a term.
    #[inline(always)]
    fn term(&mut self) {
        for (panel, first) in (0..self.rows).step_by(ROWS).enumerate() {
            let from = self.from.wrapping_add(first);
            // SAFETY: `Isa::available` has found AVX-512. `new` has checked all places; what lies ahead is only asked for.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD_TERMS * self.source.column).cast());
                let to = self.to.add(panel * panel_len(self.depth));
                _mm512_mask_storeu_ps(to, mask(ROWS), load(from, ROWS.min(self.rows - first)));
            }
        }
        self.from = self.from.wrapping_add(self.source.column);
        self.to = self.to.wrapping_add(ROWS);
        self.left -= 1;
    }

    /// Copies 16 terms of a row, or as many as are left of it.
    #[inline(always)]
    fn line(&mut self) {
        // SAFETY: as above.
        unsafe {
            let skip = if self.left <= AHEAD { self.skip } else { 0 };
            _mm_prefetch::<_MM_HINT_T0>(self.from.wrapping_add(AHEAD * LANES).wrapping_add(skip).cast());
            let partial = self.left == 1 && !self.depth.is_multiple_of(LANES);
            let count = if partial { self.depth % LANES } else { LANES };
            _mm512_storeu_ps(self.to, load(self.from, count));
        }
        self.from = self.from.wrapping_add(LANES);
        self.to = self.to.wrapping_add(LANES);
        self.left -= 1;
        if self.left == 0 && self.row + 1 < self.rows {
            self.row += 1;
            self.left = self.depth.div_ceil(LANES);
            self.from = self.from.wrapping_add(self.skip);
        }
    }

    /// Copies the lines that are missing.
    pub(super) fn finish(mut self) {
        // SAFETY: `Isa::available` has found AVX-512.
        unsafe { self.rest() }
    }

    /// All steps, in code for AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn rest(&mut self) {
        self.step(usize::MAX);
    }
}
