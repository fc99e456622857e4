//! Causal attention over packed sequences: grouped heads, an optional window, softmax streamed over tiles of keys.
//!
//! No [sequence, sequence] tensor exists. A task is a tile of queries of one head; key tiles are counted from the
//! beginning of the sequence, so a row's result does not depend on where in the pack its sequence stands. Scores,
//! probabilities and the running sum are f32; the output is rounded once.

use std::ops::Range;

use super::cut::Grid;
use super::element::Element;
use super::matmul::{View, block, pack_len};
use super::path::each_path;
use super::pool::Pool;
use super::{check_len, check_scratch, math};

/// Queries of a tile.
pub(super) const QUERIES: usize = 96;
/// Keys of a tile.
pub(super) const KEYS: usize = 128;

/// The sizes of attention: q is [rows, heads · head_dim], k and v are [rows, kv_heads · head_dim].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDims {
    /// Tokens, padding included.
    pub rows: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v; a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// A query sees this many keys, its own among them; `None`: all before it.
    pub window: Option<usize>,
    /// Multiplies the scores.
    pub scale: f32,
}

impl AttentionDims {
    pub(super) const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub(super) const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Heads of q that share a head of k and v.
    pub(super) const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The first key that a query of a sequence sees.
    pub(super) fn first_key(&self, sequence: usize, query: usize) -> usize {
        self.window.map_or(sequence, |window| sequence.max((query + 1).saturating_sub(window)))
    }

    /// Head `head` of rows from `row` on, of a matrix of `width` columns.
    pub(super) fn view<'a, T>(&self, data: &'a [T], width: usize, row: usize, head: usize) -> View<'a, T> {
        View::rows(&data[row * width + head * self.head_dim..], width)
    }

    pub(super) fn check(&self, starts: &[u32]) {
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "{} heads cannot share {} kv heads",
            self.heads,
            self.kv_heads
        );
        assert!(self.window != Some(0), "a window of 0 keys leaves nothing to attend to");
        assert!(
            starts.is_sorted() && starts.last().is_none_or(|&end| end as usize <= self.rows),
            "starts of sequences must rise and end within {} rows: {starts:?}",
            self.rows
        );
    }

    const fn thread_scratch(&self) -> usize {
        let (score, weigh) = (pack_len(KEYS, self.head_dim), pack_len(self.head_dim, KEYS));
        QUERIES * (KEYS + self.head_dim + 2) + if score > weigh { score } else { weigh }
    }
}

/// Where a tile of scores stands.
pub(super) struct TileAt {
    /// The first row of the sequence.
    pub(super) sequence: usize,
    pub(super) first_query: usize,
    pub(super) keys: Range<usize>,
}

/// The pieces of sequences that lie in `rows`: where the sequence is, and which of its rows.
pub(super) fn pieces(
    starts: &[u32],
    rows: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    starts.windows(2).filter_map(move |pair| {
        let sequence = pair[0] as usize..pair[1] as usize;
        let piece = sequence.start.max(rows.start)..sequence.end.min(rows.end);
        (!piece.is_empty()).then_some((sequence, piece))
    })
}

/// Tiles of `size`, counted from `origin`, that cover `range`; the first may begin before it.
pub(super) fn tiles(origin: usize, range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let first = origin + (range.start - origin) / size * size;
    (first..range.end).step_by(size).map(move |start| start..range.end.min(start + size))
}

/// f32 elements of scratch that [`attention`] needs with a pool of `threads`.
pub const fn attention_scratch(dims: &AttentionDims, threads: usize) -> usize {
    dims.thread_scratch() * threads
}

