//! Packing of pairs: a pack is bounded by the tokens of its sources and by those of its targets.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::pack::Packs;
use super::pairs::PairLimits;

/// Open packs that are looked at for a sample: those with room in one stream rarely lack it in the other.
const LOOKED_AT: usize = 256;

impl Packs {
    /// Packs samples of these source and target lengths, none above its limit: best-fit decreasing by the stream that
    /// is fuller over all samples. Packs are ordered by their first sample.
    pub(super) fn of_pairs(lengths: impl Iterator<Item = [u64; 2]>, limits: PairLimits) -> Self {
        let limits = [limits.source.max(1), limits.target.max(1)];
        let mut samples: Vec<(u64, [u64; 2])> = (0..).zip(lengths).collect();
        let fill = |stream: usize| {
            let tokens: u64 = samples.iter().map(|(_, lengths)| lengths[stream]).sum();
            u128::from(tokens) * u128::from(limits[1 - stream])
        };
        let fuller = usize::from(fill(1) > fill(0));
        let (main, other) = (fuller, 1 - fuller);
        // The larger of a sample's two shares of a pack, in units of 1 / (limit × limit).
        let share = |lengths: &[u64; 2]| {
            let of = |stream: usize| u128::from(lengths[stream]) * u128::from(limits[1 - stream]);
            of(0).max(of(1))
        };
        samples.sort_unstable_by_key(|(sample, lengths)| (Reverse(share(lengths)), *sample));

        // Open packs by free space in the fuller stream.
        let mut open: BTreeSet<(u64, u64, usize)> = BTreeSet::new();
        let mut packs: Vec<Vec<u64>> = Vec::new();
        for (sample, lengths) in samples {
            let fitting = open.range((lengths[main], 0, 0)..).take(LOOKED_AT);
            let found = fitting.copied().find(|(_, room, _)| *room >= lengths[other]);
            let (room, other_room, pack) = found.unwrap_or_else(|| {
                packs.push(Vec::new());
                (limits[main], limits[other], packs.len() - 1)
            });
            open.remove(&(room, other_room, pack));
            packs[pack].push(sample);
            let left = (room - lengths[main], other_room - lengths[other]);
            if left.0 > 0 && left.1 > 0 {
                open.insert((left.0, left.1, pack));
            }
        }
        Self::in_file_order(packs)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(lengths: &[[u64; 2]], limits: PairLimits) -> Vec<Vec<u64>> {
        Packs::of_pairs(lengths.iter().copied(), limits).iter().map(<[u64]>::to_vec).collect()
    }

    #[test]
    fn both_streams_bound_a_pack() {
        let limits = PairLimits { source: 10, target: 4 };
        // The sources of all would fit, the targets of two do.
        assert_eq!(packed(&[[1, 2], [2, 2], [3, 1], [1, 3]], limits), [vec![0, 1], vec![2, 3]]);
        assert_eq!(packed(&[[9, 1], [9, 1], [1, 1]], limits), [vec![0, 2], vec![1]]);
    }

    /// Puts every sample into the first pack with enough space, in file order.
    fn first_fit(lengths: &[[u64; 2]], limits: PairLimits) -> usize {
        let mut rooms: Vec<[u64; 2]> = Vec::new();
        for length in lengths {
            match rooms.iter_mut().find(|room| room[0] >= length[0] && room[1] >= length[1]) {
                Some(room) => *room = [room[0] - length[0], room[1] - length[1]],
                None => rooms.push([limits.source - length[0], limits.target - length[1]]),
            }
        }
        rooms.len()
    }

    proptest! {
        #[test]
        fn every_sample_is_packed_once_within_both_limits(
            lengths in proptest::collection::vec([1_u64..=40, 1_u64..=9], 1..200),
        ) {
            let limits = PairLimits { source: 40, target: 9 };
            let packs = packed(&lengths, limits);
            let mut members: Vec<u64> = packs.concat();
            members.sort_unstable();
            prop_assert!(members.into_iter().eq(0..lengths.len() as u64));
            for pack in &packs {
                prop_assert!(pack.is_sorted());
                let total = |stream: usize| pack.iter().map(|&sample| lengths[sample as usize][stream]).sum::<u64>();
                prop_assert!(total(0) <= limits.source && total(1) <= limits.target);
            }
            prop_assert!(packs.is_sorted_by_key(|pack| pack[0]));
            prop_assert!(packs.len() <= first_fit(&lengths, limits) + 2);
        }
    }
}
