//! A look at all rows of some files that does not stop at wrong ones: what `zeroth data preview` shows.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::intake::{Intake, trained_tokens};
use super::lines::check;
use super::pipeline::{Cuts, each_row};
use super::{DataError, Encode, Encoded, PrepareOptions, RowNumber, Totals};

/// Rows listed by number; beyond that they are only counted.
pub const LISTED: usize = 100;
/// Bars of the histogram, at most.
const BUCKETS: u64 = 20;

/// What some files hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// Rows read, wrong ones included.
    pub rows: u64,
    /// What training would take of them; rows are not packed for this.
    pub totals: Totals,
    /// How long the rows are, as they are before any is cut or left out.
    pub lengths: Vec<Bucket>,
    /// The first good rows.
    pub first: Vec<FirstRow>,
    /// Rows that are wrong.
    pub problems: Listed<Problem>,
    /// Rows longer than `max_length`.
    pub too_long: Listed<RowPlace>,
    /// Rows that would train nothing.
    pub untrained: Listed<RowPlace>,
}

/// Where a row is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPlace {
    /// Which of the files, counted from 0.
    pub file: usize,
    /// Its number there.
    pub at: RowNumber,
}

/// A row that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where it is.
    pub place: RowPlace,
    /// What is wrong with it.
    pub message: String,
}

/// A row to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstRow {
    /// Where it is.
    pub place: RowPlace,
    /// What it becomes, before it is cut or left out.
    pub row: Encoded,
}

/// The first [`LISTED`] of something, and how many there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// All of them.
    pub count: u64,
    /// The first.
    pub first: Vec<T>,
}

impl<T> Listed<T> {
    fn new() -> Self {
        Self { count: 0, first: Vec::new() }
    }

    fn push(&mut self, one: impl FnOnce() -> T) {
        self.count += 1;
        if self.first.len() < LISTED {
            self.first.push(one());
        }
    }
}

/// Rows of about one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// The least tokens of a row in it.
    pub from: u64,
    /// The most.
    pub to: u64,
    /// How many there are.
    pub rows: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Those that are trained.
    pub trained_tokens: u64,
}

impl Bucket {
    fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.trained_tokens += other.trained_tokens;
    }
}

/// Reads and encodes all rows, wrong ones too; `shown` good ones are kept as they are. `packing` is not looked at, and
/// `max_samples` ends it as it ends training.
///
/// Files that cannot be read are errors all the same.
pub fn survey(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    shown: usize,
) -> Result<Survey, DataError> {
    check(files)?;
    let mut intake = Intake::new(options.max_length, options.truncation);
    let mut by_length: BTreeMap<u64, Bucket> = BTreeMap::new();
    let mut rows = 0;
    let mut first = Vec::new();
    let (mut problems, mut too_long, mut untrained) = (Listed::new(), Listed::new(), Listed::new());
    let cuts = Cuts::for_samples(options.max_samples.map(u64::from));
    each_row(files, encoder, cuts, &|_, _| (), |outcome| -> Result<_, DataError> {
        rows += 1;
        let place = || RowPlace { file: outcome.file, at: outcome.at };
        let (ids, labels) = match outcome.row {
            Ok(row) => row,
            Err(problem) => {
                problems.push(|| Problem { place: place(), message: problem.to_string() });
                return Ok(ControlFlow::Continue(()));
            }
        };
        let length = ids.len() as u64;
        if first.len() < shown {
            let row = Encoded { ids: ids.to_vec(), labels: labels.to_vec() };
            first.push(FirstRow { place: place(), row });
        }
        if length > options.max_length {
            too_long.push(place);
        }
        let empty = Bucket { from: length, to: length, rows: 0, tokens: 0, trained_tokens: 0 };
        let bucket = by_length.entry(length).or_insert(empty);
        bucket.add(&Bucket { rows: 1, tokens: length, trained_tokens: trained_tokens(labels), ..empty });
        let kept = intake.take(ids, labels);
        if kept.is_some_and(|(_, labels)| trained_tokens(labels) == 0) {
            untrained.push(place);
        }
        let enough = options.max_samples.is_some_and(|most| intake.kept() >= most.get());
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    let lengths = histogram(by_length.values(), options.max_length);
    Ok(Survey { rows, totals: intake.totals(), lengths, first, problems, too_long, untrained })
}

/// At most 20 equally wide buckets up to the longest row within `max_length`, and one for all rows beyond it. They are in
/// order, and the first and the last are not empty.
fn histogram<'a>(by_length: impl Iterator<Item = &'a Bucket>, max_length: u64) -> Vec<Bucket> {
    let (within, beyond): (Vec<&Bucket>, Vec<&Bucket>) = by_length.partition(|found| found.to <= max_length);
    let width = round_width(within.last().map_or(1, |longest| longest.to).div_ceil(BUCKETS));
    let number = |found: &Bucket| (found.from - 1) / width;
    let mut buckets: Vec<Bucket> = Vec::new();
    if let (Some(shortest), Some(longest)) = (within.first(), within.last()) {
        for at in number(shortest)..=number(longest) {
            let (from, to) = (at * width + 1, ((at + 1) * width).min(max_length));
            buckets.push(Bucket { from, to, rows: 0, tokens: 0, trained_tokens: 0 });
        }
        for found in &within {
            buckets[(number(found) - number(shortest)) as usize].add(found);
        }
    }
    if let (Some(shortest), Some(longest)) = (beyond.first(), beyond.last()) {
        let mut all = Bucket { from: max_length + 1, to: longest.to, ..**shortest };
        beyond[1..].iter().for_each(|found| all.add(found));
        buckets.push(all);
    }
    buckets
}

/// The next of 1, 2, 5, 10, 20, 50, …
fn round_width(at_least: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        if let Some(step) = [1, 2, 5].into_iter().find(|step| step * power >= at_least) {
            return step * power;
        }
        power *= 10;
    }
}
