//! Partitions of output buffers into parts that tasks write concurrently.
//!
//! A partition depends on shapes only, never on the number of threads, so results have the same bits for any thread count.
#![allow(unsafe_code, reason = "disjoint parts of one slice, handed to different threads")]

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};

/// One or more buffers split into disjoint parts, one per task.
///
/// # Safety
/// Parts with different indices do not overlap, so different threads may use them at the same time.
pub unsafe trait Partition: Sync {
    /// The part of one task.
    type Part;
    /// Number of parts.
    fn count(&self) -> usize;
    /// Returns one part.
    ///
    /// # Safety
    /// `index` is below `count()`, and no index is requested twice.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// A slice split into chunks of `length` elements; the last one may be shorter.
pub struct Chunks<'a, T> {
    start: *mut T,
    total: usize,
    length: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: represents a `&mut [T]` whose parts go to other threads.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Splits `slice` into chunks of `length` elements.
    pub fn new(slice: &'a mut [T], length: usize) -> Self {
        Self { start: slice.as_mut_ptr(), total: slice.len(), length: length.max(1), slice: PhantomData }
    }
}

// SAFETY: chunk i is the elements from i·length to (i + 1)·length.
unsafe impl<'a, T: Send> Partition for Chunks<'a, T> {
    type Part = &'a mut [T];

    fn count(&self) -> usize {
        self.total.div_ceil(self.length)
    }

    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let first = index * self.length;
        // SAFETY: first < total because index < count, the end is clipped to total, and each index is requested once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), self.length.min(self.total - first)) }
    }
}

/// A matrix split into rectangular tiles, numbered row by row.
pub struct Grid<'a, T> {
    start: *mut T,
    rows: usize,
    columns: usize,
    row_stride: usize,
    tile_rows: usize,
    tile_columns: usize,
    down_first: bool,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: represents a `&mut [T]` whose parts go to other threads.
unsafe impl<T: Send> Sync for Grid<'_, T> {}

impl<'a, T> Grid<'a, T> {
    /// Splits a matrix of `columns` columns into tiles of at most `tile_rows` by `tile_columns`.
    pub fn new(slice: &'a mut [T], columns: usize, tile_rows: usize, tile_columns: usize) -> Self {
        Self::with_row_stride(slice, [columns, columns], tile_rows, tile_columns)
    }

    /// [`Grid::new`] for a matrix whose rows are `row_stride` elements apart.
    ///
    /// # Panics
    /// If `columns` exceeds the row stride.
    pub fn with_row_stride(
        slice: &'a mut [T],
        [columns, row_stride]: [usize; 2],
        tile_rows: usize,
        tile_columns: usize,
    ) -> Self {
        assert!(columns <= row_stride, "rows of {columns} elements exceed their stride of {row_stride}");
        let rows = slice.len().checked_div(row_stride).unwrap_or(0);
        Self {
            start: slice.as_mut_ptr(),
            rows,
            columns,
            row_stride,
            tile_rows: tile_rows.max(1),
            tile_columns: tile_columns.max(1),
            down_first: false,
            slice: PhantomData,
        }
    }

    /// Numbers the tiles column by column.
    #[must_use]
    pub fn down_first(mut self) -> Self {
        self.down_first = true;
        self
    }
}

// SAFETY: tiles differ in their range of rows or of columns.
unsafe impl<'a, T: Send> Partition for Grid<'a, T> {
    type Part = Tile<'a, T>;

    fn count(&self) -> usize {
        self.rows.div_ceil(self.tile_rows) * self.columns.div_ceil(self.tile_columns)
    }

    unsafe fn part(&self, index: usize) -> Tile<'a, T> {
        let (down, across) = if self.down_first {
            let bands = self.rows.div_ceil(self.tile_rows);
            (index % bands, index / bands)
        } else {
            let bands = self.columns.div_ceil(self.tile_columns);
            (index / bands, index % bands)
        };
        let (row, column) = (down * self.tile_rows, across * self.tile_columns);
        Tile {
            // SAFETY: row < rows and column < columns because index < count.
            start: unsafe { self.start.add(row * self.row_stride + column) },
            first_row: row,
            first_column: column,
            rows: self.tile_rows.min(self.rows - row),
            columns: self.tile_columns.min(self.columns - column),
            stride: self.row_stride,
            slice: PhantomData,
        }
    }
}

/// A rectangle of a matrix.
pub struct Tile<'a, T> {
    start: *mut T,
    first_row: usize,
    first_column: usize,
    rows: usize,
    columns: usize,
    stride: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// Row of the matrix at which the tile starts.
    pub fn first_row(&self) -> usize {
        self.first_row
    }

    /// Column of the matrix at which the tile starts.
    pub fn first_column(&self) -> usize {
        self.first_column
    }

    /// Rows of the tile.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the tile.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements between rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Row `row` of the tile.
    ///
    /// # Panics
    /// If `row` is not below [`Tile::rows`].
    pub fn row(&mut self, row: usize) -> &mut [T] {
        let rows = self.rows;
        assert!(row < rows, "row {row} of a tile of {rows} rows");
        // SAFETY: inside the tile, which only this task has; the borrow of self keeps rows from overlapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// `N` elements from `column` on in each of `rows` rows from `row` on; empty where the tile has fewer columns.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn row_chunks<const N: usize>(
        &mut self,
        [row, column]: [usize; 2],
        rows: usize,
    ) -> RowChunks<'_, T, N> {
        let left = if column + N <= self.columns { rows.min(self.rows.saturating_sub(row)) } else { 0 };
        let start = self.start.wrapping_add(row * self.stride + column);
        RowChunks { start, stride: self.stride, left, tile: PhantomData }
    }
}

