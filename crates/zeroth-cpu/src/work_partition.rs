//! Cutting a buffer into parts that tasks write at the same time.
//!
//! Cuts depend on shapes only, never on the number of threads: that is what keeps results the same bits.
#![allow(unsafe_code, reason = "disjoint parts of one slice, handed to different threads")]

use std::marker::PhantomData;

/// Buffers cut into parts, one part a task.
///
/// # Safety
/// Parts of different indices do not overlap, so that they may be used by different threads at the same time.
pub unsafe trait Parts: Sync {
    /// What one task gets.
    type Part;
    /// How many parts there are.
    fn count(&self) -> usize;
    /// One part.
    ///
    /// # Safety
    /// `index` is below `count()`, and no index is asked for twice.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// A slice cut into pieces of `length`, the last one shorter.
pub struct Chunks<'a, T> {
    start: *mut T,
    total: usize,
    length: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for a `&mut [T]`, whose parts go to other threads.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Cuts `slice` into pieces of `length` elements.
    pub fn new(slice: &'a mut [T], length: usize) -> Self {
        Self { start: slice.as_mut_ptr(), total: slice.len(), length: length.max(1), slice: PhantomData }
    }
}

// SAFETY: piece i is the elements from i·length to (i + 1)·length.
unsafe impl<'a, T: Send> Parts for Chunks<'a, T> {
    type Part = &'a mut [T];

    fn count(&self) -> usize {
        self.total.div_ceil(self.length)
    }

    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let first = index * self.length;
        // SAFETY: first < total because index < count; the end is cut at total; the caller asks once an index.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), self.length.min(self.total - first)) }
    }
}

/// A matrix cut into rectangles, numbered along the columns of one band of rows first.
pub struct Grid<'a, T> {
    start: *mut T,
    rows: usize,
    columns: usize,
    pitch: usize,
    tile_rows: usize,
    tile_columns: usize,
    down_first: bool,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for a `&mut [T]`, whose parts go to other threads.
unsafe impl<T: Send> Sync for Grid<'_, T> {}

impl<'a, T> Grid<'a, T> {
    /// Cuts a matrix of `columns` columns into tiles of at most `tile_rows` by `tile_columns`.
    pub fn new(slice: &'a mut [T], columns: usize, tile_rows: usize, tile_columns: usize) -> Self {
        Self::with_pitch(slice, [columns, columns], tile_rows, tile_columns)
    }

    /// The same of a matrix whose rows are `pitch` elements apart.
    ///
    /// # Panics
    /// When rows are longer than that.
    pub fn with_pitch(
        slice: &'a mut [T],
        [columns, pitch]: [usize; 2],
        tile_rows: usize,
        tile_columns: usize,
    ) -> Self {
        assert!(columns <= pitch, "rows of {columns} elements, {pitch} apart");
        let rows = slice.len().checked_div(pitch).unwrap_or(0);
        Self {
            start: slice.as_mut_ptr(),
            rows,
            columns,
            pitch,
            tile_rows: tile_rows.max(1),
            tile_columns: tile_columns.max(1),
            down_first: false,
            slice: PhantomData,
        }
    }

    /// Numbers the tiles down a band of columns first.
    #[must_use]
    pub fn down_first(mut self) -> Self {
        self.down_first = true;
        self
    }
}

// SAFETY: tiles are rectangles of different bands of rows or of columns.
unsafe impl<'a, T: Send> Parts for Grid<'a, T> {
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
            start: unsafe { self.start.add(row * self.pitch + column) },
            first_row: row,
            first_column: column,
            rows: self.tile_rows.min(self.rows - row),
            columns: self.tile_columns.min(self.columns - column),
            stride: self.pitch,
            slice: PhantomData,
        }
    }
}

/// One rectangle of a matrix.
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
    /// The row of the matrix that row 0 of the tile is.
    pub fn first_row(&self) -> usize {
        self.first_row
    }

    /// The column of the matrix that column 0 of the tile is.
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

    /// Elements from one row to the next.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// One row of the tile, counted from the tile's first.
    ///
    /// # Panics
    /// When `row` is not below [`Tile::rows`].
    pub fn row(&mut self, row: usize) -> &mut [T] {
        let rows = self.rows;
        assert!(row < rows, "row {row} of a tile of {rows} rows");
        // SAFETY: within the tile, which is this part's alone; the borrow of self keeps rows from overlapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// `N` elements from `column` on of each of `rows` rows from `row` on; none where the tile has not as many columns.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn lines<const N: usize>(
        &mut self,
        [row, column]: [usize; 2],
        rows: usize,
    ) -> Lines<'_, T, N> {
        let left = if column + N <= self.columns { rows.min(self.rows.saturating_sub(row)) } else { 0 };
        let start = self.start.wrapping_add(row * self.stride + column);
        Lines { start, stride: self.stride, left, tile: PhantomData }
    }
}

