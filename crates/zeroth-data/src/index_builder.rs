//! Keeps, truncates or drops each encoded row, and counts and hashes it; shared by in-memory samples and the token
//! cache.

use std::num::NonZeroU64;

use super::pack::Packs;
use super::pairs::PairLimits;
use super::sample_index::SampleIndex;
use super::totals::TargetTotals;
use super::{DataError, Encode, IGNORED, PrepareOptions, Totals, Truncation};

/// The sample index under construction: everything but the tokens.
#[derive(Debug)]
pub(super) struct IndexBuilder {
    max_length: u64,
    truncation: Truncation,
    /// Set if samples are pairs; they come truncated.
    pairs: Option<PairLimits>,
    starts: Vec<u64>,
    target_starts: Option<Vec<u64>>,
    trained: Vec<u32>,
    totals: Totals,
    hash: u64,
}

impl IndexBuilder {
    pub(super) fn new(max_length: u64, truncation: Truncation) -> Self {
        Self {
            max_length,
            truncation,
            pairs: None,
            starts: vec![0],
            target_starts: None,
            trained: Vec::new(),
            totals: Totals::default(),
            hash: FNV_OFFSET,
        }
    }

    /// The index of what an encoder makes of rows.
    pub(super) fn for_rows(encoder: &dyn Encode, options: &PrepareOptions) -> Self {
        match encoder.pairs() {
            Some(pairs) => Self::of_pairs(pairs.limits),
            None => Self::new(options.max_length, options.truncation),
        }
    }

    /// The index of pairs, which are packed within these limits.
    pub(super) fn of_pairs(limits: PairLimits) -> Self {
        let totals = Totals { targets: Some(TargetTotals::default()), ..Totals::default() };
        let hash = hashed(FNV_OFFSET, PAIRS);
        Self {
            pairs: Some(limits),
            target_starts: Some(vec![0]),
            totals,
            hash,
            ..Self::new(u64::MAX, Truncation::Drop)
        }
    }

    /// Starts the index of a part of other samples, whose tokens `whole` hashes. Rows of the whole were dropped and
    /// truncated before.
    pub(super) fn into_part(self, [too_long, truncated]: [u64; 2], whole: u64) -> Self {
        let totals = Totals { too_long, truncated, ..self.totals };
        Self { totals, hash: hashed(FNV_OFFSET, whole), ..self }
    }

    /// Adds a sample of the whole, which it is numbered by, with its tokens and labels.
    pub(super) fn add(&mut self, sample: u64, lengths: [u64; 2], trained: u64) {
        self.hash = hashed(self.hash, sample);
        self.count(lengths, trained);
    }

    fn count(&mut self, [length, labels]: [u64; 2], trained: u64) {
        self.totals.samples += 1;
        self.totals.tokens += length;
        self.totals.trained_tokens += trained;
        self.totals.longest = self.totals.longest.max(length);
        self.totals.untrained += u64::from(trained == 0);
        self.starts.push(self.starts.last().unwrap_or(&0) + length);
        self.trained.push(trained as u32);
        if let (Some(targets), Some(starts)) = (&mut self.totals.targets, &mut self.target_starts) {
            self.totals.tokens += labels;
            targets.tokens += labels;
            targets.longest = targets.longest.max(labels);
            starts.push(targets.tokens);
        }
    }

    /// Adds an encoded row and returns the tokens and labels to keep.
    pub(super) fn take_row<'a>(
        &mut self,
        ids: &'a [i32],
        labels: &'a [i32],
        cut: [usize; 2],
    ) -> Option<(&'a [i32], &'a [i32])> {
        if self.pairs.is_none() {
            return self.take(ids, labels);
        }
        self.take_pair(ids, labels, cut);
        Some((ids, labels))
    }

    /// Counts a row that is dropped without its tokens being known.
    pub(super) fn drop_too_long(&mut self) {
        self.totals.too_long += 1;
    }

    /// Trained tokens of a row's labels.
    pub(super) fn trained_tokens(&self, labels: &[i32]) -> u64 {
        if self.pairs.is_some() { trained_targets(labels) } else { trained_tokens(labels) }
    }

    /// Adds a pair, with the numbers of its truncated tokens and labels.
    ///
    /// # Panics
    /// If one side is empty or beyond its limit: readers reject or truncate such rows.
    pub(super) fn take_pair(&mut self, ids: &[i32], labels: &[i32], cut: [usize; 2]) {
        let limits = self.pairs.unwrap_or_default();
        let within = |length: usize, limit: u64| (1..=limit).contains(&(length as u64));
        assert!(
            self.pairs.is_some() && within(ids.len(), limits.source) && within(labels.len(), limits.target),
            "a pair of {} and {} tokens",
            ids.len(),
            labels.len()
        );
        self.totals.truncated += u64::from(cut != [0; 2]);
        let trained = trained_targets(labels);
        self.count([ids.len() as u64, labels.len() as u64], trained);
        for side in [ids, labels] {
            self.hash = hashed(self.hash, side.len() as u64);
            self.hash = side.iter().fold(self.hash, |hash, &id| hashed(hash, u64::from(id as u32)));
        }
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
        self.count([length; 2], trained);
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
        let edges = |starts: &[u64], sample: usize| starts[sample + 1] - starts[sample];
        let lengths = |sample: usize| {
            let length = edges(&self.starts, sample);
            [length, self.target_starts.as_ref().map_or(length, |starts| edges(starts, sample))]
        };
        let all = (0..self.trained.len()).map(lengths);
        let packs = match self.pairs {
            _ if !packing => Packs::default(),
            Some(limits) => Packs::of_pairs(all, limits),
            None => Packs::new(all.map(|[length, _]| length), max_length),
        };
        if packing {
            self.totals.packs = packs.count();
            self.hash = hashed(self.hash, packs.count());
        }
        for pack in packs.iter() {
            let length =
                |stream: usize| pack.iter().map(|sample| lengths(*sample as usize)[stream]).sum::<u64>();
            self.totals.longest_pack = self.totals.longest_pack.max(length(0));
            if let Some(targets) = &mut self.totals.targets {
                targets.longest_pack = targets.longest_pack.max(length(1));
            }
            self.totals.most_in_pack = self.totals.most_in_pack.max(pack.len() as u64);
            self.hash = hashed(self.hash, pack.len() as u64);
            self.hash = pack.iter().fold(self.hash, |hash, &sample| hashed(hash, sample));
        }
        let items = if packing { packs.count() } else { self.totals.samples };
        let count = NonZeroU64::new(items).ok_or(DataError::NothingKept { too_long, max_length })?;
        let Self { starts, target_starts, trained, totals, hash, .. } = self;
        Ok(SampleIndex { starts, target_starts, trained, packs, count, totals, hash })
    }
}

/// Trained tokens: the first label has no token before it to be predicted from.
pub(super) fn trained_tokens(labels: &[i32]) -> u64 {
    labels.iter().skip(1).filter(|&&label| label != IGNORED).count() as u64
}

/// Trained tokens of a decoder's targets: each has an input of its own.
pub(super) fn trained_targets(labels: &[i32]) -> u64 {
    labels.iter().filter(|&&label| label != IGNORED).count() as u64
}

const FNV_OFFSET: u64 = 0xCBF2_9CE4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01B3;
/// What the hash of pairs begins with: they differ from samples of the same tokens.
const PAIRS: u64 = 0x5041_4952_5300_0000; // "PAIRS"

/// FNV-1a over words instead of bytes; the shift moves high bits down, which the multiplication never does.
fn hashed(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(FNV_PRIME);
    product ^ product >> 32
}
