//! Embedding lookup and the gradient of the table.
//!
//! A negative id is padding: its row is zero and has no gradient.

use std::sync::atomic::{AtomicBool, Ordering};

use super::check_len;
use super::convert::convert_and_check_piece;
use super::isa::each_isa;
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::rows::check_rows;
use super::stream;
use super::work_partition::{Chunks, Grid};
use zeroth_kernel::Element;
use zeroth_kernel::EmbeddingDims;
use zeroth_kernel::TiedRowsIn;

/// Rows of the output per task.
const ROWS: usize = 64;
/// Columns of the table's gradient per task.
const COLUMNS: usize = 128;
/// How many rows ahead the gradient is prefetched: rows are anywhere in the table.
const AHEAD: usize = 8;
/// Ids compared at a time.
const LANES: usize = 64;

/// `y[i] = table[ids[i]]`.
pub fn embedding<T: Element>(pool: &Pool, dims: EmbeddingDims, ids: &[i32], table: &[T], y: &mut [T]) {
    let width = dims.width;
    check_len("table", table.len(), dims.vocab * width);
    let stride = dims.row_stride;
    check_rows("y", y.len(), [ids.len(), width], stride);
    pool.each(Chunks::new(y, ROWS * stride), |task, y| {
        for (y, &id) in y.chunks_exact_mut(stride).zip(&ids[task * ROWS..]) {
            let y = &mut y[..width];
            match row_of(id, dims.vocab) {
                Some(row) => y.copy_from_slice(&table[row * width..][..width]),
                None => y.fill(T::default()),
            }
        }
    });
}

/// `dtable[ids[i]] += dy[i]`, in f32.
///
/// A task owns a range of columns and adds the rows of dy in order, so that the order of additions is fixed without sorting
/// the ids.
pub fn embedding_backward<T: Element>(
    pool: &Pool,
    dims: EmbeddingDims,
    ids: &[i32],
    dy: &[T],
    dtable: &mut [f32],
) {
    let width = dims.width;
    let stride = dims.row_stride;
    check_rows("dy", dy.len(), [ids.len(), width], stride);
    check_len("dtable", dtable.len(), dims.vocab * width);
    pool.each(Grid::new(dtable, width, dims.vocab, COLUMNS), |_, mut table| {
        let first = table.first_column();
        for (at, (&id, dy)) in ids.iter().zip(dy.chunks_exact(stride)).enumerate() {
            if let Some(row) = ids.get(at + AHEAD).and_then(|id| row_of(*id, dims.vocab)) {
                stream::prefetch_read(table.row(row));
            }
            if let Some(row) = row_of(id, dims.vocab) {
                for (sum, dy) in table.row(row).iter_mut().zip(&dy[first..]) {
                    *sum += dy.to_f32();
                }
            }
        }
    });
}

/// The embedding's part of a tied table's gradient: adds dy to the f32 rows that the head has left, and rounds them into
/// `dtable`. Other rows of `dtable` are unchanged. Returns whether a result is infinite or NaN.
///
/// `rows` [tokens, width] holds the head's gradient of every token's row, equal for equal tokens (see
/// [`TokenRows`](super::TokenRows)). dy is added to the first row of each token in the order of [`embedding_backward`], so the bits
/// are those of its result, rounded.
pub fn embedding_backward_tied<T: Element>(
    pool: &Pool,
    dims: EmbeddingDims,
    ids: &[i32],
    dy: &[T],
    rows: &mut [f32],
    dtable: &mut [T],
) -> bool {
    let (width, isa) = (dims.width, pool.isa());
    let stride = dims.row_stride;
    check_rows("dy", dy.len(), [ids.len(), width], stride);
    check_len("rows", rows.len(), ids.len() * width);
    check_len("dtable", dtable.len(), dims.vocab * width);
    if ids.is_empty() {
        return false;
    }
    // Only ever set, so the order of tasks does not matter.
    let found_inf = AtomicBool::new(false);
    let columns = (Grid::new(rows, width, ids.len(), COLUMNS), Grid::new(dtable, width, dims.vocab, COLUMNS));
    pool.each(columns, |_, (mut rows, mut table)| {
        let first = rows.first_column();
        for (&id, dy) in ids.iter().zip(dy.chunks_exact(stride)) {
            if row_of(id, dims.vocab).is_some() {
                for (sum, dy) in rows.row(first_index(isa, ids, id)).iter_mut().zip(&dy[first..]) {
                    *sum += dy.to_f32();
                }
            }
        }
        for (index, &id) in ids.iter().enumerate() {
            if let Some(row) = row_of(id, dims.vocab).filter(|_| first_index(isa, ids, id) == index)
                && convert_and_check_piece(isa, rows.row(index), table.row(row), false)
            {
                found_inf.store(true, Ordering::Relaxed);
            }
        }
    });
    found_inf.into_inner()
}

