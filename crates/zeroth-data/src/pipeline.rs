//! Encodes rows on all threads and passes them on in file order. The next block of rows is read while one is encoded,
//! so at most two blocks are in memory.

use std::ops::ControlFlow;
use std::path::PathBuf;

use rayon::prelude::*;

use super::rows::{RawRow, RowReader};
use super::{DataError, Encode, Encoded, RowNumber, RowProblem, SkipRule};

/// Block and chunk sizes. They affect speed, never the result.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockSizes {
    /// Text bytes per block.
    pub(super) block_bytes: usize,
    /// Rows per block.
    pub(super) block_rows: usize,
    /// Rows per task.
    pub(super) chunk_rows: usize,
}

impl BlockSizes {
    /// Blocks of 8 MiB of text in small chunks, which balances rows of different lengths. Blocks are smaller if few
    /// samples are wanted.
    pub(super) fn for_samples(wanted: Option<u64>) -> Self {
        let block_rows = wanted.map_or(1 << 16, |wanted| wanted.clamp(256, 1 << 16) as usize);
        Self { block_bytes: 8 << 20, block_rows, chunk_rows: 32 }
    }
}

/// An encoded row.
pub(super) struct EncodedRow<'a> {
    /// Index of its file.
    pub(super) file: usize,
    pub(super) at: RowNumber,
    /// Tokens and labels, at least one of each and of equal length except for pairs, or the problem.
    pub(super) row: Result<(&'a [i32], &'a [i32]), RowProblem>,
    /// Set if the row was not tokenised, and has no tokens here: it has at least this number.
    pub(super) skipped: Option<u64>,
    /// Tokens and labels that an encoder of pairs has truncated.
    pub(super) cut: [usize; 2],
}

/// Progress callback of the encoding threads: rows, and approximate bytes of their files.
pub(super) type ProgressFn<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Encodes all rows and passes each to `take` in file order until it breaks. Rows after that one, even invalid ones,
/// are ignored. Those that `skips` selects are not tokenised.
pub(super) fn each_row<E: From<DataError>>(
    files: &[PathBuf],
    encoder: &dyn Encode,
    sizes: BlockSizes,
    skips: Option<SkipRule>,
    progress: ProgressFn<'_>,
    mut take: impl FnMut(EncodedRow<'_>) -> Result<ControlFlow<()>, E>,
) -> Result<(), E> {
    let mut rows = RowReader::new(files, encoder.columns());
    let mut block = RowBlock::read(&mut rows, sizes);
    loop {
        let RowBlock { rows: raw, end } = block;
        let (chunks, next) = rayon::join(
            || encoded(raw, encoder, sizes.chunk_rows, skips, progress),
            || if end.is_none() { RowBlock::read(&mut rows, sizes) } else { RowBlock::default() },
        );
        for chunk in chunks {
            if chunk.pass_rows(&mut take)?.is_break() {
                return Ok(());
            }
        }
        if let Some(end) = end {
            return Ok(end?);
        }
        block = next;
    }
}

/// Rows read ahead.
#[derive(Default)]
struct RowBlock {
    rows: Vec<RawRow>,
    /// The result of reading, if it ended with this block.
    end: Option<Result<(), DataError>>,
}

impl RowBlock {
    fn read(from: &mut RowReader<'_>, sizes: BlockSizes) -> Self {
        let mut block = Self::default();
        let mut bytes = 0;
        while bytes < sizes.block_bytes && block.rows.len() < sizes.block_rows {
            match from.next() {
                Ok(Some(row)) => {
                    bytes += row.content.size();
                    block.rows.push(row);
                }
                Ok(None) => {
                    block.end = Some(Ok(()));
                    break;
                }
                Err(error) => {
                    block.end = Some(Err(error));
                    break;
                }
            }
        }
        block
    }
}

/// Encoded rows, concatenated.
#[derive(Default)]
struct Chunk {
    ids: Vec<i32>,
    labels: Vec<i32>,
    rows: Vec<RowOutcome>,
}

struct RowOutcome {
    file: usize,
    at: RowNumber,
    /// Ends of the row's tokens and labels.
    row: Result<[usize; 2], RowProblem>,
    skipped: Option<u64>,
    cut: [usize; 2],
}

fn encoded(
    rows: Vec<RawRow>,
    encoder: &dyn Encode,
    chunk_rows: usize,
    skips: Option<SkipRule>,
    progress: ProgressFn<'_>,
) -> Vec<Chunk> {
    let chunks: Vec<Vec<RawRow>> = {
        let mut rows = rows.into_iter().peekable();
        let mut chunks = Vec::new();
        while rows.peek().is_some() {
            chunks.push(rows.by_ref().take(chunk_rows.max(1)).collect());
        }
        chunks
    };
    let encode = |rows: Vec<RawRow>| {
        let (count, bytes) = (rows.len() as u64, rows.iter().map(|row| row.bytes).sum());
        let chunk = Chunk::encoded(rows, encoder, skips);
        progress(count, bytes);
        chunk
    };
    chunks.into_par_iter().map(encode).collect()
}

impl Chunk {
    fn encoded(rows: Vec<RawRow>, encoder: &dyn Encode, skips: Option<SkipRule>) -> Self {
        let mut chunk = Self::default();
        let mut row_buffer = Encoded { skips, ..Encoded::default() };
        let is_paired = encoder.pairs().is_some();
        for RawRow { file, at, content, .. } in rows {
            row_buffer.clear();
            let done = content.into_object().and_then(|row| encoder.encode(&row, &mut row_buffer));
            let row = match done {
                Ok(()) if row_buffer.skipped.is_some() => Ok([chunk.ids.len(), chunk.labels.len()]),
                Ok(()) if row_buffer.ids.is_empty() => Err(RowProblem::Empty),
                Ok(()) => {
                    chunk.ids.extend_from_slice(&row_buffer.ids);
                    chunk.labels.extend_from_slice(&row_buffer.labels);
                    Ok([chunk.ids.len(), chunk.labels.len()])
                }
                Err(problem) => Err(problem),
            };
            assert!(
                is_paired || chunk.ids.len() == chunk.labels.len(),
                "tokens and labels of the row at {at}"
            );
            let Encoded { skipped, cut, .. } = row_buffer;
            chunk.rows.push(RowOutcome { file, at, row, skipped, cut });
        }
        chunk
    }

    fn pass_rows<E>(
        self,
        take: &mut impl FnMut(EncodedRow<'_>) -> Result<ControlFlow<()>, E>,
    ) -> Result<ControlFlow<()>, E> {
        let mut starts = [0; 2];
        for RowOutcome { file, at, row, skipped, cut } in self.rows {
            let row = row.map(|ends| {
                let row = (&self.ids[starts[0]..ends[0]], &self.labels[starts[1]..ends[1]]);
                starts = ends;
                row
            });
            if take(EncodedRow { file, at, row, skipped, cut })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}
