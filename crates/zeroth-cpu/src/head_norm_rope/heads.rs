//! The heads of a matrix [rows, heads · head_dim]: their offsets, and blocks of them that tasks write.
#![allow(unsafe_code, reason = "disjoint parts of one slice, handed to different threads")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::columns::BLOCK;
use crate::rows::check_rows;
use crate::work_partition::Partition;
use zeroth_kernel::RopeDims;

/// The offsets of heads in a matrix.
#[derive(Clone, Copy)]
pub(super) struct HeadLayout {
    heads_per_row: usize,
    head_dim: usize,
    row_stride: usize,
    /// Heads of all rows.
    count: usize,
}

impl HeadLayout {
    /// The layout of a matrix that fills a slice of `found` elements.
    #[track_caller]
    pub(super) fn new(name: &str, found: usize, dims: RopeDims) -> Self {
        let RopeDims { rows, heads, head_dim, row_stride, .. } = dims;
        check_rows(name, found, [rows, heads * head_dim], row_stride);
        Self { heads_per_row: heads, head_dim, row_stride, count: rows * heads }
    }

    /// The elements of a head.
    #[inline(always)]
    pub(super) fn range(self, head: usize) -> Range<usize> {
        let (row, column) = (head / self.heads_per_row, head % self.heads_per_row);
        let first = row * self.row_stride + column * self.head_dim;
        first..first + self.head_dim
    }
}

/// A matrix partitioned into blocks of heads.
pub(super) struct HeadBlocks<'a, T> {
    start: *mut T,
    layout: HeadLayout,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for a `&mut [T]`, whose parts go to other threads.
unsafe impl<T: Send> Sync for HeadBlocks<'_, T> {}

impl<'a, T> HeadBlocks<'a, T> {
    /// Partitions `slice`, a matrix [rows, heads · head_dim].
    #[track_caller]
    pub(super) fn new(name: &str, slice: &'a mut [T], dims: RopeDims) -> Self {
        let layout = HeadLayout::new(name, slice.len(), dims);
        Self { start: slice.as_mut_ptr(), layout, slice: PhantomData }
    }
}

// SAFETY: heads do not overlap, and each is in one block.
unsafe impl<'a, T: Send> Partition for HeadBlocks<'a, T> {
    type Part = Heads<'a, T>;

    fn count(&self) -> usize {
        self.layout.count.div_ceil(BLOCK)
    }

    unsafe fn part(&self, index: usize) -> Heads<'a, T> {
        let first = index * BLOCK;
        let numbers = first..self.layout.count.min(first + BLOCK);
        Heads { start: self.start, layout: self.layout, numbers, slice: PhantomData }
    }
}

/// The heads of one block.
pub(super) struct Heads<'a, T> {
    start: *mut T,
    layout: HeadLayout,
    numbers: Range<usize>,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Heads<'_, T> {
    /// Their numbers, from the matrix's first head.
    pub(super) fn numbers(&self) -> Range<usize> {
        self.numbers.clone()
    }

    /// One of them, by its number.
    #[inline(always)]
    pub(super) fn head(&mut self, number: usize) -> &mut [T] {
        assert!(self.numbers.contains(&number), "head {number} of {:?}", self.numbers);
        let range = self.layout.range(number);
        // SAFETY: `new` has checked that the slice has all heads. The head is this block's alone, and the borrow of self keeps
        // it from being taken twice.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn blocks_cover_every_head_once_and_skip_row_padding() {
        // 27 rows of 5 heads of 3 elements, 17 apart: blocks of 64 heads begin within rows.
        let dims = RopeDims { row_stride: 17, ..RopeDims::new(27, 5, 3, 0) };
        let mut cells = vec![0u32; 27 * 17];
        Pool::new(3).each(HeadBlocks::new("cells", &mut cells, dims), |block, mut heads| {
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
