//! Rows of a table by token id, and the gradient of the table.
//!
//! A negative id is a row of padding: zeros going in, no gradient coming back.

use super::check_len;
use super::cut::{Chunks, Grid};
use super::element::Element;
use super::pool::Pool;
use super::stream;

/// Rows of the output that one task gathers.
const ROWS: usize = 64;
/// Columns of the table whose gradient one task owns.
const COLUMNS: usize = 128;
/// Rows of the gradient that are asked for ahead: they lie anywhere in the table.
const AHEAD: usize = 8;

/// The sizes of an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingDims {
    /// Rows of the table.
    pub vocab: usize,
    /// Columns of the table.
    pub width: usize,
}

/// `y[i] = table[ids[i]]`.
pub fn embedding<T: Element>(pool: &Pool, dims: EmbeddingDims, ids: &[i32], table: &[T], y: &mut [T]) {
    let width = dims.width;
    check_len("table", table.len(), dims.vocab * width);
    check_len("y", y.len(), ids.len() * width);
    pool.each(Chunks::new(y, ROWS * width), |task, y| {
        for (y, &id) in y.chunks_exact_mut(width).zip(&ids[task * ROWS..]) {
            match row_of(id, dims.vocab) {
                Some(row) => y.copy_from_slice(&table[row * width..][..width]),
                None => y.fill(T::default()),
            }
        }
    });
}

/// `dtable[ids[i]] += dy[i]`, in f32.
///
/// A task owns some columns of the whole table and takes the rows of dy in order, so each element is added by one task
/// in one order, without sorting the ids.
pub fn embedding_backward<T: Element>(
    pool: &Pool,
    dims: EmbeddingDims,
    ids: &[i32],
    dy: &[T],
    dtable: &mut [f32],
) {
    let width = dims.width;
    check_len("dy", dy.len(), ids.len() * width);
    check_len("dtable", dtable.len(), dims.vocab * width);
    pool.each(Grid::new(dtable, width, dims.vocab, COLUMNS), |_, mut table| {
        let first = table.first_column();
        for (at, (&id, dy)) in ids.iter().zip(dy.chunks_exact(width)).enumerate() {
            if let Some(row) = ids.get(at + AHEAD).and_then(|id| row_of(*id, dims.vocab)) {
                stream::ask_for(table.row(row));
            }
            if let Some(row) = row_of(id, dims.vocab) {
                for (sum, dy) in table.row(row).iter_mut().zip(&dy[first..]) {
                    *sum += dy.to_f32();
                }
            }
        }
    });
}

fn row_of(id: i32, vocab: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?;
    assert!(
        row < vocab,
        "token id {id} in a batch for a vocabulary of {vocab}; the data is checked when it is read"
    );
    Some(row)
}
