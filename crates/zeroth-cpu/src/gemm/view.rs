//! A strided view of a matrix.

/// A matrix in a slice: element (i, j) is at `i * row_stride + j * col_stride`, and one of the strides is 1.
pub(crate) struct MatrixView<'a, T> {
    pub(super) data: &'a [T],
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<T> Clone for MatrixView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for MatrixView<'_, T> {}

impl<'a, T> MatrixView<'a, T> {
    /// A row-major matrix whose rows are `row_stride` elements apart.
    pub(crate) fn row_major(data: &'a [T], row_stride: usize) -> Self {
        Self { data, row_stride, col_stride: 1 }
    }

    /// The transpose, without a copy.
    pub(crate) fn transposed(self) -> Self {
        Self { data: self.data, row_stride: self.col_stride, col_stride: self.row_stride }
    }

    /// Whether the matrix is column-major: the elements of a row are strided.
    pub(super) fn is_transposed(self) -> bool {
        self.col_stride != 1
    }

    /// The submatrix that starts at row `i`, column `j`.
    pub(crate) fn submatrix(self, i: usize, j: usize) -> Self {
        Self { data: &self.data[i * self.row_stride + j * self.col_stride..], ..self }
    }

    /// Pointer to the first element, after a check that `rows` by `columns` elements are inside the slice.
    #[cfg(target_arch = "x86_64")]
    #[track_caller]
    pub(super) fn checked_ptr(self, rows: usize, columns: usize) -> *const T {
        let last = rows.saturating_sub(1) * self.row_stride + columns.saturating_sub(1) * self.col_stride;
        let fits = rows == 0 || columns == 0 || last < self.data.len();
        assert!(fits, "a view of {rows} by {columns} elements exceeds its slice of {}", self.data.len());
        self.data.as_ptr()
    }
}
