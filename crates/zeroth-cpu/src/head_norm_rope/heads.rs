//! The heads of a matrix [rows, heads · head_dim]: where each stands, and blocks of them for tasks to write.
#![allow(unsafe_code, reason = "disjoint parts of one slice, handed to different threads")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::columns::BLOCK;
use crate::rows::pitch;
use crate::work_partition::Partition;
use zeroth_kernel::RopeDims;

/// Where heads stand.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// Heads of a row.
    across: usize,
    /// Elements of a head, and from one row to the next.
    width: usize,
    pitch: usize,
    /// Heads in all.
    count: usize,
}

impl Places {
    /// Those of a matrix that fills a slice of `found` elements.
    #[track_caller]
    pub(super) fn new(name: &str, found: usize, dims: RopeDims) -> Self {
        let RopeDims { rows, heads, head_dim, .. } = dims;
        let pitch = pitch(name, found, [rows, heads * head_dim]);
        Self { across: heads, width: head_dim, pitch, count: rows * heads }
    }

    /// The elements of a head.
    #[inline(always)]
    pub(super) fn of(self, head: usize) -> Range<usize> {
        let first = head / self.across * self.pitch + head % self.across * self.width;
        first..first + self.width
    }
}

/// A matrix cut into blocks of heads.
pub(super) struct Blocks<'a, T> {
    start: *mut T,
    places: Places,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for a `&mut [T]`, whose parts go to other threads.
unsafe impl<T: Send> Sync for Blocks<'_, T> {}

impl<'a, T> Blocks<'a, T> {
    /// Cuts `slice`, a matrix [rows, heads · head_dim].
    #[track_caller]
    pub(super) fn new(name: &str, slice: &'a mut [T], dims: RopeDims) -> Self {
        let places = Places::new(name, slice.len(), dims);
        Self { start: slice.as_mut_ptr(), places, slice: PhantomData }
    }
}

// SAFETY: heads do not overlap, and each is in one block.
unsafe impl<'a, T: Send> Partition for Blocks<'a, T> {
    type Part = Heads<'a, T>;

    fn count(&self) -> usize {
        self.places.count.div_ceil(BLOCK)
    }

    unsafe fn part(&self, index: usize) -> Heads<'a, T> {
        let first = index * BLOCK;
        let numbers = first..self.places.count.min(first + BLOCK);
        Heads { start: self.start, places: self.places, numbers, slice: PhantomData }
    }
}

/// The heads of one block.
pub(super) struct Heads<'a, T> {
    start: *mut T,
    places: Places,
    numbers: Range<usize>,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Heads<'_, T> {
    /// Their numbers, counted from the matrix's first head.
    pub(super) fn numbers(&self) -> Range<usize> {
        self.numbers.clone()
    }

    /// One of them, by its number.
    #[inline(always)]
    pub(super) fn head(&mut self, number: usize) -> &mut [T] {
        assert!(self.numbers.contains(&number), "head {number} of {:?}", self.numbers);
        let place = self.places.of(number);
        // SAFETY: within the slice, which has all heads, as `new` has checked; it is this block's alone, and the borrow of self
        // keeps heads from being taken twice.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(place.start), place.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn blocks_cover_the_heads_once_and_nothing_between_rows() {
        // 27 rows of 5 heads of 3 elements, 17 apart: blocks of 64 heads begin within rows.
        let dims = RopeDims { rows: 27, heads: 5, head_dim: 3, rotated: 0 };
        let mut cells = vec![0u32; 27 * 17];
        Pool::new(3).each(Blocks::new("cells", &mut cells, dims), |block, mut heads| {
            for number in heads.numbers() {
                heads.head(number).iter_mut().for_each(|cell| *cell += 1 + block as u32);
            }
        });
        for (row, cells) in cells.chunks_exact(17).enumerate() {
            let expected = |cell: usize| if cell < 15 { 1 + (row * 5 + cell / 3) / BLOCK } else { 0 };
            assert!(cells.iter().enumerate().all(|(at, cell)| *cell as usize == expected(at)), "{cells:?}");
        }
    }
}
