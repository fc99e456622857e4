//! Packing: joins samples into packs of at most `limit` tokens, so that micro-batches have about one size.
//!
//! Best-fit decreasing: each sample, longest first, goes where it leaves the least free space. It needs at most 11/9
//! of the optimal number of packs plus a few (Johnson 1974), and is within a percent on real length distributions.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The samples of each pack; empty without packing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Packs {
    /// Start offset of each pack in `members`, followed by the end of the last one.
    pub(super) starts: Vec<u64>,
    /// Samples by pack, in file order within each.
    pub(super) members: Vec<u64>,
}

impl Packs {
    /// Packs samples of these lengths, none above `limit`. Packs are ordered by their first sample.
    pub(super) fn new(lengths: impl Iterator<Item = u64>, limit: u64) -> Self {
        let lengths: Vec<u64> = lengths.collect();
        let mut longest_first: Vec<u64> = (0..lengths.len() as u64).collect();
        longest_first.sort_unstable_by_key(|&sample| (Reverse(lengths[sample as usize]), sample));

        // Open packs by free space.
        let mut open: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let mut packs: Vec<Vec<u64>> = Vec::new();
        for sample in longest_first {
            let length = lengths[sample as usize];
            let tightest = open.range(length..).next().map(|(&room, _)| room);
            let (room, pack) = if let Some(room) = tightest {
                let alike = open.get_mut(&room).expect("the range just gave this key");
                let pack = alike.pop().expect("lists that run empty are removed");
                if alike.is_empty() {
                    open.remove(&room);
                }
                (room, pack)
            } else {
                packs.push(Vec::new());
                (limit, packs.len() - 1)
            };
            packs[pack].push(sample);
            if room > length {
                open.entry(room - length).or_default().push(pack);
            }
        }

        Self::in_file_order(packs)
    }

    /// Orders packs by their first sample, each in file order.
    pub(super) fn in_file_order(mut packs: Vec<Vec<u64>>) -> Self {
        for pack in &mut packs {
            pack.sort_unstable();
        }
        packs.sort_unstable_by_key(|pack| pack[0]);
        let mut starts = Vec::with_capacity(packs.len() + 1);
        starts.push(0);
        let mut members = Vec::with_capacity(packs.iter().map(Vec::len).sum());
        for pack in &packs {
            members.extend_from_slice(pack);
            starts.push(members.len() as u64);
        }
        Self { starts, members }
    }

    /// Number of packs.
    pub(super) fn count(&self) -> u64 {
        (self.starts.len() as u64).saturating_sub(1)
    }

    /// The samples of each pack.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u64]> {
        self.starts.windows(2).map(|edges| &self.members[edges[0] as usize..edges[1] as usize])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zeroth_base::philox4x32;

    use super::*;

    fn packed(lengths: &[u64], limit: u64) -> Vec<Vec<u64>> {
        Packs::new(lengths.iter().copied(), limit).iter().map(<[u64]>::to_vec).collect()
    }

    /// Puts every sample into the first pack with enough space, in file order.
    fn first_fit(lengths: &[u64], limit: u64) -> usize {
        let mut rooms: Vec<u64> = Vec::new();
        for &length in lengths {
            match rooms.iter_mut().find(|room| **room >= length) {
                Some(room) => *room -= length,
                None => rooms.push(limit - length),
            }
        }
        rooms.len()
    }

    #[test]
    fn samples_go_where_they_leave_the_least_space() {
        assert_eq!(packed(&[3, 7, 6, 4, 10, 2], 10), [vec![0, 1], vec![2, 3], vec![4], vec![5]]);
        // The last one fits beside 13, leaving 6, and beside 11 and 8, leaving 0.
        assert_eq!(packed(&[13, 11, 8, 1], 20), [vec![0], vec![1, 2, 3]]);
        assert_eq!(packed(&[1, 1, 1], 1), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn realistic_lengths_pack_no_worse_than_first_fit() {
        for seed in 0..20 {
            // Many short rows, and a tail of long ones.
            let length = |index: u32| {
                let uniform = f64::from(philox4x32([index, 0, 0, 0], [seed, 0])[0]) / 4_294_967_296.0;
                (1.0 - 100.0 * (1.0 - uniform).ln()).min(512.0) as u64
            };
            let lengths: Vec<u64> = (0..1500).map(length).collect();
            let packs = packed(&lengths, 512).len();
            assert!(packs <= first_fit(&lengths, 512), "seed {seed}: {packs}");
            let least = lengths.iter().sum::<u64>().div_ceil(512) as usize;
            assert!(packs <= least + least / 50 + 1, "seed {seed}: {packs} packs where {least} may do");
        }
    }

    proptest! {
        #[test]
        fn every_sample_is_packed_once_within_the_limit(
            (limit, lengths) in (1_u64..200).prop_flat_map(|limit| {
                (Just(limit), proptest::collection::vec(1..=limit, 1..120))
            }),
        ) {
            let packs = packed(&lengths, limit);
            let mut members: Vec<u64> = packs.concat();
            members.sort_unstable();
            prop_assert!(members.into_iter().eq(0..lengths.len() as u64));
            for pack in &packs {
                prop_assert!(pack.is_sorted());
                prop_assert!(pack.iter().map(|&sample| lengths[sample as usize]).sum::<u64>() <= limit);
            }
            prop_assert!(packs.is_sorted_by_key(|pack| pack[0]));
            prop_assert_eq!(&packs, &packed(&lengths, limit));
            // The proven bound, relative to first fit, which is never better than optimal.
            prop_assert!(9 * packs.len() <= 11 * first_fit(&lengths, limit) + 36);
        }
    }
}
