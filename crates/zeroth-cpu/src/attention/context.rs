//! What attention reads besides q, k and v: sequences, biases by distance, and dropout of its weights.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use zeroth_kernel::AttentionDims;

use super::dropout::{HeadDropout, WeightDropout};
use crate::check_len;

/// [`zeroth_kernel::AttentionContext`] as slices.
#[derive(Debug, Clone, Copy)]
pub struct ContextSlices<'a> {
    /// The first row of q of each sequence and, last, the end of the last one (`cu_seqlens`). Rows past it are padding.
    pub starts: &'a [u32],
    /// The same of k and v in cross attention; `None` where they have the sequences of q.
    pub kv_starts: Option<&'a [u32]>,
    /// Biases of scores by distance [heads, 2 · `max_distance` + 1].
    pub bias: Option<&'a [f32]>,
    /// Dropout of softmax weights.
    pub dropout: Option<WeightDropout<'a>>,
}

/// The rows of a sequence: of q, and of k and v.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

/// What the tasks of one head read of a [`ContextSlices`].
#[derive(Clone, Copy)]
pub(super) struct HeadContext<'a> {
    pub(super) bias: Option<&'a [f32]>,
    pub(super) dropout: Option<HeadDropout<'a>>,
}

impl<'a> ContextSlices<'a> {
    /// Attention within these sequences, without biases and dropout.
    pub const fn new(starts: &'a [u32]) -> Self {
        Self { starts, kv_starts: None, bias: None, dropout: None }
    }

    /// The sequences of k and v.
    pub(super) fn kv_starts(&self) -> &'a [u32] {
        self.kv_starts.unwrap_or(self.starts)
    }

    #[track_caller]
    pub(super) fn check(&self, dims: &AttentionDims) {
        check_heads(dims, self.bias);
        let ascends = |starts: &[u32], rows: usize| {
            let ok = starts.is_sorted() && starts.last().is_none_or(|&end| end as usize <= rows);
            assert!(ok, "starts of sequences must ascend within {rows} rows: {starts:?}");
        };
        ascends(self.starts, dims.rows);
        match self.kv_starts {
            None => check_len("rows of k", dims.kv_rows, dims.rows),
            Some(kv_starts) => {
                assert!(!dims.causal, "causal attention has the keys of its own sequences");
                ascends(kv_starts, dims.kv_rows);
                check_len("kv_starts", kv_starts.len(), self.starts.len());
            }
        }
        if let Some(dropout) = &self.dropout {
            dropout.check(dims.rows);
        }
    }

    /// What the tasks of head `head` read.
    pub(super) fn of_head(&self, dims: &AttentionDims, head: usize) -> HeadContext<'a> {
        HeadContext {
            bias: self.bias.map(|bias| bias_of_head(dims, bias, head)),
            dropout: self.dropout.map(|dropout| HeadDropout::new(dropout, head)),
        }
    }

    /// Every sequence.
    pub(super) fn sequences(&self) -> impl Iterator<Item = Sequence> {
        let ends = self.starts.windows(2).zip(self.kv_starts().windows(2));
        ends.map(|(queries, keys)| Sequence { queries: range(queries), keys: range(keys) })
    }

    /// The sequences that have queries in `rows`, and those queries.
    pub(super) fn sequences_in(&self, rows: Range<usize>) -> impl Iterator<Item = (Sequence, Range<usize>)> {
        let kv_starts = self.kv_starts();
        sequences_in(self.starts, rows).map(move |(index, queries, stage)| {
            (Sequence { queries, keys: range(&kv_starts[index..index + 2]) }, stage)
        })
    }

    /// The rows of `rows` that give zeros: those of no sequence, and queries without a key.
    pub(super) fn rows_without_keys(&self, rows: Range<usize>) -> impl Iterator<Item = usize> {
        let without = self.sequences_in(rows.clone()).filter(|(sequence, _)| sequence.keys.is_empty());
        padding_rows(self.starts, rows).chain(without.flat_map(|(_, queries)| queries))
    }
}

fn range(ends: &[u32]) -> Range<usize> {
    ends[0] as usize..ends[1] as usize
}

/// The sequences that overlap `rows`: the index and all rows of each, and those inside `rows`.
pub(super) fn sequences_in(
    starts: &[u32],
    rows: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let first = starts.partition_point(|&start| start as usize <= rows.start).saturating_sub(1);
    let near = starts[first.min(starts.len())..].windows(2);
    near.enumerate()
        .map(move |(index, ends)| (first + index, range(ends)))
        .take_while(move |(_, sequence)| sequence.start < rows.end)
        .filter_map(move |(index, sequence)| {
            let stage = sequence.start.max(rows.start)..sequence.end.min(rows.end);
            (!stage.is_empty()).then_some((index, sequence, stage))
        })
}

/// The rows of `rows` that belong to no sequence.
fn padding_rows(starts: &[u32], rows: Range<usize>) -> impl Iterator<Item = usize> {
    let first = starts.first().map_or(rows.end, |&start| start as usize);
    let end = starts.last().map_or(rows.end, |&end| end as usize);
    (rows.start..rows.end.min(first)).chain(rows.start.max(end)..rows.end)
}

/// Checks what all attention has: heads that share, a window, and the table of biases.
#[track_caller]
pub(super) fn check_heads(dims: &AttentionDims, bias: Option<&[f32]>) {
    assert!(
        dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads),
        "{} heads cannot share {} kv heads",
        dims.heads,
        dims.kv_heads
    );
    assert!(dims.window != Some(0), "a window of 0 keys leaves nothing to attend to");
    assert!(dims.window.is_none() || dims.causal, "only causal attention has a window");
    assert!(
        bias.is_some() == dims.max_distance.is_some(),
        "biases are given where the dimensions have a largest distance"
    );
    check_len("bias", bias.map_or(0, <[f32]>::len), dims.heads * dims.distances());
}

/// The biases of one head.
pub(super) fn bias_of_head<'a>(dims: &AttentionDims, bias: &'a [f32], head: usize) -> &'a [f32] {
    &bias[head * dims.distances()..][..dims.distances()]
}

/// Adds the biases of a head to the scores of one query, which are exponents of 2, for the keys from `first` on. Positions are
/// those in their sequences.
#[inline(always)]
pub(super) fn add_biases(bias: &[f32], query: usize, first: usize, scores: &mut [f32]) {
    let most = bias.len() / 2;
    let end = first + scores.len();
    // Keys before `near` are too far back, and those from `far` on too far ahead, for biases of their own.
    let near = query.saturating_sub(most).clamp(first, end);
    let far = (query + most + 1).clamp(first, end);
    let (before, rest) = scores.split_at_mut(near - first);
    let (within, after) = rest.split_at_mut(far - near);
    let add = |scores: &mut [f32], bias: f32| scores.iter_mut().for_each(|score| *score += bias * LOG2_E);
    add(before, bias[0]);
    if let Some(own) = bias.get((near + most).wrapping_sub(query)..) {
        for (score, bias) in within.iter_mut().zip(own) {
            *score += bias * LOG2_E;
        }
    }
    add(after, bias[2 * most]);
}
