//! A matrix in a slice, seen either way round.

/// A matrix in a slice: element (i, j) at `i * row + j * column`, one of which is 1.
pub(crate) struct View<'a, T> {
    pub(super) data: &'a [T],
    pub(super) row: usize,
    pub(super) column: usize,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<'a, T> View<'a, T> {
    /// A matrix stored row by row, `width` elements from one row to the next.
    pub(crate) fn rows(data: &'a [T], width: usize) -> Self {
        Self { data, row: width, column: 1 }
    }

    /// The same numbers seen with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self { data: self.data, row: self.column, column: self.row }
    }

    /// Whether the elements of a row lie apart.
    pub(super) fn turned(self) -> bool {
        self.column != 1
    }

    /// The part that begins at row `i`, column `j`.
    pub(super) fn from(self, i: usize, j: usize) -> Self {
        Self { data: &self.data[i * self.row + j * self.column..], ..self }
    }

    /// The first element, after a check that `rows` by `columns` elements lie within the slice.
    #[cfg(target_arch = "x86_64")]
    #[track_caller]
    pub(super) fn checked(self, rows: usize, columns: usize) -> *const T {
        let last = rows.saturating_sub(1) * self.row + columns.saturating_sub(1) * self.column;
        let fits = rows == 0 || columns == 0 || last < self.data.len();
        assert!(fits, "{rows} by {columns} elements of a slice of {}", self.data.len());
        self.data.as_ptr()
    }
}
