//! Panels of rows of a for the f32 kernel of AVX-512, filled a line at a time.
//!
//! The kernel takes single numbers of a, so it matters little how they lie, only that those of a few terms are near each
//! other. Where terms of a row lie side by side, four of each of the 12 rows follow each other: pieces of a line that are
//! copied as they are. Turning them over would take the units that multiply.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m128, _MM_HINT_T0, _mm_loadu_ps, _mm_prefetch, _mm_storeu_ps, _mm512_castps512_ps128,
    _mm512_extractf32x4_ps, _mm512_mask_storeu_ps,
};
use std::marker::PhantomData;

use zeroth_base::DType;

use super::View;
use super::zmm::{FOUR, LANES, ROWS, load, mask};
use crate::cpu::element::Element;

/// Panels that are filled together: a term of their 48 rows is three whole lines of a matrix that is seen the other way
/// round. Single panels would read each line up to three times, and the caches keep none of those, a power of two apart,
/// until then.
pub(super) const GROUP: usize = 4;
/// Lines of a row, and terms, that are asked for before they are copied, in time for the third-level cache to answer. Where
/// less of a row is left, lines of the next one: each row's first lines would be waited for otherwise, 4 % of a product.
const AHEAD: usize = 16;
const AHEAD_TERMS: usize = 4;

/// A panel: four terms of each row and so on, or, `turned`, all rows of each term.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) numbers: &'a [f32],
    pub(super) depth: usize,
    pub(super) turned: bool,
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
    out: *mut f32,
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
        let out = out[..rows.div_ceil(ROWS) * panel_len(depth)].as_mut_ptr();
        let (from, turned) = (source.checked(rows, depth), source.turned());
        let left = if turned { depth } else { depth.div_ceil(LANES) };
        let skip = source.row.wrapping_sub(depth.div_ceil(LANES) * LANES);
        Self { source, rows, depth, out, from, to: out, left, row: 0, skip, group: PhantomData }
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
            // SAFETY: `Path::available` has found AVX-512. `new` has checked all places; what lies ahead is only asked for.
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
            let put = |four: usize, numbers: __m128| _mm_storeu_ps(self.to.add(four * FOUR * ROWS), numbers);
            let partial = self.left == 1 && !self.depth.is_multiple_of(LANES);
            if T::DTYPE == DType::F32 && !partial {
                for four in 0..LANES / FOUR {
                    put(four, _mm_loadu_ps(self.from.cast::<f32>().add(four * FOUR)));
                }
            } else {
                let numbers = load(self.from, if partial { self.depth % LANES } else { LANES });
                put(0, _mm512_castps512_ps128(numbers));
                put(1, _mm512_extractf32x4_ps::<1>(numbers));
                put(2, _mm512_extractf32x4_ps::<2>(numbers));
                put(3, _mm512_extractf32x4_ps::<3>(numbers));
            }
        }
        self.from = self.from.wrapping_add(LANES);
        self.to = self.to.wrapping_add(LANES * ROWS);
        self.left -= 1;
        if self.left == 0 && self.row + 1 < self.rows {
            self.row += 1;
            let at = self.row / ROWS * panel_len(self.depth) + self.row % ROWS * FOUR;
            self.to = self.out.wrapping_add(at);
            self.left = self.depth.div_ceil(LANES);
            self.from = self.from.wrapping_add(self.skip);
        }
    }

    /// Copies the lines that are missing.
    pub(super) fn finish(mut self) {
        // SAFETY: `Path::available` has found AVX-512.
        unsafe { self.rest() }
    }

    /// All steps, in code for AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn rest(&mut self) {
        self.step(usize::MAX);
    }
}
