//! Reads all rows without stopping at invalid ones, for `zeroth data preview`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::find_files::check;
use super::index_builder::IndexBuilder;
use super::pairs::Pairs;
use super::pipeline::{BlockSizes, each_row};
use super::row_limits::MAX_TEXT_BYTES;
use super::{DataError, Encode, Encoded, PrepareOptions, RowNumber, Totals};

/// Maximum number of rows listed; the rest is only counted.
pub const LIST_LIMIT: usize = 100;
/// Maximum number of histogram bars.
const BUCKETS: u64 = 20;

/// A summary of data files.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// Rows read, including invalid ones.
    pub rows: u64,
    /// Totals that training would use, without packing.
    pub totals: Totals,
    /// Histogram of row lengths before truncation or dropping; of pairs, of their sources.
    pub lengths: Vec<LengthBucket>,
    /// Histogram of target lengths before truncation; empty without pairs.
    pub target_lengths: Vec<LengthBucket>,
    /// Set if rows are pairs.
    pub pairs: Option<Pairs>,
    /// The first valid rows.
    pub first: Vec<FirstRow>,
    /// Rows that cannot be trained on.
    pub problems: CappedList<InvalidRow>,
    /// Rows longer than `max_length`.
    pub too_long: CappedList<RowLocation>,
    /// Rows without trained tokens.
    pub untrained: CappedList<RowLocation>,
}

/// The position of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLocation {
    /// Index of its file.
    pub file: usize,
    /// Its number in the file.
    pub at: RowNumber,
}

/// An invalid row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct InvalidRow {
    pub place: RowLocation,
    pub message: String,
}

/// A row to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstRow {
    /// The file and row it comes from.
    pub place: RowLocation,
    /// Its tokens before truncation; those of pairs are truncated.
    pub row: Encoded,
}

/// The first [`LIST_LIMIT`] items, and their total count.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct CappedList<T> {
    pub count: u64,
    pub first: Vec<T>,
}

impl<T> CappedList<T> {
    fn new() -> Self {
        Self { count: 0, first: Vec::new() }
    }

    fn push(&mut self, one: impl FnOnce() -> T) {
        self.count += 1;
        if self.first.len() < LIST_LIMIT {
            self.first.push(one());
        }
    }
}

/// Rows of similar length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct LengthBucket {
    pub from: u64,
    pub to: u64,
    pub rows: u64,
    pub tokens: u64,
    pub trained_tokens: u64,
}

impl LengthBucket {
    fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.trained_tokens += other.trained_tokens;
    }
}

/// Reads and encodes all rows, and keeps the first `shown` valid ones. `packing` is ignored; `max_samples` stops
/// reading as in training.
///
/// Unreadable files are still errors.
pub fn survey(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    shown: usize,
) -> Result<Survey, DataError> {
    check(files)?;
    let mut index_builder = IndexBuilder::for_rows(encoder, options);
    let pairs = encoder.pairs();
    let mut by_length: [BTreeMap<u64, LengthBucket>; 2] = [BTreeMap::new(), BTreeMap::new()];
    let mut rows = 0;
    let mut first = Vec::new();
    let (mut problems, mut too_long, mut untrained) =
        (CappedList::new(), CappedList::new(), CappedList::new());
    let sizes = BlockSizes::for_samples(options.max_samples.map(u64::from));
    // Lengths of dropped rows are shown, so all texts that can be tokenised are.
    let skips = options.skips(MAX_TEXT_BYTES);
    each_row(files, encoder, sizes, skips, &|_, _| (), |outcome| -> Result<_, DataError> {
        rows += 1;
        let place = || RowLocation { file: outcome.file, at: outcome.at };
        let (ids, labels) = match outcome.row {
            Ok(row) => row,
            Err(problem) => {
                problems.push(|| InvalidRow { place: place(), message: problem.to_string() });
                return Ok(ControlFlow::Continue(()));
            }
        };
        if let Some(least) = outcome.skipped {
            index_builder.drop_too_long();
            too_long.push(place);
            let one = LengthBucket { from: least, to: least, rows: 1, tokens: least, trained_tokens: 0 };
            by_length[0].entry(least).or_insert(LengthBucket { rows: 0, tokens: 0, ..one }).add(&one);
            return Ok(ControlFlow::Continue(()));
        }
        let length = ids.len() as u64;
        if first.len() < shown {
            let (ids, labels) = (ids.to_vec(), labels.to_vec());
            let row = Encoded { ids, labels, cut: outcome.cut, ..Encoded::default() };
            first.push(FirstRow { place: place(), row });
        }
        if length > options.max_length && pairs.is_none() {
            too_long.push(place);
        }
        let trained_tokens = index_builder.trained_tokens(labels);
        let whole = [ids, labels].map(<[i32]>::len);
        for (stream, by_length) in by_length.iter_mut().enumerate() {
            let length = (whole[stream] + outcome.cut[stream]) as u64;
            let trained_tokens = if pairs.is_some() && stream == 0 { 0 } else { trained_tokens };
            let empty = LengthBucket { from: length, to: length, rows: 0, tokens: 0, trained_tokens: 0 };
            let bucket = by_length.entry(length).or_insert(empty);
            bucket.add(&LengthBucket { rows: 1, tokens: length, trained_tokens, ..empty });
        }
        let kept = index_builder.take_row(ids, labels, outcome.cut);
        if kept.is_some_and(|(_, labels)| index_builder.trained_tokens(labels) == 0) {
            untrained.push(place);
        }
        let enough = options.max_samples.is_some_and(|most| index_builder.kept() >= most.get());
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    let limits = pairs.map_or([options.max_length; 2], |Pairs { limits, .. }| [limits.source, limits.target]);
    let lengths = histogram(by_length[0].values(), limits[0]);
    let targets = by_length[1].values();
    let target_lengths = if pairs.is_some() { histogram(targets, limits[1]) } else { Vec::new() };
    let totals = index_builder.totals();
    Ok(Survey { rows, totals, lengths, target_lengths, pairs, first, problems, too_long, untrained })
}

/// At most 20 buckets of equal width up to the longest row within `max_length`, and one for all longer rows. The
/// first and last are not empty.
fn histogram<'a>(by_length: impl Iterator<Item = &'a LengthBucket>, max_length: u64) -> Vec<LengthBucket> {
    let (within, beyond): (Vec<&LengthBucket>, Vec<&LengthBucket>) =
        by_length.partition(|found| found.to <= max_length);
    let width = round_width(within.last().map_or(1, |longest| longest.to).div_ceil(BUCKETS));
    let number = |found: &LengthBucket| (found.from - 1) / width;
    let mut buckets: Vec<LengthBucket> = Vec::new();
    if let (Some(shortest), Some(longest)) = (within.first(), within.last()) {
        for at in number(shortest)..=number(longest) {
            let (from, to) = (at * width + 1, ((at + 1) * width).min(max_length));
            buckets.push(LengthBucket { from, to, rows: 0, tokens: 0, trained_tokens: 0 });
        }
        for found in &within {
            buckets[(number(found) - number(shortest)) as usize].add(found);
        }
    }
    if let (Some(shortest), Some(longest)) = (beyond.first(), beyond.last()) {
        let mut all = LengthBucket { from: max_length + 1, to: longest.to, ..**shortest };
        beyond[1..].iter().for_each(|found| all.add(found));
        buckets.push(all);
    }
    buckets
}

/// The next value of 1, 2, 5, 10, 20, 50, …
fn round_width(at_least: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        if let Some(step) = [1, 2, 5].into_iter().find(|step| step * power >= at_least) {
            return step * power;
        }
        power *= 10;
    }
}
