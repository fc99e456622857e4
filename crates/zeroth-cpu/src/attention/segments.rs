//! A partition of a matrix by sequence and head, written by the tasks of the attention gradient.
#![allow(unsafe_code, reason = "hands disjoint parts of one slice to different threads")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::work_partition::Partition;
use zeroth_kernel::Element;

/// A part for each sequence and column band; padding rows before and after the sequences are parts too.
pub(super) struct Segments<'a, T> {
    start: *mut T,
    starts: &'a [u32],
    rows: usize,
    bands: usize,
    columns: usize,
    row_stride: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: represents a `&mut [T]` whose parts go to other threads.
unsafe impl<T: Send> Sync for Segments<'_, T> {}

impl<'a, T> Segments<'a, T> {
    /// Splits [rows, bands · columns], whose rows are `row_stride` elements apart, by band and at the start of each sequence.
    pub(super) fn new(
        slice: &'a mut [T],
        starts: &'a [u32],
        [rows, bands, columns]: [usize; 3],
        row_stride: usize,
    ) -> Self {
        assert!(
            slice.len() == rows * row_stride,
            "{} elements are not {rows} rows of {row_stride}",
            slice.len()
        );
        assert!(
            row_stride >= bands * columns,
            "{bands} bands of {columns} columns in rows {row_stride} apart"
        );
        assert!(starts.is_sorted() && starts.last().is_none_or(|&last| last as usize <= rows), "{starts:?}");
        Self { start: slice.as_mut_ptr(), starts, rows, bands, columns, row_stride, slice: PhantomData }
    }
}

// SAFETY: segments ascend without overlap, as `new` checks, and so do bands, which end within the row stride.
unsafe impl<'a, T: Send> Partition for Segments<'a, T> {
    type Part = Segment<'a, T>;

    fn count(&self) -> usize {
        (self.starts.len() + 1) * self.bands
    }

    unsafe fn part(&self, index: usize) -> Segment<'a, T> {
        let (segment, band) = (index / self.bands, index % self.bands);
        let first = segment.checked_sub(1).map_or(0, |before| self.starts[before] as usize);
        let last = self.starts.get(segment).map_or(self.rows, |&end| end as usize);
        Segment {
            start: self.start.wrapping_add(first * self.row_stride + band * self.columns),
            rows: first..last,
            band,
            columns: self.columns,
            stride: self.row_stride,
            sequence: segment > 0 && segment < self.starts.len(),
            slice: PhantomData,
        }
    }
}

/// A band of columns of one sequence, or of padding rows.
pub(super) struct Segment<'a, T> {
    start: *mut T,
    rows: Range<usize>,
    band: usize,
    columns: usize,
    stride: usize,
    sequence: bool,
    slice: PhantomData<&'a mut [T]>,
}

impl<T: Element> Segment<'_, T> {
    /// Rows of the matrix.
    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Index of the band.
    pub(super) fn band(&self) -> usize {
        self.band
    }

    /// Whether the rows belong to a sequence.
    pub(super) fn is_sequence(&self) -> bool {
        self.sequence
    }

    /// Row `row` of the segment.
    pub(super) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows.len(), "row {row} of {:?}", self.rows);
        // SAFETY: inside the segment, which only this task has; the borrow of self keeps rows from overlapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// Fills the segment with zeros.
    pub(super) fn clear(&mut self) {
        for row in 0..self.rows.len() {
            self.row(row).fill(T::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn segments_cover_a_matrix_once() {
        for (starts, sequence_rows) in [(&[][..], 0), (&[2], 0), (&[1, 4, 4, 6], 5), (&[0, 9], 9)] {
            for row_stride in [6, 8] {
                let mut cells = vec![0.0f32; 9 * row_stride];
                Pool::new(3).each(
                    Segments::new(&mut cells, starts, [9, 2, 3], row_stride),
                    |_, mut segment| {
                        let mark = if segment.is_sequence() { 1.0 } else { 2.0 };
                        for row in 0..segment.rows().len() {
                            segment.row(row).iter_mut().for_each(|cell| *cell += mark);
                        }
                    },
                );
                let count = |mark: f32| cells.iter().filter(|&&cell| cell == mark).count();
                assert_eq!(count(1.0), sequence_rows * 6, "{starts:?}");
                assert_eq!(count(2.0), (9 - sequence_rows) * 6);
                assert!(cells.chunks(row_stride).all(|row| row[6..].iter().all(|&cell| cell == 0.0)));
            }
        }
    }
}
