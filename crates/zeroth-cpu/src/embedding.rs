//! Rows of a table by token id, and the gradient of the table.
//!
//! A negative id is a row of padding: zeros going in, no gradient coming back.

use std::sync::atomic::{AtomicBool, Ordering};

use super::check_len;
use super::convert::look_piece;
use super::cut::{Chunks, Grid};
use super::isa::each_isa;
use super::pool::Pool;
use super::rows::pitch;
use super::stream;
use zeroth_kernel::Element;
use zeroth_kernel::EmbeddingDims;

/// Rows of the output that one task gathers.
const ROWS: usize = 64;
/// Columns of the table whose gradient one task owns.
const COLUMNS: usize = 128;
/// Rows of the gradient that are asked for ahead: they lie anywhere in the table.
const AHEAD: usize = 8;
/// Ids that are looked through at a time.
const LANES: usize = 64;

/// `y[i] = table[ids[i]]`.
pub fn embedding<T: Element>(pool: &Pool, dims: EmbeddingDims, ids: &[i32], table: &[T], y: &mut [T]) {
    let width = dims.width;
    check_len("table", table.len(), dims.vocab * width);
    let pitch = pitch("y", y.len(), [ids.len(), width]);
    pool.each(Chunks::new(y, ROWS * pitch), |task, y| {
        for (y, &id) in y.chunks_exact_mut(pitch).zip(&ids[task * ROWS..]) {
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
    let pitch = pitch("dy", dy.len(), [ids.len(), width]);
    check_len("dtable", dtable.len(), dims.vocab * width);
    pool.each(Grid::new(dtable, width, dims.vocab, COLUMNS), |_, mut table| {
        let first = table.first_column();
        for (at, (&id, dy)) in ids.iter().zip(dy.chunks_exact(pitch)).enumerate() {
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

/// Completes the rows of a gradient that wait in f32 for the tokens that chose them, and rounds them to their places in the
/// table; whether a result is not finite. The table's other rows are left alone.
///
/// `rows` [tokens, width] holds for every token what its row has, the same for the same tokens, as
/// [`OwnRows`](super::OwnRows) of the head. dy is added to the first of the same in the order of [`embedding_backward`], so
/// the bits are those that it leaves, rounded.
pub fn embedding_backward_tied<T: Element>(
    pool: &Pool,
    dims: EmbeddingDims,
    ids: &[i32],
    dy: &[T],
    rows: &mut [f32],
    dtable: &mut [T],
) -> bool {
    let (width, path) = (dims.width, pool.isa());
    let pitch = pitch("dy", dy.len(), [ids.len(), width]);
    check_len("rows", rows.len(), ids.len() * width);
    check_len("dtable", dtable.len(), dims.vocab * width);
    if ids.is_empty() {
        return false;
    }
    // It only ever becomes true, so the order of the tasks means nothing.
    let broken = AtomicBool::new(false);
    let columns = (Grid::new(rows, width, ids.len(), COLUMNS), Grid::new(dtable, width, dims.vocab, COLUMNS));
    pool.each(columns, |_, (mut rows, mut table)| {
        let first = rows.first_column();
        for (&id, dy) in ids.iter().zip(dy.chunks_exact(pitch)) {
            if row_of(id, dims.vocab).is_some() {
                for (sum, dy) in rows.row(first_place(path, ids, id)).iter_mut().zip(&dy[first..]) {
                    *sum += dy.to_f32();
                }
            }
        }
        for (place, &id) in ids.iter().enumerate() {
            if let Some(row) = row_of(id, dims.vocab).filter(|_| first_place(path, ids, id) == place)
                && look_piece(path, rows.row(place), table.row(row), false)
            {
                broken.store(true, Ordering::Relaxed);
            }
        }
    });
    broken.into_inner()
}

each_isa! {
    /// The first place that has an id, which is one of them.
    fn first_place(ids: &[i32], id: i32) -> usize {
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

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};

    fn rows_apart_are_rows<T: Element>(pool: &Pool, tokens: usize, dims: EmbeddingDims) {
        let EmbeddingDims { vocab, width } = dims;
        let case = format!("{}, {} threads, {}, {tokens} of {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        // Some tokens more than once, some none.
        let id = |at: usize| if at % 7 == 6 { -1 } else { (at * at % vocab) as i32 };
        let ids: Vec<_> = (0..tokens).map(id).collect();
        let table = random::<T>(1, vocab * width);

        let mut y = vec![T::default(); tokens * width];
        embedding(pool, dims, &ids, &table, &mut y);
        let mut found = vec![T::from_f32(-f32::NAN); tokens * (width + APART)];
        embedding(pool, dims, &ids, &table, &mut found);
        assert_eq!(bits(&found), bits(&apart(&y, width, -f32::NAN)), "{case}");

        let (dy, wide) = (random::<T>(2, tokens * width), random::<f32>(3, vocab * width));
        let dy_apart = apart(&dy, width, f32::NAN);
        let [expected, found] = [&dy, &dy_apart].map(|dy| {
            let mut dtable = wide.clone();
            embedding_backward(pool, dims, &ids, dy, &mut dtable);
            bits(&dtable)
        });
        assert_eq!(found, expected, "{case}, backward");

        // What waits is the same for the same tokens.
        let row = |&id: &i32| &wide[usize::try_from(id).unwrap_or(0) * width..][..width];
        let waiting: Vec<f32> = ids.iter().flat_map(row).copied().collect();
        let [expected, found] = [&dy, &dy_apart].map(|dy| {
            let (mut rows, mut dtable) = (waiting.clone(), table.clone());
            let broken = embedding_backward_tied(pool, dims, &ids, dy, &mut rows, &mut dtable);
            (broken, bits(&dtable))
        });
        assert_eq!(found, expected, "{case}, backward once");
        assert!(!found.0, "{case}");
    }

    #[test]
    fn rows_may_be_further_apart_than_they_are_long() {
        for pool in pools() {
            for (tokens, vocab, width) in [(1, 1, 1), (150, 40, 300), (64, 90, 128), (0, 3, 8)] {
                let dims = EmbeddingDims { vocab, width };
                rows_apart_are_rows::<f32>(&pool, tokens, dims);
                rows_apart_are_rows::<bf16>(&pool, tokens, dims);
                rows_apart_are_rows::<f16>(&pool, tokens, dims);
            }
        }
    }
}
