//! The samples of a run, in memory or in the memory-mapped token cache.
//!
//! What is ordered and batched is a *unit*: a sample, or, where samples are packed, a pack of them. Samples keep their
//! own numbers, those of the rows kept in file order, whether they are packed or not.

use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::token_file::{Reject, TokenFile};
use super::{DataError, Totals};

/// The samples of a run. There is at least one, and none is empty.
#[derive(Debug, Clone)]
pub struct Samples {
    store: Store,
    count: NonZeroU64,
    totals: Totals,
    hash: u64,
}

#[derive(Debug, Clone)]
enum Store {
    Memory(Parts),
    Mapped(Arc<TokenFile>),
}

/// What samples consist of.
#[derive(Debug, Clone, Default)]
pub(super) struct Parts {
    /// Of each sample its tokens, then its labels.
    pub(super) tokens: Vec<i32>,
    /// Tokens before each sample and, last, all of them.
    pub(super) starts: Vec<u64>,
    /// Trained tokens of each sample.
    pub(super) trained: Vec<u32>,
    /// Samples before each pack and, last, all of them; empty without packing.
    pub(super) pack_starts: Vec<u64>,
    /// The samples of each pack, pack after pack; empty without packing.
    pub(super) members: Vec<u64>,
}

impl Samples {
    pub(super) fn in_memory(parts: Parts, count: NonZeroU64, totals: Totals, hash: u64) -> Self {
        Self { store: Store::Memory(parts), count, totals, hash }
    }

    pub(super) fn mapped(file: TokenFile) -> Self {
        let (count, totals, hash) = (file.count(), file.totals(), file.hash());
        Self { store: Store::Mapped(Arc::new(file)), count, totals, hash }
    }

    /// Opens a token cache that [`prepare`](super::prepare) left at `path`. Its header and sizes are checked; its body
    /// was, by whoever prepared it.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = TokenFile::open(path).map_err(|reject| match reject {
            Reject::Io(source) => DataError::OpenCache { path: path.to_owned(), source },
            Reject::Damaged(why) => DataError::CacheFile { path: path.to_owned(), why },
        })?;
        Ok(Self::mapped(file))
    }

    /// How many units there are: packs where samples are packed, else samples.
    pub fn count(&self) -> NonZeroU64 {
        self.count
    }

    /// What was read.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// A number that changes with any token, label, order of samples, or packing: a checkpoint knows its data by it. It
    /// does not depend on how the samples are spread over files.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The tokens of a sample.
    pub fn ids(&self, sample: u64) -> &[i32] {
        let range = self.range(sample);
        &self.tokens()[2 * range.start..range.start + range.end]
    }

    /// The labels of a sample, as given: aligned with its tokens, not shifted.
    pub fn labels(&self, sample: u64) -> &[i32] {
        let range = self.range(sample);
        &self.tokens()[range.start + range.end..2 * range.end]
    }

    /// The samples of a unit.
    pub fn members(&self, unit: u64) -> impl Iterator<Item = u64> + '_ {
        let packed = self.pack(unit);
        let alone = packed.is_none().then_some(unit);
        alone.into_iter().chain(packed.unwrap_or_default().iter().copied())
    }

    /// How many tokens a unit has.
    pub fn length(&self, unit: u64) -> u64 {
        self.members(unit).map(|sample| self.range(sample).len() as u64).sum()
    }

    /// How many of its tokens are trained.
    pub fn trained(&self, unit: u64) -> u64 {
        self.members(unit).map(|sample| u64::from(self.trained_counts()[sample as usize])).sum()
    }

    /// Tokens of the longest unit.
    pub fn longest(&self) -> u64 {
        if self.totals.packs > 0 { self.totals.longest_pack } else { self.totals.longest }
    }

    /// Samples of the unit that has most of them.
    pub fn most_in_unit(&self) -> u64 {
        self.totals.most_in_pack.max(1)
    }

    fn pack(&self, unit: u64) -> Option<&[u64]> {
        let starts = self.pack_starts();
        if starts.is_empty() {
            return None;
        }
        let unit = unit as usize;
        Some(&self.pack_members()[starts[unit] as usize..starts[unit + 1] as usize])
    }

    fn range(&self, sample: u64) -> Range<usize> {
        let (starts, sample) = (self.starts(), sample as usize);
        starts[sample] as usize..starts[sample + 1] as usize
    }

    fn tokens(&self) -> &[i32] {
        match &self.store {
            Store::Memory(parts) => &parts.tokens,
            Store::Mapped(file) => file.tokens(),
        }
    }

    fn starts(&self) -> &[u64] {
        match &self.store {
            Store::Memory(parts) => &parts.starts,
            Store::Mapped(file) => file.starts(),
        }
    }

    fn trained_counts(&self) -> &[u32] {
        match &self.store {
            Store::Memory(parts) => &parts.trained,
            Store::Mapped(file) => file.trained(),
        }
    }

    fn pack_starts(&self) -> &[u64] {
        match &self.store {
            Store::Memory(parts) => &parts.pack_starts,
            Store::Mapped(file) => file.pack_starts(),
        }
    }

    fn pack_members(&self) -> &[u64] {
        match &self.store {
            Store::Memory(parts) => &parts.members,
            Store::Mapped(file) => file.members(),
        }
    }
}

/// Equal contents, wherever they are kept.
impl PartialEq for Samples {
    fn eq(&self, other: &Self) -> bool {
        self.totals == other.totals
            && self.hash == other.hash
            && self.starts() == other.starts()
            && self.pack_starts() == other.pack_starts()
            && self.pack_members() == other.pack_members()
            && self.tokens() == other.tokens()
    }
}

impl Eq for Samples {}
