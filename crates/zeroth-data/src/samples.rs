//! The samples of a run, in memory or in the token cache.
//!
//! The *item* that is ordered and batched is a sample or, with packing, a pack of samples. Samples are numbered by
//! kept rows in file order, packed or not.

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::sample_index::SampleIndex;
use super::token_file::{Reject, TokenFile};
use super::{DataError, Totals};

/// The samples of a run. There is at least one, and none is empty.
#[derive(Debug, Clone)]
pub struct Samples {
    pub(super) tokens: Tokens,
    pub(super) index: Arc<SampleIndex>,
    /// For a part of the samples in a file, the tokens and labels before each; `None` if they are all of them.
    pub(super) offsets: Option<Arc<Vec<u64>>>,
}

/// For each sample its tokens, then its labels, which are as many except for pairs.
#[derive(Debug, Clone)]
pub(super) enum Tokens {
    Memory(Arc<Vec<i32>>),
    File(Arc<TokenFile>),
}

impl Samples {
    pub(super) fn in_memory(tokens: Vec<i32>, index: SampleIndex) -> Self {
        Self { tokens: Tokens::Memory(Arc::new(tokens)), index: Arc::new(index), offsets: None }
    }

    pub(super) fn of_file(file: TokenFile) -> Result<Self, Reject> {
        let index = Arc::new(file.index()?);
        Ok(Self { tokens: Tokens::File(Arc::new(file)), index, offsets: None })
    }

    /// Opens a token cache that [`prepare`](super::prepare) created. Header, sizes and index are checked; the tokens
    /// were verified when the cache was prepared.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(Reject::Io);
        let samples = file.and_then(|file| Self::of_file(TokenFile::new(file, path)?));
        samples.map_err(|reject| match reject {
            Reject::Io(source) => DataError::OpenCache { path: path.to_owned(), source },
            Reject::Damaged(why) => DataError::CacheFile { path: path.to_owned(), why },
        })
    }

    /// Number of items: packs with packing, else samples.
    pub fn count(&self) -> NonZeroU64 {
        self.index.count
    }

    /// Totals of the data.
    pub fn totals(&self) -> Totals {
        self.index.totals
    }

    /// A hash of all tokens, labels, sample order and packing, by which a checkpoint identifies its data. It does not
    /// depend on how samples are split over files.
    pub fn hash(&self) -> u64 {
        self.index.hash
    }

    /// The tokens of a sample.
    pub fn ids(&self, sample: u64) -> Result<Vec<i32>, DataError> {
        let mut ids = Vec::new();
        self.append_ids(sample, &mut ids)?;
        Ok(ids)
    }

    /// Whether samples are pairs: tokens of a source, and labels of a target.
    pub fn is_paired(&self) -> bool {
        self.index.target_starts.is_some()
    }

    /// The labels of a sample, aligned with its tokens, not shifted; of a pair, the targets of the decoder.
    pub fn labels(&self, sample: u64) -> Result<Vec<i32>, DataError> {
        let mut labels = Vec::new();
        self.append_labels(sample, 0, &mut labels)?;
        Ok(labels)
    }

    /// Appends a sample's tokens to `into`.
    pub fn append_ids(&self, sample: u64, into: &mut Vec<i32>) -> Result<(), DataError> {
        let start = self.offset(sample);
        self.append(start..start + self.sample_length(sample), sample, into)
    }

    /// Appends a sample's labels to `into`, starting at `first`.
    pub fn append_labels(&self, sample: u64, first: u64, into: &mut Vec<i32>) -> Result<(), DataError> {
        let start = self.offset(sample) + self.sample_length(sample);
        let end = start + self.label_count(sample);
        self.append((start + first).min(end)..end, sample, into)
    }

    fn append(&self, place: Range<u64>, sample: u64, into: &mut Vec<i32>) -> Result<(), DataError> {
        match &self.tokens {
            Tokens::Memory(tokens) => {
                into.extend_from_slice(&tokens[place.start as usize..place.end as usize]);
                Ok(())
            }
            Tokens::File(file) => {
                let before = into.len();
                into.resize(before + (place.end - place.start) as usize, 0);
                file.read(place.start, &mut into[before..], sample)
            }
        }
    }

    /// Tokens of a sample; of a pair, of its source.
    pub fn sample_length(&self, sample: u64) -> u64 {
        length_in(&self.index.starts, sample)
    }

    /// Labels of a sample: as many as tokens, except for pairs.
    pub fn label_count(&self, sample: u64) -> u64 {
        length_in(self.index.label_starts(), sample)
    }

    /// The samples of an item.
    pub fn members(&self, item: u64) -> impl Iterator<Item = u64> + '_ {
        let packed = self.pack(item);
        let alone = packed.is_none().then_some(item);
        alone.into_iter().chain(packed.unwrap_or_default().iter().copied())
    }

    /// Tokens of an item; of pairs, of their sources.
    pub fn length(&self, item: u64) -> u64 {
        self.members(item).map(|sample| self.sample_length(sample)).sum()
    }

    /// Tokens of an item in each of its streams: of samples, or of sources and of targets.
    pub fn stream_lengths(&self, item: u64) -> [u64; 2] {
        let targets = || self.members(item).map(|sample| self.label_count(sample)).sum();
        [self.length(item), if self.is_paired() { targets() } else { 0 }]
    }

    /// Trained tokens of an item.
    pub fn trained(&self, item: u64) -> u64 {
        self.members(item).map(|sample| u64::from(self.index.trained[sample as usize])).sum()
    }

    /// Tokens of the longest item; of pairs, of sources.
    pub fn longest(&self) -> u64 {
        self.longest_streams()[0]
    }

    /// The most tokens of an item in each of its streams.
    pub fn longest_streams(&self) -> [u64; 2] {
        let totals = self.totals();
        let targets = totals.targets.unwrap_or_default();
        if totals.packs > 0 {
            [totals.longest_pack, targets.longest_pack]
        } else {
            [totals.longest, targets.longest]
        }
    }

    /// The largest number of samples in an item.
    pub fn most_in_item(&self) -> u64 {
        self.totals().most_in_pack.max(1)
    }

    fn pack(&self, item: u64) -> Option<&[u64]> {
        let packs = &self.index.packs;
        if packs.starts.is_empty() {
            return None;
        }
        let item = item as usize;
        Some(&packs.members[packs.starts[item] as usize..packs.starts[item + 1] as usize])
    }

    /// Tokens and labels in the file before those of a sample.
    pub(super) fn offset(&self, sample: u64) -> u64 {
        match &self.offsets {
            Some(offsets) => offsets[sample as usize],
            None => self.index.starts[sample as usize] + self.index.label_starts()[sample as usize],
        }
    }
}

/// The length of a sample in prefix sums.
fn length_in(starts: &[u64], sample: u64) -> u64 {
    starts[sample as usize + 1] - starts[sample as usize]
}

/// Compares contents, wherever they are stored. Unreadable samples are never equal.
impl PartialEq for Samples {
    fn eq(&self, other: &Self) -> bool {
        let row = |samples: &Self, sample| Some((samples.ids(sample).ok()?, samples.labels(sample).ok()?));
        let same = |sample| row(self, sample).is_some_and(|own| Some(own) == row(other, sample));
        self.totals() == other.totals()
            && self.hash() == other.hash()
            && self.index.starts == other.index.starts
            && self.index.target_starts == other.index.target_starts
            && self.index.packs == other.index.packs
            && (0..self.totals().samples).all(same)
    }
}