/// out = softmax(scale · q · kᵀ) · v within each sequence.
///
/// `starts` holds where each sequence begins and, last, where the last one ends; rows beyond it are padding and give
/// zeros. `lse` [heads, rows] receives the logarithm of each softmax's denominator, which backward needs.
pub fn attention<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    starts: &[u32],
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (rows, head_dim) = (dims.rows, dims.head_dim);
    dims.check(starts);
    check_len("q", q.len(), rows * dims.q_width());
    check_len("k", k.len(), rows * dims.kv_width());
    check_len("v", v.len(), rows * dims.kv_width());
    check_len("out", out.len(), rows * dims.q_width());
    check_len("lse", lse.len(), dims.heads * rows);
    check_scratch(scratch.len(), attention_scratch(dims, pool.threads()));
    let parts =
        (Grid::new(out, dims.q_width(), QUERIES, head_dim), Grid::new(lse, rows, 1, QUERIES).down_first());
    pool.each_with(parts, scratch, |task, (mut out, mut lse), scratch| {
        let head = task % dims.heads;
        let kv_head = head / dims.group();
        let (scores, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (sums, scratch) = scratch.split_at_mut(QUERIES * head_dim);
        let (peaks, scratch) = scratch.split_at_mut(QUERIES);
        let (totals, pack) = scratch.split_at_mut(QUERIES);
        let first = out.first_row();
        lse.row(0).fill(0.0);
        for row in 0..out.rows() {
            out.row(row).fill(T::default());
        }
        for (sequence, queries) in pieces(starts, first..first + out.rows()) {
            let count = queries.len();
            let (sums, peaks) = (&mut sums[..count * head_dim], &mut peaks[..count]);
            let totals = &mut totals[..count];
            sums.fill(0.0);
            peaks.fill(f32::NEG_INFINITY);
            totals.fill(0.0);
            let seen = dims.first_key(sequence.start, queries.start)..queries.end;
            for keys in tiles(sequence.start, seen, KEYS) {
                let q = dims.view(q, dims.q_width(), queries.start, head);
                let k = dims.view(k, dims.kv_width(), keys.start, kv_head).transposed();
                block(pool.path(), [count, keys.len(), head_dim], q, k, scores, KEYS, false, pack);
                let tile =
                    TileAt { sequence: sequence.start, first_query: queries.start, keys: keys.clone() };
                absorb(pool.path(), dims, tile, scores, peaks, totals, sums);
                let weights = View::rows(&*scores, KEYS);
                let v = dims.view(v, dims.kv_width(), keys.start, kv_head);
                block(pool.path(), [count, head_dim, keys.len()], weights, v, sums, head_dim, true, pack);
            }
            for (row, sums) in sums.chunks_exact(head_dim).enumerate() {
                let place = queries.start - first + row;
                for (out, sum) in out.row(place).iter_mut().zip(sums) {
                    *out = T::from_f32(sum / totals[row]);
                }
                lse.row(0)[place] = peaks[row] + totals[row].ln();
            }
        }
    });
}

each_path! {
    /// Turns a tile of raw scores into weights relative to each row's new peak, and scales what was summed before.
    fn absorb(
        dims: &AttentionDims,
        tile: TileAt,
        scores: &mut [f32],
        peaks: &mut [f32],
        totals: &mut [f32],
        sums: &mut [f32],
    ) {
        let TileAt { sequence, first_query, keys } = tile;
        let head_dim = dims.head_dim;
        for (row, (peak, total)) in peaks.iter_mut().zip(totals).enumerate() {
            let query = first_query + row;
            let scores = &mut scores[row * KEYS..][..keys.len()];
            let from = dims.first_key(sequence, query).clamp(keys.start, keys.end) - keys.start;
            let to = (query + 1).clamp(keys.start, keys.end) - keys.start;
            if from >= to {
                scores.fill(0.0);
                continue;
            }
            scores[..from].fill(0.0);
            scores[to..].fill(0.0);
            let seen = &mut scores[from..to];
            for score in seen.iter_mut() {
                *score *= dims.scale;
            }
            let new = peak.max(math::largest(seen));
            let shrink = math::exp(*peak - new);
            for score in seen.iter_mut() {
                *score = math::exp(*score - new);
            }
            *total = *total * shrink + math::sum(seen.len(), |i| seen[i]);
            *peak = new;
            for sum in &mut sums[row * head_dim..][..head_dim] {
                *sum *= shrink;
            }
        }
    }
}
