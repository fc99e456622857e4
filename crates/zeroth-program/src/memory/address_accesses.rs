//! The last accesses to every address of a section, for the waits of the next one.
//!
//! A large model has thousands of buffers in a section, most of which overlap some of the next section's, so no question may
//! visit them all.

use std::ops::Range;

use zeroth_kernel::Queue;

use super::occupancy::{Accesses, above, cover};

/// Last accesses by address: a segment tree over the bounds of the accessed ranges.
#[derive(Debug, Default)]
pub(crate) struct AddressAccesses {
    /// Bounds of ranges, ascending. Leaf n is what lies between bounds n and n + 1.
    bounds: Vec<u64>,
    /// The number of leaves, a power of two. Node 1 is the root, and node n has the children 2n and 2n + 1.
    leaves: usize,
    /// For each node, the last accesses to all of its addresses by ranges that no smaller set of nodes covers.
    throughout: Vec<Accesses>,
    /// For each node, the last accesses to any of its addresses, as far as its subtree knows.
    anywhere: Vec<Accesses>,
}

impl AddressAccesses {
    /// The last accesses to these ranges.
    pub(crate) fn of(ranges: &[(Range<u64>, Accesses)]) -> Self {
        let mut bounds: Vec<u64> = ranges.iter().flat_map(|(range, _)| [range.start, range.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let leaves = bounds.len().saturating_sub(1).next_power_of_two();
        let none = vec![[None; Queue::ALL.len()]; 2 * leaves];
        let mut accesses = Self { bounds, leaves, throughout: none.clone(), anywhere: none };
        for (range, latest) in ranges {
            accesses.record(range, latest);
        }
        accesses
    }

    fn record(&mut self, range: &Range<u64>, latest: &Accesses) {
        let Some(places) = self.places(range) else { return };
        let (throughout, anywhere) = (&mut self.throughout, &mut self.anywhere);
        cover(self.leaves, &places, |node| {
            keep_latest(&mut throughout[node], latest);
            keep_latest(&mut anywhere[node], latest);
        });
        above(self.leaves, &places, |node| keep_latest(&mut anywhere[node], latest));
    }

    /// The last accesses to any address of a range.
    pub(crate) fn latest(&self, range: &Range<u64>) -> Accesses {
        let mut latest = [None; Queue::ALL.len()];
        if let Some(places) = self.places(range) {
            cover(self.leaves, &places, |node| keep_latest(&mut latest, &self.anywhere[node]));
            above(self.leaves, &places, |node| keep_latest(&mut latest, &self.throughout[node]));
        }
        latest
    }

    /// The leaves that a range overlaps; `None` where it overlaps none.
    fn places(&self, range: &Range<u64>) -> Option<std::ops::RangeInclusive<usize>> {
        let first = self.bounds.partition_point(|bound| *bound <= range.start).saturating_sub(1);
        let end =
            self.bounds.partition_point(|bound| *bound < range.end).min(self.bounds.len().saturating_sub(1));
        (!range.is_empty() && first < end).then(|| first..=end - 1)
    }
}

fn keep_latest(known: &mut Accesses, more: &Accesses) {
    for (known, more) in known.iter_mut().zip(more) {
        *known = (*known).max(*more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_access_is_that_of_all_ranges_that_overlap() {
        let mut state = 11u64;
        let mut number = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut range = || {
            let start = number(60);
            start..start + number(9)
        };
        for count in [0, 1, 2, 5, 40] {
            let ranges: Vec<(Range<u64>, Accesses)> = (0..count)
                .map(|at| {
                    let mut accesses = [None; Queue::ALL.len()];
                    accesses[at % 3] = Some(at * 7 % 41);
                    (range(), accesses)
                })
                .collect();
            let found = AddressAccesses::of(&ranges);
            for _ in 0..200 {
                let asked = range();
                let mut expected = [None; Queue::ALL.len()];
                let overlaps = |other: &Range<u64>| other.start.max(asked.start) < other.end.min(asked.end);
                for (_, accesses) in ranges.iter().filter(|(other, _)| overlaps(other)) {
                    keep_latest(&mut expected, accesses);
                }
                assert_eq!(found.latest(&asked), expected, "{asked:?} of {ranges:?}");
            }
        }
    }
}