each_isa! {
    /// The index of the first occurrence of `id`, which is in `ids`.
    fn first_index(ids: &[i32], id: i32) -> usize {
        let before = ids.chunks(LANES).take_while(|some| !some.contains(&id)).count() * LANES;
        before + ids[before..].iter().take_while(|other| **other != id).count()
    }
}

fn row_of(id: i32, vocab: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?;
    assert!(
        row < vocab,
        "token id {id} in a batch for a vocabulary of {vocab}; the data is checked when it is read"
    );
    Some(row)
}

cpu_kernel!(Embedding { dims, rows, ids, table, y }, |_| 0, |cx| {
    let ids: &[i32] = cx.read(ids)?;
    embedding(cx.pool, dims, &ids[..rows], cx.read::<T>(table)?, cx.write(y)?);
});

cpu_kernel!(EmbeddingBackward { dims, rows, ids, dy, dtable, tied_rows }, |_| 0, |cx| {
    let ids: &[i32] = cx.read(ids)?;
    let (ids, dy) = (&ids[..rows], cx.read::<T>(dy)?);
    match tied_rows {
        None => embedding_backward(cx.pool, dims, ids, dy, cx.write(dtable)?),
        Some(TiedRowsIn { rows, found_inf }) => {
            let (rows, dtable) = (cx.write(rows)?, cx.write(dtable)?);
            if embedding_backward_tied(cx.pool, dims, ids, dy, rows, dtable) {
                *cx.write_one::<u64>(found_inf)? = 1;
            }
        }
    }
});

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};

    fn strided_rows_match_contiguous_rows<T: Element>(pool: &Pool, tokens: usize, dims: EmbeddingDims) {
        let EmbeddingDims { vocab, width, .. } = dims;
        let case = format!("{}, {} threads, {}, {tokens} of {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        // Some tokens repeat, some are absent.
        let id = |at: usize| if at % 7 == 6 { -1 } else { (at * at % vocab) as i32 };
        let ids: Vec<_> = (0..tokens).map(id).collect();
        let table = random::<T>(1, vocab * width);

        let mut y = vec![T::default(); tokens * width];
        embedding(pool, dims, &ids, &table, &mut y);
        let mut found = vec![T::from_f32(-f32::NAN); tokens * (width + APART)];
        let padded = EmbeddingDims { row_stride: width + APART, ..dims };
        embedding(pool, padded, &ids, &table, &mut found);
        assert_eq!(bits(&found), bits(&apart(&y, width, -f32::NAN)), "{case}");

        let (dy, wide) = (random::<T>(2, tokens * width), random::<f32>(3, vocab * width));
        let dy_apart = apart(&dy, width, f32::NAN);
        let [expected, found] = [(dims, &dy), (padded, &dy_apart)].map(|(dims, dy)| {
            let mut dtable = wide.clone();
            embedding_backward(pool, dims, &ids, dy, &mut dtable);
            bits(&dtable)
        });
        assert_eq!(found, expected, "{case}, backward");

        // Equal tokens have equal rows.
        let row = |&id: &i32| &wide[usize::try_from(id).unwrap_or(0) * width..][..width];
        let tied_rows: Vec<f32> = ids.iter().flat_map(row).copied().collect();
        let [expected, found] = [(dims, &dy), (padded, &dy_apart)].map(|(dims, dy)| {
            let (mut rows, mut dtable) = (tied_rows.clone(), table.clone());
            let found_inf = embedding_backward_tied(pool, dims, &ids, dy, &mut rows, &mut dtable);
            (found_inf, bits(&dtable))
        });
        assert_eq!(found, expected, "{case}, tied backward");
        assert!(!found.0, "{case}");
    }

    #[test]
    fn row_stride_changes_no_bits_and_padding_is_untouched() {
        for pool in pools() {
            for (tokens, vocab, width) in [(1, 1, 1), (150, 40, 300), (64, 90, 128), (0, 3, 8)] {
                let dims = EmbeddingDims::new(vocab, width);
                strided_rows_match_contiguous_rows::<f32>(&pool, tokens, dims);
                strided_rows_match_contiguous_rows::<bf16>(&pool, tokens, dims);
                strided_rows_match_contiguous_rows::<f16>(&pool, tokens, dims);
            }
        }
    }
}
