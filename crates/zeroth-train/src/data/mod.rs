//! The samples of a run, all of them in memory as tokens and labels end to end.
//!
//! A format of rows is a file beside this one that turns a row into tokens and labels and hands them to
//! [`SamplesBuilder`]; today that is [`read_ready_tokens`].

mod assistant;
mod chat_template;
mod columns;
mod conversation;
mod day;
mod encode;
mod encoder;
mod error;
mod lines;
mod python;
mod ready;
mod ready_row;
mod row;
mod row_problem;
mod tokenizer;

use std::num::NonZeroU64;

pub use columns::{Columns, ColumnsError};
pub use day::{Day, DayError};
pub use encode::{Encode, Encoded};
pub use encoder::{Encoder, EncoderError, EncoderOptions};
pub use error::DataError;
pub use ready::{ReadOptions, read_ready_tokens};
pub use row_problem::{MessageProblem, RowProblem};
use zeroth_base::grouped;

/// A label that is not trained, as in PyTorch and Hugging Face.
pub const IGNORED: i32 = -100;

/// The samples of a run. There is at least one, and none is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Samples {
    ids: Vec<i32>,
    labels: Vec<i32>,
    /// Where each sample begins in `ids` and `labels`, and, last, where the last one ends.
    starts: Vec<u64>,
    /// Trained tokens of each sample.
    trained: Vec<u32>,
    count: NonZeroU64,
    totals: Totals,
    hash: u64,
}

/// What was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Samples kept.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that have a label, after the shift by one: the first label of a sample has no token before it.
    pub trained_tokens: u64,
    /// Tokens of the longest sample.
    pub longest: u64,
    /// Rows left out because they are longer than --max-length.
    pub too_long: u64,
    /// Samples kept that train nothing: all their labels are -100, or they have one token.
    pub untrained: u64,
}

impl Totals {
    /// What of it a user should hear, a sentence each.
    pub fn notes(&self, max_length: u64) -> Vec<String> {
        let rows = |count: u64, one: &str, many: &str| match count {
            1 => format!("1 row {one}"),
            _ => format!("{} rows {many}", grouped(count)),
        };
        let mut notes = Vec::new();
        if self.too_long > 0 {
            let left_out = rows(self.too_long, "was left out", "were left out");
            notes.push(format!("{left_out}: more than {} tokens (--max-length)", grouped(max_length)));
        }
        if self.untrained > 0 {
            let trains = rows(self.untrained, "trains nothing", "train nothing");
            notes.push(format!("{trains}: every label after the first is {IGNORED}"));
        }
        notes
    }
}

impl Samples {
    /// How many there are.
    pub fn count(&self) -> NonZeroU64 {
        self.count
    }

    /// What was read.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// A number that changes with any token, label, or order of samples: a checkpoint knows its data by it. It does
    /// not depend on how the samples are spread over files.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The tokens of a sample.
    pub fn ids(&self, sample: u64) -> &[i32] {
        &self.ids[self.range(sample)]
    }

    /// The labels of a sample, as given: aligned with its tokens, not shifted.
    pub fn labels(&self, sample: u64) -> &[i32] {
        &self.labels[self.range(sample)]
    }

    /// How many tokens a sample has.
    pub fn length(&self, sample: u64) -> u64 {
        let range = self.range(sample);
        (range.end - range.start) as u64
    }

    /// How many of its tokens are trained.
    pub fn trained(&self, sample: u64) -> u64 {
        u64::from(self.trained[sample as usize])
    }

    fn range(&self, sample: u64) -> std::ops::Range<usize> {
        let sample = sample as usize;
        self.starts[sample] as usize..self.starts[sample + 1] as usize
    }
}

/// Puts samples together, one after the other.
#[derive(Debug)]
pub struct SamplesBuilder {
    max_length: u64,
    ids: Vec<i32>,
    labels: Vec<i32>,
    starts: Vec<u64>,
    trained: Vec<u32>,
    totals: Totals,
    hash: u64,
}

impl SamplesBuilder {
    /// Samples longer than `max_length` will be left out and counted.
    pub fn new(max_length: u64) -> Self {
        Self {
            max_length,
            ids: Vec::new(),
            labels: Vec::new(),
            starts: vec![0],
            trained: Vec::new(),
            totals: Totals::default(),
            hash: FNV_OFFSET,
        }
    }

