//! A matrix cut by sequences and by bands of columns: what the tasks of attention's gradient write.
#![allow(unsafe_code, reason = "disjoint parts of one slice, handed to different threads")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::work_partition::Parts;
use zeroth_kernel::Element;

/// A part for each sequence and band; rows before the first sequence and behind the last one are parts as well.
pub(super) struct Segments<'a, T> {
    start: *mut T,
    starts: &'a [u32],
    rows: usize,
    bands: usize,
    columns: usize,
    pitch: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for a `&mut [T]`, whose parts go to other threads.
unsafe impl<T: Send> Sync for Segments<'_, T> {}

impl<'a, T> Segments<'a, T> {
    /// Cuts [rows, bands · columns], whose rows are `pitch` elements apart, into bands, and these where sequences begin.
    pub(super) fn new(
        slice: &'a mut [T],
        starts: &'a [u32],
        [rows, bands, columns]: [usize; 3],
        pitch: usize,
    ) -> Self {
        assert!(slice.len() == rows * pitch, "{} elements cut into {rows} rows", slice.len());
        assert!(pitch >= bands * columns, "{bands} bands of {columns} columns in rows {pitch} apart");
        assert!(starts.is_sorted() && starts.last().is_none_or(|&last| last as usize <= rows), "{starts:?}");
        Self { start: slice.as_mut_ptr(), starts, rows, bands, columns, pitch, slice: PhantomData }
    }
}

// SAFETY: segments of rows rise without overlap, as checked in `new`, and so do bands, which end within their row's pitch.
unsafe impl<'a, T: Send> Parts for Segments<'a, T> {
    type Part = Segment<'a, T>;

    fn count(&self) -> usize {
        (self.starts.len() + 1) * self.bands
    }

    unsafe fn part(&self, index: usize) -> Segment<'a, T> {
        let (segment, band) = (index / self.bands, index % self.bands);
        let first = segment.checked_sub(1).map_or(0, |before| self.starts[before] as usize);
        let last = self.starts.get(segment).map_or(self.rows, |&end| end as usize);
        Segment {
            start: self.start.wrapping_add(first * self.pitch + band * self.columns),
            rows: first..last,
            band,
            columns: self.columns,
            stride: self.pitch,
            sequence: segment > 0 && segment < self.starts.len(),
            slice: PhantomData,
        }
    }
}

/// A band of columns of one sequence, or of rows that belong to none.
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
    /// Its rows of the matrix.
    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Which band it is.
    pub(super) fn band(&self) -> usize {
        self.band
    }

    /// Whether it holds the rows of a sequence.
    pub(super) fn is_sequence(&self) -> bool {
        self.sequence
    }

    /// One row, counted from its first.
    pub(super) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows.len(), "row {row} of {:?}", self.rows);
        // SAFETY: within the segment, which is this part's alone; the borrow of self keeps rows from overlapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// Fills it with zeros.
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
    fn segments_cover_a_matrix_once_and_know_what_is_padding() {
        for (starts, sequence_rows) in [(&[][..], 0), (&[2], 0), (&[1, 4, 4, 6], 5), (&[0, 9], 9)] {
            for pitch in [6, 8] {
                let mut cells = vec![0.0f32; 9 * pitch];
                Pool::new(3).each(Segments::new(&mut cells, starts, [9, 2, 3], pitch), |_, mut segment| {
                    let mark = if segment.is_sequence() { 1.0 } else { 2.0 };
                    for row in 0..segment.rows().len() {
                        segment.row(row).iter_mut().for_each(|cell| *cell += mark);
                    }
                });
                let count = |mark: f32| cells.iter().filter(|&&cell| cell == mark).count();
                assert_eq!(count(1.0), sequence_rows * 6, "{starts:?}");
                assert_eq!(count(2.0), (9 - sequence_rows) * 6);
                assert!(cells.chunks(pitch).all(|row| row[6..].iter().all(|&cell| cell == 0.0)));
            }
        }
    }
}