/// Pieces of rows of a [`Tile`], one below the other.
#[cfg(target_arch = "x86_64")]
pub(super) struct Lines<'a, T, const N: usize> {
    start: *mut T,
    stride: usize,
    /// Pieces to come.
    left: usize,
    tile: PhantomData<&'a mut [T]>,
}

#[cfg(target_arch = "x86_64")]
impl<'a, T, const N: usize> Iterator for Lines<'a, T, N> {
    type Item = &'a mut [T; N];

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let line = self.start.cast::<[T; N]>();
        self.start = self.start.wrapping_add(self.stride);
        // SAFETY: `N` elements of a row of the tile, which is this part's alone and borrowed as long as the pieces are.
        // Rows do not overlap, and each is given once.
        Some(unsafe { &mut *line })
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a, T, const N: usize> Lines<'a, T, N> {
    /// The pieces, each beside its row of `sums`.
    ///
    /// # Safety
    /// There are as many rows at `sums` as pieces, and they can be read whenever one is taken.
    #[inline(always)]
    pub(super) unsafe fn beside(self, sums: *const [f32; N]) -> Beside<'a, T, N> {
        Beside { sums, pieces: self }
    }
}

/// Pieces of rows beside the sums that go there.
#[cfg(target_arch = "x86_64")]
pub(super) struct Beside<'a, T, const N: usize> {
    sums: *const [f32; N],
    pieces: Lines<'a, T, N>,
}

#[cfg(target_arch = "x86_64")]
impl<T, const N: usize> Beside<'_, T, N> {
    /// Gives the next `COUNT` of them away, if there are as many; whether there were. No iterator: one that is asked for its
    /// next element inside a loop of tiles takes more instructions than what is done with it.
    #[inline(always)]
    pub(super) fn take<const COUNT: usize>(&mut self, mut to: impl FnMut(&[f32; N], &mut [T; N])) -> bool {
        if self.pieces.left < COUNT {
            return false;
        }
        self.pieces.left -= COUNT;
        for _ in 0..COUNT {
            // SAFETY: both are there, as `beside` was promised and as in `Lines::next`.
            unsafe { to(&*self.sums, &mut *self.pieces.start.cast()) };
            self.sums = self.sums.wrapping_add(1);
            self.pieces.start = self.pieces.start.wrapping_add(self.pieces.stride);
        }
        true
    }
}

/// Parts of a buffer that may be absent: as many as the others', each `None` where it is.
pub struct Optional<P> {
    parts: Option<P>,
    count: usize,
}

impl<P: Parts> Optional<P> {
    /// `count` parts of nothing where there is no buffer.
    pub fn new(parts: Option<P>, count: usize) -> Self {
        Self { parts, count }
    }
}

// SAFETY: parts are those of what is inside.
unsafe impl<P: Parts> Parts for Optional<P> {
    type Part = Option<P::Part>;

    fn count(&self) -> usize {
        self.parts.as_ref().map_or(self.count, Parts::count)
    }

    unsafe fn part(&self, index: usize) -> Option<P::Part> {
        // SAFETY: passed on.
        self.parts.as_ref().map(|parts| unsafe { parts.part(index) })
    }
}

macro_rules! parts_of_tuples {
    ($(($($name:ident: $index:tt),+);)+) => {$(
        // SAFETY: each member's parts are disjoint, and members are different slices.
        unsafe impl<$($name: Parts),+> Parts for ($($name,)+) {
            type Part = ($($name::Part,)+);

            fn count(&self) -> usize {
                let count = self.0.count();
                $(assert_eq!(self.$index.count(), count, "buffers of one kernel are cut into the same number of parts");)+
                count
            }

            unsafe fn part(&self, index: usize) -> Self::Part {
                // SAFETY: passed on to each member; counts are equal.
                unsafe { ($(self.$index.part(index),)+) }
            }
        }
    )+};
}

parts_of_tuples! {
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
    fn tiles_cover_a_matrix_once_in_both_orders() {
        let pool = Pool::new(3);
        for down_first in [false, true] {
            let mut cells = vec![0u32; 7 * 6];
            let grid = Grid::with_pitch(&mut cells, [5, 6], 3, 2);
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