    /// Takes a sample. Tokens and labels are equally many, and at least one.
    ///
    /// # Panics
    /// Where they are not: readers refuse such rows.
    pub fn push(&mut self, ids: &[i32], labels: &[i32]) {
        assert!(
            !ids.is_empty() && ids.len() == labels.len(),
            "{} tokens, {} labels",
            ids.len(),
            labels.len()
        );
        let length = ids.len() as u64;
        if length > self.max_length {
            self.totals.too_long += 1;
            return;
        }
        let trained = labels[1..].iter().filter(|&&label| label != IGNORED).count();
        self.totals.samples += 1;
        self.totals.tokens += length;
        self.totals.trained_tokens += trained as u64;
        self.totals.longest = self.totals.longest.max(length);
        self.totals.untrained += u64::from(trained == 0);
        self.hash = hashed(self.hash, length);
        for (&id, &label) in ids.iter().zip(labels) {
            self.hash = hashed(self.hash, u64::from(id as u32) << 32 | u64::from(label as u32));
        }
        self.ids.extend_from_slice(ids);
        self.labels.extend_from_slice(labels);
        self.starts.push(self.ids.len() as u64);
        self.trained.push(trained as u32);
    }

    /// Samples kept so far.
    pub fn kept(&self) -> u64 {
        self.totals.samples
    }

    /// The samples, where at least one was kept.
    pub fn finish(mut self) -> Result<Samples, DataError> {
        let Some(count) = NonZeroU64::new(self.totals.samples) else {
            return Err(DataError::NothingKept {
                too_long: self.totals.too_long,
                max_length: self.max_length,
            });
        };
        self.ids.shrink_to_fit();
        self.labels.shrink_to_fit();
        let Self { ids, labels, starts, trained, totals, hash, .. } = self;
        Ok(Samples { ids, labels, starts, trained, count, totals, hash })
    }
}

const FNV_OFFSET: u64 = 0xCBF2_9CE4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01B3;

/// FNV-1a by words instead of bytes; the shift brings high bits down, which a product alone never does.
fn hashed(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(FNV_PRIME);
    product ^ product >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(rows: &[(&[i32], &[i32])], max_length: u64) -> Result<Samples, DataError> {
        let mut builder = SamplesBuilder::new(max_length);
        for (ids, labels) in rows {
            builder.push(ids, labels);
        }
        builder.finish()
    }

    #[test]
    fn totals_count_what_is_kept_and_what_is_not() {
        let rows: &[(&[i32], &[i32])] = &[
            (&[5, 6, 7], &[5, -100, 7]), // the first label has no token before it
            (&[1, 2, 3, 4, 5], &[1, 2, 3, 4, 5]),
            (&[8], &[8]),
            (&[9, 9], &[9, -100]),
        ];
        let samples = built(rows, 4).unwrap();
        let expected =
            Totals { samples: 3, tokens: 6, trained_tokens: 1, longest: 3, too_long: 1, untrained: 2 };
        assert_eq!(samples.totals(), expected);
        assert_eq!(
            samples.totals().notes(4),
            [
                "1 row was left out: more than 4 tokens (--max-length)",
                "2 rows train nothing: every label after the first is -100"
            ]
        );
        assert!(built(&rows[..1], 4).unwrap().totals().notes(4).is_empty());
        assert_eq!((samples.ids(2), samples.labels(2)), (&[9, 9][..], &[9, -100][..]));
        assert_eq!([0, 1, 2].map(|sample| samples.length(sample)), [3, 1, 2]);
        assert_eq!([0, 1, 2].map(|sample| samples.trained(sample)), [1, 0, 0]);
    }

    #[test]
    fn a_dataset_of_rows_that_are_all_too_long_is_refused_with_the_count() {
        let error = built(&[(&[1, 2], &[1, 2]), (&[1, 2, 3], &[1, 2, 3])], 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no sample is left: all 2 rows have more than 1 token; raise --max-length"
        );
    }

    #[test]
    fn the_hash_knows_tokens_labels_edges_and_order() {
        let hash = |rows: &[(&[i32], &[i32])]| built(rows, 9).unwrap().hash();
        let hashes = [
            hash(&[(&[1, 2], &[1, 2]), (&[3], &[3])]),
            hash(&[(&[1], &[1]), (&[2, 3], &[2, 3])]),
            hash(&[(&[3], &[3]), (&[1, 2], &[1, 2])]),
            hash(&[(&[1, 2], &[1, -100]), (&[3], &[3])]),
            hash(&[(&[1, 4], &[1, 2]), (&[3], &[3])]),
            hash(&[(&[1, 2], &[1, 2])]),
        ];
        for (index, one) in hashes.iter().enumerate() {
            assert!(!hashes[..index].contains(one), "{index}");
        }
        assert_eq!(hashes[0], hash(&[(&[1, 2], &[1, 2]), (&[3], &[3]), (&[0; 10], &[0; 10])]));
    }
}
