//! Rows encoded on all threads and handed on in file order. While a block of rows is encoded the next one is read, so
//! two blocks are in memory, however large the files are.

use std::ops::ControlFlow;
use std::path::PathBuf;

use rayon::prelude::*;

use super::rows::{RawRow, RowNumber, Rows};
use super::{DataError, Encode, Encoded, RowProblem};

/// How rows are cut for threads. It decides how fast they are encoded, never what they become.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cuts {
    /// Bytes of text after which a block is full.
    pub(super) block_bytes: usize,
    /// Rows after which it is full.
    pub(super) block_rows: usize,
    /// Rows that a thread takes at a time.
    pub(super) chunk_rows: usize,
}

impl Cuts {
    /// Blocks of 8 MiB of text, in small chunks: rows differ in length, and threads should end together. Where few
    /// samples are wanted, blocks are small too.
    pub(super) fn for_samples(wanted: Option<u64>) -> Self {
        let block_rows = wanted.map_or(1 << 16, |wanted| wanted.clamp(256, 1 << 16) as usize);
        Self { block_bytes: 8 << 20, block_rows, chunk_rows: 32 }
    }
}

/// A row on its way out.
pub(super) struct Outcome<'a> {
    /// Which of the files.
    pub(super) file: usize,
    pub(super) at: RowNumber,
    /// Tokens and labels, equally many and at least one, or what is wrong.
    pub(super) row: Result<(&'a [i32], &'a [i32]), RowProblem>,
}

/// Told by the threads that encode, after some rows: how many, and about how many bytes of their files those are.
pub(super) type Watch<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Encodes all rows and hands each to `take` in file order, until it breaks. What is beyond that row, wrong rows
/// included, was never asked for.
pub(super) fn each_row<E: From<DataError>>(
    files: &[PathBuf],
    encoder: &dyn Encode,
    cuts: Cuts,
    watch: Watch<'_>,
    mut take: impl FnMut(Outcome<'_>) -> Result<ControlFlow<()>, E>,
) -> Result<(), E> {
    let mut rows = Rows::new(files);
    let mut block = Block::read(&mut rows, cuts);
    loop {
        let Block { rows: raw, end } = block;
        let (chunks, next) = rayon::join(
            || encoded(raw, encoder, cuts.chunk_rows, watch),
            || if end.is_none() { Block::read(&mut rows, cuts) } else { Block::default() },
        );
        for chunk in chunks {
            if chunk.hand_on(&mut take)?.is_break() {
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
struct Block {
    rows: Vec<RawRow>,
    /// How reading ended, where it did with this block.
    end: Option<Result<(), DataError>>,
}

impl Block {
    fn read(from: &mut Rows<'_>, cuts: Cuts) -> Self {
        let mut block = Self::default();
        let mut bytes = 0;
        while bytes < cuts.block_bytes && block.rows.len() < cuts.block_rows {
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

/// What some rows became, end to end.
#[derive(Default)]
struct Chunk {
    ids: Vec<i32>,
    labels: Vec<i32>,
    rows: Vec<Became>,
}

struct Became {
    file: usize,
    at: RowNumber,
    /// Where the row's tokens end.
    row: Result<usize, RowProblem>,
}

fn encoded(rows: Vec<RawRow>, encoder: &dyn Encode, chunk_rows: usize, watch: Watch<'_>) -> Vec<Chunk> {
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
        let chunk = Chunk::encoded(rows, encoder);
        watch(count, bytes);
        chunk
    };
    chunks.into_par_iter().map(encode).collect()
}

impl Chunk {
    fn encoded(rows: Vec<RawRow>, encoder: &dyn Encode) -> Self {
        let mut chunk = Self::default();
        let mut row_buffer = Encoded::default();
        for RawRow { file, at, content, .. } in rows {
            row_buffer.ids.clear();
            row_buffer.labels.clear();
            let done = content.into_object().and_then(|row| encoder.encode(&row, &mut row_buffer));
            let row = match done {
                Ok(()) if row_buffer.ids.is_empty() => Err(RowProblem::Empty),
                Ok(()) => {
                    chunk.ids.extend_from_slice(&row_buffer.ids);
                    chunk.labels.extend_from_slice(&row_buffer.labels);
                    Ok(chunk.ids.len())
                }
                Err(problem) => Err(problem),
            };
            assert_eq!(chunk.ids.len(), chunk.labels.len(), "tokens and labels of the row at {at}");
            chunk.rows.push(Became { file, at, row });
        }
        chunk
    }

    fn hand_on<E>(
        self,
        take: &mut impl FnMut(Outcome<'_>) -> Result<ControlFlow<()>, E>,
    ) -> Result<ControlFlow<()>, E> {
        let mut start = 0;
        for Became { file, at, row } in self.rows {
            let row = row.map(|end| {
                let range = start..end;
                start = end;
                (&self.ids[range.clone()], &self.labels[range])
            });
            if take(Outcome { file, at, row })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}
