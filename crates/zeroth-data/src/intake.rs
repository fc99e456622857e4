//! What becomes of each row that was encoded: kept, cut or left out, counted and hashed. The same in memory and on the
//! way to the token cache.

use std::num::NonZeroU64;

use super::pack::Packs;
use super::samples::Samples;
use super::{DataError, IGNORED, Totals};

/// What is done with rows longer than `--max-length`, by the names of ms-swift.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Truncation {
    /// They are left out and counted.
    #[default]
    Drop,
    /// Their beginning is cut off.
    Left,
    /// Their end is cut off.
    Right,
}

/// All of the samples but their tokens.
#[derive(Debug)]
pub(super) struct Intake {
    max_length: u64,
    truncation: Truncation,
    starts: Vec<u64>,
    trained: Vec<u32>,
    totals: Totals,
    hash: u64,
}

/// An [`Intake`] that is complete.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) starts: Vec<u64>,
    pub(super) trained: Vec<u32>,
    pub(super) packs: Packs,
    pub(super) count: NonZeroU64,
    pub(super) totals: Totals,
    pub(super) hash: u64,
}

impl Intake {
    pub(super) fn new(max_length: u64, truncation: Truncation) -> Self {
        let (starts, trained) = (vec![0], Vec::new());
        Self { max_length, truncation, starts, trained, totals: Totals::default(), hash: FNV_OFFSET }
    }

    /// Takes a sample and says which of its tokens are kept. Tokens and labels are equally many, and at least one.
    ///
    /// # Panics
    /// Where they are not: readers refuse such rows.
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
        self.totals.samples += 1;
        self.totals.tokens += length;
        self.totals.trained_tokens += trained;
        self.totals.longest = self.totals.longest.max(length);
        self.totals.untrained += u64::from(trained == 0);
        self.hash = hashed(self.hash, length);
        for (&id, &label) in ids.iter().zip(labels) {
            self.hash = hashed(self.hash, u64::from(id as u32) << 32 | u64::from(label as u32));
        }
        self.starts.push(self.totals.tokens);
        self.trained.push(trained as u32);
        Some((ids, labels))
    }

    /// Samples kept so far.
    pub(super) fn kept(&self) -> u64 {
        self.totals.samples
    }

    /// Everything counted so far.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// Ends it, packed if so asked; an error where nothing was kept.
    pub(super) fn finish(mut self, packing: bool) -> Result<Index, DataError> {
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
        Ok(Index { starts, trained, packs, count, totals, hash })
    }
}

/// Labels that are trained: the first has no token before it.
pub(super) fn trained_tokens(labels: &[i32]) -> u64 {
    labels.iter().skip(1).filter(|&&label| label != IGNORED).count() as u64
}

/// Puts samples together in memory, one after the other.
#[derive(Debug)]
pub struct SamplesBuilder {
    intake: Intake,
    tokens: Vec<i32>,
    packing: bool,
}

impl SamplesBuilder {
    /// Samples longer than `max_length` will be left out and counted.
    pub fn new(max_length: u64) -> Self {
        Self::with(max_length, Truncation::Drop, false)
    }

    /// Samples longer than `max_length` will be left out or cut, and joined into packs of that length if so asked.
    pub fn with(max_length: u64, truncation: Truncation, packing: bool) -> Self {
        Self { intake: Intake::new(max_length, truncation), tokens: Vec::new(), packing }
    }

    /// Takes a sample. Tokens and labels are equally many, and at least one.
    ///
    /// # Panics
    /// Where they are not: readers refuse such rows.
    pub fn push(&mut self, ids: &[i32], labels: &[i32]) {
        if let Some((ids, labels)) = self.intake.take(ids, labels) {
            self.tokens.extend_from_slice(ids);
            self.tokens.extend_from_slice(labels);
        }
    }

    /// Samples kept so far.
    pub fn kept(&self) -> u64 {
        self.intake.kept()
    }

    /// The samples, where at least one was kept.
    pub fn finish(self) -> Result<Samples, DataError> {
        let index = self.intake.finish(self.packing)?;
        let mut tokens = self.tokens;
        tokens.shrink_to_fit();
        Ok(Samples::in_memory(tokens, index))
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
        let expected = Totals {
            samples: 3,
            tokens: 6,
            trained_tokens: 1,
            longest: 3,
            too_long: 1,
            untrained: 2,
            ..Totals::default()
        };
        assert_eq!(samples.totals(), expected);
        assert_eq!(
            samples.totals().notes(4),
            [
                "1 row was left out: more than 4 tokens (--max-length)",
                "2 rows train nothing: every label after the first is -100"
            ]
        );
        assert!(built(&rows[..1], 4).unwrap().totals().notes(4).is_empty());
        assert_eq!((samples.ids(2).unwrap(), samples.labels(2).unwrap()), (vec![9, 9], vec![9, -100]));
        assert_eq!([0, 1, 2].map(|sample| samples.length(sample)), [3, 1, 2]);
        assert_eq!([0, 1, 2].map(|sample| samples.trained(sample)), [1, 0, 0]);
    }

    #[test]
    fn a_dataset_of_rows_that_are_all_too_long_is_refused_with_the_count() {
        let error = built(&[(&[1, 2], &[1, 2]), (&[1, 2, 3], &[1, 2, 3])], 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no sample is left: all 2 rows have more than 1 token; raise --max-length, or cut rows with --truncation-strategy"
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
