//! Keeps, truncates or drops each encoded row, and counts and hashes it; shared by in-memory samples and the token
//! cache.

use std::num::NonZeroU64;

use super::pack::Packs;
use super::sample_index::SampleIndex;
use super::{DataError, IGNORED, Totals, Truncation};

/// The sample index under construction: everything but the tokens.
#[derive(Debug)]
pub(super) struct IndexBuilder {
    max_length: u64,
    truncation: Truncation,
    starts: Vec<u64>,
    trained: Vec<u32>,
    totals: Totals,
    hash: u64,
}

impl IndexBuilder {
    pub(super) fn new(max_length: u64, truncation: Truncation) -> Self {
        let (starts, trained) = (vec![0], Vec::new());
        Self { max_length, truncation, starts, trained, totals: Totals::default(), hash: FNV_OFFSET }
    }

    /// Starts the index of a part of other samples, whose tokens `whole` hashes.
    pub(super) fn of_part(max_length: u64, truncation: Truncation, totals: Totals, whole: u64) -> Self {
        Self { totals, hash: hashed(FNV_OFFSET, whole), ..Self::new(max_length, truncation) }
    }

    /// Adds a sample of the whole, which it is numbered by.
    pub(super) fn add(&mut self, sample: u64, length: u64, trained: u64) {
        self.hash = hashed(self.hash, sample);
        self.count(length, trained);
    }

    fn count(&mut self, length: u64, trained: u64) {
        self.totals.samples += 1;
        self.totals.tokens += length;
        self.totals.trained_tokens += trained;
        self.totals.longest = self.totals.longest.max(length);
        self.totals.untrained += u64::from(trained == 0);
        self.starts.push(self.totals.tokens);
        self.trained.push(trained as u32);
    }

    /// Adds a sample and returns the tokens to keep. Tokens and labels have the same length, at least one.
    ///
    /// # Panics
    /// If they do not: readers reject such rows.
    pub(super) fn take<'a>(&mut self, ids: &'a [i32], labels: &'a [i32]) -> Option<(&'a [i32], &'a [i32])> {
        assert!(
            !ids.is_empty() && ids.len() == labels.len(),
            "{} tokens, {} labels",
            ids.len(),
            labels.len()
        );
        let (mut ids, mut labels) = (ids, labels);
        let beyond = (ids.len() as u64).saturating_sub(self.max_length) as usize;
        if beyond > 0 {
            let kept = match self.truncation {
                Truncation::Left => beyond..ids.len(),
                Truncation::Right => 0..ids.len() - beyond,
                Truncation::Drop => 0..0,
            };
            if kept.is_empty() {
                self.totals.too_long += 1;
                return None;
            }
            self.totals.truncated += 1;
            (ids, labels) = (&ids[kept.clone()], &labels[kept]);
        }
        let length = ids.len() as u64;
        let trained = trained_tokens(labels);
        self.count(length, trained);
        self.hash = hashed(self.hash, length);
        for (&id, &label) in ids.iter().zip(labels) {
            self.hash = hashed(self.hash, u64::from(id as u32) << 32 | u64::from(label as u32));
        }
        Some((ids, labels))
    }

    /// Samples kept so far.
    pub(super) fn kept(&self) -> u64 {
        self.totals.samples
    }

    /// Totals so far.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// Completes the index, packed if requested; an error if nothing was kept.
    pub(super) fn finish(mut self, packing: bool) -> Result<SampleIndex, DataError> {
        let (too_long, max_length) = (self.totals.too_long, self.max_length);
        let lengths = || self.starts.windows(2).map(|edges| edges[1] - edges[0]);
        let packs = if packing { Packs::new(lengths(), max_length) } else { Packs::default() };
        if packing {
            self.totals.packs = packs.count();
            self.hash = hashed(self.hash, packs.count());
        }
        for pack in packs.iter() {
            let length = |&sample: &u64| self.starts[sample as usize + 1] - self.starts[sample as usize];
            self.totals.longest_pack = self.totals.longest_pack.max(pack.iter().map(length).sum());
            self.totals.most_in_pack = self.totals.most_in_pack.max(pack.len() as u64);
            self.hash = hashed(self.hash, pack.len() as u64);
            self.hash = pack.iter().fold(self.hash, |hash, &sample| hashed(hash, sample));
        }
        let units = if packing { packs.count() } else { self.totals.samples };
        let count = NonZeroU64::new(units).ok_or(DataError::NothingKept { too_long, max_length })?;
        let Self { starts, trained, totals, hash, .. } = self;
        Ok(SampleIndex { starts, trained, packs, count, totals, hash })
    }
}

/// Trained tokens: the first label has no token before it to be predicted from.
pub(super) fn trained_tokens(labels: &[i32]) -> u64 {
    labels.iter().skip(1).filter(|&&label| label != IGNORED).count() as u64
}

const FNV_OFFSET: u64 = 0xCBF2_9CE4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01B3;

/// FNV-1a over words instead of bytes; the shift moves high bits down, which the multiplication never does.
fn hashed(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(FNV_PRIME);
    product ^ product >> 32
}
