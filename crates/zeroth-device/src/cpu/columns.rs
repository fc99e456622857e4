//! Column sums of a [rows, width] matrix in two levels: blocks of 64 rows, then the blocks in order.
//!
//! Used for the gradients of biases and norm weights. A block's sums are one task's; the second level cuts by columns.

use super::cut::Chunks;
use super::pool::Pool;

/// Rows that one task sums.
pub(super) const BLOCK: usize = 64;
/// Columns of the second level that one task adds up.
const COLUMNS: usize = 256;

/// f32 elements of the first level's sums.
pub(super) const fn partials(rows: usize, width: usize) -> usize {
    rows.div_ceil(BLOCK) * width
}

/// The rows of a block.
pub(super) fn block_of<T>(matrix: &[T], width: usize, block: usize) -> &[T] {
    let first = block * BLOCK * width;
    &matrix[first..matrix.len().min(first + BLOCK * width)]
}

/// Adds the blocks' sums, in order, to `total`.
pub(super) fn add_partials(pool: &Pool, partials: &[f32], total: &mut [f32]) {
    let width = total.len();
    pool.each(Chunks::new(total, COLUMNS), |task, total| {
        let first = task * COLUMNS;
        for (column, total) in total.iter_mut().enumerate() {
            let sums = partials[first + column..].iter().step_by(width);
            *total += sums.sum::<f32>();
        }
    });
}
