//! Holds out part of the samples for evaluation. Both parts read the same tokens; only the index is divided.

use std::num::NonZeroU64;
use std::sync::Arc;

use super::index_builder::IndexBuilder;
use super::pairs::PairLimits;
use super::{DataError, Samples, Totals, Truncation};

/// How the remaining samples are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    Off,
    /// Into packs of at most this number of tokens.
    UpTo(NonZeroU64),
    /// Pairs, into packs of at most these numbers of source and target tokens.
    Pairs(PairLimits),
}

impl Samples {
    /// Divides unpacked samples into those that are kept and those held out, both in file order. `is_held_out` is
    /// called once for each sample. An error if either part is empty.
    pub fn hold_out(
        &self,
        packing: Packing,
        mut is_held_out: impl FnMut(u64) -> bool,
    ) -> Result<(Self, Self), DataError> {
        debug_assert_eq!(self.totals().packs, 0, "packs are made of what remains");
        let (held_out, kept): (Vec<u64>, Vec<u64>) =
            (0..self.totals().samples).partition(|sample| is_held_out(*sample));
        // The counts of dropped and truncated rows are about the whole file.
        let Totals { too_long, truncated, .. } = self.totals();
        let of_file = [too_long, truncated];
        Ok((self.part(&kept, packing, of_file)?, self.part(&held_out, Packing::Off, [0; 2])?))
    }

    /// Whether others of the same file were held out, or these.
    pub fn is_part(&self) -> bool {
        self.offsets.is_some()
    }

    /// Bytes per sample that only a part has: where its tokens are.
    pub fn part_bytes(&self) -> u64 {
        if self.is_part() { size_of::<u64>() as u64 } else { 0 }
    }

    fn part(&self, samples: &[u64], packing: Packing, of_file: [u64; 2]) -> Result<Self, DataError> {
        let builder = match packing {
            Packing::Pairs(limits) => IndexBuilder::of_pairs(limits),
            _ if self.is_paired() => {
                IndexBuilder::of_pairs(PairLimits { source: u64::MAX, target: u64::MAX })
            }
            Packing::Off => IndexBuilder::new(u64::MAX, Truncation::Drop),
            Packing::UpTo(limit) => IndexBuilder::new(limit.get(), Truncation::Drop),
        };
        let mut builder = builder.into_part(of_file, self.hash());
        for &sample in samples {
            let lengths = [self.sample_length(sample), self.label_count(sample)];
            builder.add(sample, lengths, self.trained(sample));
        }
        let index = Arc::new(builder.finish(packing != Packing::Off)?);
        let offsets = samples.iter().map(|sample| self.offset(*sample)).collect();
        Ok(Self { tokens: self.tokens.clone(), index, offsets: Some(Arc::new(offsets)) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::SamplesBuilder;
    use super::*;

    #[test]
    fn parts_have_the_rows_of_the_whole() {
        let mut whole = SamplesBuilder::new(9);
        for row in 0..7 {
            let ids: Vec<i32> = (0..=row % 3).map(|at| 10 * row + at).collect();
            whole.push(&ids, &ids);
        }
        whole.push(&[0; 10], &[0; 10]);
        let whole = whole.finish().unwrap();
        let part =
            |held_out: &[u64], packing| whole.hold_out(packing, |sample| held_out.contains(&sample)).unwrap();
        let (kept, held_out) = part(&[1, 5], Packing::Off);
        assert_eq!((kept.count().get(), held_out.count().get()), (5, 2));
        for (found, expected) in [0, 2, 3, 4, 6].into_iter().enumerate() {
            assert_eq!(kept.ids(found as u64).unwrap(), whole.ids(expected).unwrap());
            assert_eq!(kept.labels(found as u64).unwrap(), whole.labels(expected).unwrap());
            assert_eq!(kept.trained(found as u64), whole.trained(expected));
        }
        assert_eq!(held_out.ids(1).unwrap(), whole.ids(5).unwrap());
        assert_eq!(held_out.totals().tokens, 2 + 3);
        assert_eq!((kept.totals().too_long, held_out.totals().too_long), (1, 0));
        // A part of a part.
        let (rest, _) = kept.hold_out(Packing::Off, |sample| sample == 0).unwrap();
        assert_eq!(rest.ids(0).unwrap(), whole.ids(2).unwrap());
        // Packs hold what remains.
        let (packed, _) = part(&[1, 5], Packing::UpTo(NonZeroU64::new(4).unwrap()));
        let members: Vec<u64> = (0..packed.count().get()).flat_map(|pack| packed.members(pack)).collect();
        assert_eq!(members.len(), 5);
        assert!(packed.totals().longest_pack <= 4 && packed.count().get() < 5);
        // The hash tells parts apart.
        let hashes = [&kept, &held_out, &packed, &part(&[1, 6], Packing::Off).0, &whole].map(Samples::hash);
        assert!((0..5).all(|one| !hashes[..one].contains(&hashes[one])), "{hashes:?}");
        assert_eq!(kept.hash(), part(&[1, 5], Packing::Off).0.hash());
        assert!(whole.hold_out(Packing::Off, |_| true).is_err());
    }

    #[test]
    fn parts_of_pairs_have_their_sources_and_targets() {
        let limits = PairLimits { source: 4, target: 6 };
        let mut whole = SamplesBuilder::of_pairs(limits, false);
        for row in 0..6 {
            let side = |length: i32| (0..length).map(|at| 10 * row + at).collect::<Vec<_>>();
            whole.push(&side(1 + row % 3), &side(1 + row % 2));
        }
        let whole = whole.finish().unwrap();
        let (kept, held_out) = whole.hold_out(Packing::Pairs(limits), |sample| sample == 1).unwrap();
        assert_eq!((held_out.ids(0).unwrap(), held_out.labels(0).unwrap()), (vec![10, 11], vec![10, 11]));
        assert!(kept.is_paired() && held_out.is_paired());
        for (found, expected) in [0, 2, 3, 4, 5].into_iter().enumerate() {
            assert_eq!(kept.ids(found as u64).unwrap(), whole.ids(expected).unwrap());
            assert_eq!(kept.labels(found as u64).unwrap(), whole.labels(expected).unwrap());
        }
        let [source, target] = kept.longest_streams();
        assert!(kept.totals().packs > 1 && source <= 4 && target <= 6);
    }
}