/// Iterator over fixed-width chunks of consecutive rows of a [`Tile`].
#[cfg(target_arch = "x86_64")]
pub(super) struct RowChunks<'a, T, const N: usize> {
    start: *mut T,
    stride: usize,
    left: usize,
    tile: PhantomData<&'a mut [T]>,
}

#[cfg(target_arch = "x86_64")]
impl<'a, T, const N: usize> Iterator for RowChunks<'a, T, N> {
    type Item = &'a mut [T; N];

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let line = self.start.cast::<[T; N]>();
        self.start = self.start.wrapping_add(self.stride);
        // SAFETY: `N` elements of a row of the tile, which only this task has and which stays borrowed while chunks exist. Rows
        // do not overlap, and each is returned once.
        Some(unsafe { &mut *line })
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a, T, const N: usize> RowChunks<'a, T, N> {
    /// Pairs each chunk with its row of accumulators.
    ///
    /// # Safety
    /// `acc` points to one row per chunk, readable whenever one is taken.
    #[inline(always)]
    pub(super) unsafe fn with_acc(self, acc: *const [f32; N]) -> PendingRows<'a, T, N> {
        PendingRows { acc, chunks: self }
    }
}

/// Chunks of output rows, each with the accumulators to store there.
#[cfg(target_arch = "x86_64")]
pub(super) struct PendingRows<'a, T, const N: usize> {
    acc: *const [f32; N],
    chunks: RowChunks<'a, T, N>,
}

#[cfg(target_arch = "x86_64")]
impl<'a, T, const N: usize> PendingRows<'a, T, N> {
    /// The next `COUNT` rows, each with its sums; `None` if fewer are left. It is not an iterator, whose `next` inside an AMX loop
    /// takes more instructions than the stores; and it takes no closure, which may be compiled on its own, without AVX-512.
    #[inline(always)]
    pub(super) fn take<const COUNT: usize>(&mut self) -> Option<[(&'a [f32; N], &'a mut [T; N]); COUNT]> {
        if self.chunks.left < COUNT {
            return None;
        }
        self.chunks.left -= COUNT;
        let (acc, start, stride) = (self.acc, self.chunks.start, self.chunks.stride);
        self.acc = acc.wrapping_add(COUNT);
        self.chunks.start = start.wrapping_add(COUNT * stride);
        // SAFETY: both are valid, by the promise to `with_acc` and as in `RowChunks::next`; rows do not overlap.
        Some(std::array::from_fn(|row| unsafe {
            (&*acc.wrapping_add(row), &mut *start.wrapping_add(row * stride).cast())
        }))
    }
}

/// A group of rows of a matrix, and the tiles it is split into. It is stored in scratch, as 32-bit words.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct RowGroup {
    first: u32,
    rows: u32,
    tile_rows: u32,
    tile_columns: u32,
    /// Tiles of the groups before this one.
    tiles_before: u32,
}

impl RowGroup {
    /// f32 elements of scratch of a group.
    pub(super) const WORDS: usize = size_of::<Self>() / size_of::<f32>();

    /// A group of consecutive rows, split into tiles of at most these rows and columns.
    ///
    /// # Panics
    /// If there are more than 2³² rows.
    pub(super) fn new(rows: Range<usize>, tile: [usize; 2]) -> Self {
        let [first, rows, tile_rows, tile_columns] = [rows.start, rows.len(), tile[0].max(1), tile[1].max(1)]
            .map(|count| u32::try_from(count).expect("rows of a matrix are numbered by 32 bits"));
        Self { first, rows, tile_rows, tile_columns, tiles_before: 0 }
    }

    /// Scratch as groups.
    pub(super) fn table(scratch: &mut [f32]) -> &mut [Self] {
        bytemuck::cast_slice_mut(scratch)
    }

    fn across(&self, columns: usize) -> usize {
        columns.div_ceil(self.tile_columns as usize)
    }

    fn tiles(&self, columns: usize) -> usize {
        self.rows.div_ceil(self.tile_rows) as usize * self.across(columns)
    }
}

/// Groups of rows of a matrix, each split into rectangular tiles. A part is the index of a group and a tile whose rows are
/// numbered from the group's first.
pub(super) struct GroupedGrid<'a, T> {
    start: *mut T,
    columns: usize,
    row_stride: usize,
    groups: &'a [RowGroup],
    tiles: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: represents a `&mut [T]` whose parts go to other threads.
unsafe impl<T: Send> Sync for GroupedGrid<'_, T> {}

