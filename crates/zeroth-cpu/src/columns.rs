//! Column sums of a [rows, width] matrix in two levels: blocks of 64 rows, then the blocks in order.
//!
//! They are the gradients of biases and norm weights. A task of the first level sums one block; the second level is
//! partitioned by columns.

use super::isa::each_isa;
use super::pool::Pool;
use super::work_partition::Chunks;

/// Rows per task of the first level.
pub(super) const BLOCK: usize = 64;
/// Columns per task of the second level.
const COLUMNS: usize = 256;

/// f32 elements of the first level's partial sums.
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
        add_columns(pool.isa(), partials, width, task * COLUMNS, total);
    });
}

each_isa! {
    /// Block by block over neighbouring columns, so that reads are contiguous.
    fn add_columns(partials: &[f32], width: usize, first: usize, total: &mut [f32]) {
        let mut sums = [-0.0f32; COLUMNS];
        for block in partials.chunks_exact(width) {
            for (sum, value) in sums.iter_mut().zip(&block[first..][..total.len()]) {
                *sum += value;
            }
        }
        for (total, sum) in total.iter_mut().zip(sums) {
            *total += sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_is_the_sum_of_its_blocks_in_order() {
        let (blocks, width) = (37, 300);
        let partials: Vec<f32> = (0..blocks * width).map(|i| (i as f32 * 0.7).sin() * 1e3).collect();
        let mut total: Vec<f32> = (0..width).map(|i| i as f32).collect();
        add_partials(&Pool::new(2), &partials, &mut total);
        for (column, total) in total.into_iter().enumerate() {
            let sum: f32 = partials[column..].iter().step_by(width).sum();
            assert_eq!(total, column as f32 + sum, "column {column}");
        }
    }
}