impl<'a, T> GroupedGrid<'a, T> {
    /// Splits a matrix of `columns` columns whose rows are `row_stride` elements apart.
    ///
    /// # Panics
    /// If groups overlap, are not ascending or exceed the matrix.
    pub(super) fn new(
        slice: &'a mut [T],
        [columns, row_stride]: [usize; 2],
        groups: &'a mut [RowGroup],
    ) -> Self {
        assert!(columns <= row_stride, "rows of {columns} elements exceed their stride of {row_stride}");
        let rows = slice.len().checked_div(row_stride).unwrap_or(0);
        let (mut end, mut tiles) = (0, 0);
        for group in &mut *groups {
            let [first, own] = [group.first, group.rows].map(|count| count as usize);
            assert!(own == 0 || end <= first && first + own <= rows, "{own} rows from {first} of {rows}");
            end = end.max(first + own);
            group.tiles_before = u32::try_from(tiles).expect("tiles are numbered by 32 bits");
            tiles += group.tiles(columns);
        }
        Self { start: slice.as_mut_ptr(), columns, row_stride, groups, tiles, slice: PhantomData }
    }
}

// SAFETY: tiles of a group differ in their range of rows or of columns, and groups do not overlap.
unsafe impl<'a, T: Send> Partition for GroupedGrid<'a, T> {
    type Part = (usize, Tile<'a, T>);

    fn count(&self) -> usize {
        self.tiles
    }

    unsafe fn part(&self, index: usize) -> (usize, Tile<'a, T>) {
        // The last group that begins at or before the tile; groups without tiles begin where the next one does.
        let group = self.groups.partition_point(|group| group.tiles_before as usize <= index) - 1;
        let RowGroup { first, rows, tile_rows, tile_columns, tiles_before } = self.groups[group];
        let [first, rows, tile_rows, tile_columns] =
            [first, rows, tile_rows, tile_columns].map(|count| count as usize);
        let (own, across) = (index - tiles_before as usize, self.groups[group].across(self.columns));
        let (row, column) = (own / across * tile_rows, own % across * tile_columns);
        let tile = Tile {
            // SAFETY: inside the matrix: the group is, and row < rows and column < columns because index < count.
            start: unsafe { self.start.add((first + row) * self.row_stride + column) },
            first_row: row,
            first_column: column,
            rows: tile_rows.min(rows - row),
            columns: tile_columns.min(self.columns - column),
            stride: self.row_stride,
            slice: PhantomData,
        };
        (group, tile)
    }
}

/// A partition of a buffer that may be absent: every part is `None` then.
pub struct Optional<P> {
    parts: Option<P>,
    count: usize,
}

impl<P: Partition> Optional<P> {
    /// `count` parts if there is no buffer.
    pub fn new(parts: Option<P>, count: usize) -> Self {
        Self { parts, count }
    }
}

// SAFETY: the parts are those of the inner partition.
unsafe impl<P: Partition> Partition for Optional<P> {
    type Part = Option<P::Part>;

    fn count(&self) -> usize {
        self.parts.as_ref().map_or(self.count, Partition::count)
    }

    unsafe fn part(&self, index: usize) -> Option<P::Part> {
        // SAFETY: the caller's promise, passed on.
        self.parts.as_ref().map(|parts| unsafe { parts.part(index) })
    }
}

macro_rules! partition_tuples {
    ($(($($name:ident: $index:tt),+);)+) => {$(
        // SAFETY: each member's parts are disjoint, and members are different slices.
        unsafe impl<$($name: Partition),+> Partition for ($($name,)+) {
            type Part = ($($name::Part,)+);

            fn count(&self) -> usize {
                let count = self.0.count();
                $(assert_eq!(self.$index.count(), count, "the partitions of one kernel have equally many parts");)+
                count
            }

            unsafe fn part(&self, index: usize) -> Self::Part {
                // SAFETY: the caller's promise, passed on to each member; counts are equal.
                unsafe { ($(self.$index.part(index),)+) }
            }
        }
    )+};
}

partition_tuples! {
    (A: 0, B: 1);
    (A: 0, B: 1, C: 2);
    (A: 0, B: 1, C: 2, D: 3);
    (A: 0, B: 1, C: 2, D: 3, E: 4);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn tiles_cover_a_matrix_once_in_either_order() {
        let pool = Pool::new(3);
        for down_first in [false, true] {
            let mut cells = vec![0u32; 7 * 6];
            let grid = Grid::with_row_stride(&mut cells, [5, 6], 3, 2);
            let grid = if down_first { grid.down_first() } else { grid };
            assert_eq!(grid.count(), 9);
            pool.each(grid, |task, mut tile| {
                let expected = if down_first { (task % 3, task / 3) } else { (task / 3, task % 3) };
                assert_eq!((tile.first_row() / 3, tile.first_column() / 2), expected);
                for row in 0..tile.rows() {
                    tile.row(row).iter_mut().for_each(|cell| *cell += 1);
                }
            });
            for row in cells.chunks_exact(6) {
                assert_eq!(row, [1, 1, 1, 1, 1, 0], "{cells:?}");
            }
        }
    }
}
