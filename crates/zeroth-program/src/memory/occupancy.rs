//! Memory over the time of an instruction list, for placement: which addresses are free while a buffer lives, and who
//! accessed them last. A large model has a hundred thousand buffers, so no question may visit them all.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use zeroth_kernel::Queue;

/// Occupied addresses, for every instruction: a segment tree over the list.
pub(crate) struct Occupancy {
    /// The number of leaves, a power of two. Node 1 is the root, and node n has the children 2n and 2n + 1.
    leaves: usize,
    /// For each node, what is occupied during all of its instructions by buffers that no smaller set of nodes covers.
    throughout: Vec<Ranges>,
    /// For each node, what is occupied during any of its instructions, as far as its subtree knows.
    anywhere: Vec<Ranges>,
}

impl Occupancy {
    /// Free memory over this many instructions.
    pub(crate) fn new(instructions: usize) -> Self {
        let leaves = instructions.next_power_of_two();
        Self {
            leaves,
            throughout: vec![Ranges::default(); 2 * leaves],
            anywhere: vec![Ranges::default(); 2 * leaves],
        }
    }

    /// The lowest offset at which `bytes` are free during a lifetime.
    pub(crate) fn first_fit<'a>(&'a self, lifetime: &RangeInclusive<usize>, bytes: u64) -> u64 {
        // What is occupied in the lifetime was noted at a node within it, or at one above it that spans it.
        let mut sets: Vec<&Ranges> = Vec::with_capacity(4 * self.leaves.ilog2() as usize + 2);
        let mut consider = |set: &'a Ranges| {
            if !set.0.is_empty() {
                sets.push(set);
            }
        };
        cover(self.leaves, lifetime, |node| consider(&self.anywhere[node]));
        above(self.leaves, lifetime, |node| consider(&self.throughout[node]));
        let (mut offset, mut agreed, mut next) = (0, 0, 0);
        while agreed < sets.len() {
            match sets[next].conflict(offset, bytes) {
                Some(end) => (offset, agreed) = (end, 0),
                None => agreed += 1,
            }
            next = (next + 1) % sets.len();
        }
        offset
    }

    /// Occupies addresses during a lifetime.
    pub(crate) fn occupy(&mut self, lifetime: &RangeInclusive<usize>, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (throughout, anywhere) = (&mut self.throughout, &mut self.anywhere);
        // What a node knows, all above it know as well, so the way up ends at the first that knew.
        for at in [lifetime.start(), lifetime.end()] {
            let leaf = self.leaves + at;
            let mut node = leaf / 2;
            while node > 0 && anywhere[node].insert(range.clone()) {
                node /= 2;
            }
        }
        cover(self.leaves, lifetime, |node| {
            throughout[node].insert(range.clone());
            anywhere[node].insert(range.clone());
        });
    }
}

/// The fewest nodes of a tree that span a lifetime exactly.
pub(crate) fn cover(leaves: usize, lifetime: &RangeInclusive<usize>, mut visit: impl FnMut(usize)) {
    let (mut first, mut end) = (leaves + lifetime.start(), leaves + lifetime.end() + 1);
    while first < end {
        if first % 2 == 1 {
            visit(first);
            first += 1;
        }
        if end % 2 == 1 {
            end -= 1;
            visit(end);
        }
        (first, end) = (first / 2, end / 2);
    }
}

/// All nodes above the first or the last instruction of a lifetime: they hold what is above its cover.
pub(crate) fn above(leaves: usize, lifetime: &RangeInclusive<usize>, mut visit: impl FnMut(usize)) {
    let (mut first, mut last) = ((leaves + lifetime.start()) / 2, (leaves + lifetime.end()) / 2);
    while first > 0 {
        visit(first);
        if last != first {
            visit(last);
        }
        (first, last) = (first / 2, last / 2);
    }
}

/// Disjoint ranges of addresses, in order; neighbours are merged.
#[derive(Debug, Clone, Default)]
struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Whether this adds anything.
    fn insert(&mut self, mut range: Range<u64>) -> bool {
        let first = self.0.partition_point(|known| known.end < range.start);
        let after = first + self.0[first..].partition_point(|known| known.start <= range.end);
        if first == after {
            self.0.insert(first, range);
            return true;
        }
        let known = &self.0[first];
        if known.start <= range.start && range.end <= known.end {
            return false;
        }
        range = self.0[first].start.min(range.start)..self.0[after - 1].end.max(range.end);
        self.0[first] = range;
        self.0.drain(first + 1..after);
        true
    }

    /// Where the occupied range ends that is in the way of `bytes` at an offset. Nothing before it has room for them.
    fn conflict(&self, offset: u64, bytes: u64) -> Option<u64> {
        let before = self.0.partition_point(|known| known.start < offset + bytes);
        let last = before.checked_sub(1).map(|place| &self.0[place])?;
        (last.end > offset).then_some(last.end)
    }
}

/// The last instruction of each queue that accessed something.
pub(crate) type Accesses = [Option<usize>; Queue::ALL.len()];

/// The last accesses of every range of addresses.
#[derive(Default)]
pub(crate) struct LastAccesses {
    /// By the first address: the end, and the accesses. The ranges are disjoint.
    ranges: BTreeMap<u64, (u64, Accesses)>,
}

impl LastAccesses {
    /// Records later accesses to a range, and returns the earlier ones.
    pub(crate) fn replace(&mut self, range: Range<u64>, accesses: Accesses) -> Accesses {
        let mut earlier = [None; Queue::ALL.len()];
        let before = self.ranges.range(..range.start).next_back().map(|(start, known)| (*start, *known));
        let mut cut: Vec<(u64, (u64, Accesses))> =
            before.filter(|(_, known)| known.0 > range.start).into_iter().collect();
        cut.extend(self.ranges.range(range.clone()).map(|(start, known)| (*start, *known)));
        let mut next = range.start;
        let mut renewed: Vec<(u64, (u64, Accesses))> = Vec::with_capacity(cut.len() + 1);
        let mut renew = |start: u64, end: u64, accesses: Accesses| match renewed.last_mut() {
            _ if start == end => {}
            Some((_, (last, same))) if *last == start && *same == accesses => *last = end,
            _ => renewed.push((start, (end, accesses))),
        };
        for (start, (end, known)) in cut {
            self.ranges.remove(&start);
            if start < range.start {
                self.ranges.insert(start, (range.start, known));
            }
            if end > range.end {
                self.ranges.insert(range.end, (end, known));
            }
            let (start, end) = (start.max(range.start), end.min(range.end));
            let mut later = accesses;
            for (queue, at) in known.iter().enumerate() {
                earlier[queue] = earlier[queue].max(*at);
                later[queue] = later[queue].or(*at);
            }
            renew(next, start, accesses);
            renew(start, end, later);
            next = end;
        }
        renew(next, range.end, accesses);
        self.ranges.extend(renewed);
        earlier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without a pattern, the same on every run.
    fn numbers() -> impl FnMut(u64) -> u64 {
        let mut state = 7u64;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        }
    }

    #[test]
    fn the_first_fit_is_the_lowest_offset_that_no_living_buffer_covers() {
        let mut number = numbers();
        let mut occupancy = Occupancy::new(50);
        let mut placed: Vec<(RangeInclusive<usize>, Range<u64>)> = Vec::new();
        for _ in 0..300 {
            let first = number(50) as usize;
            let lifetime = first..=(first + number(12) as usize).min(49);
            let bytes = 1 + number(9);
            let is_free = |offset: u64| {
                placed.iter().all(|(other, range)| {
                    other.end() < lifetime.start()
                        || lifetime.end() < other.start()
                        || range.end <= offset
                        || offset + bytes <= range.start
                })
            };
            let lowest = (0..10_000).find(|offset| is_free(*offset)).unwrap();
            assert_eq!(occupancy.first_fit(&lifetime, bytes), lowest);
            occupancy.occupy(&lifetime, lowest..lowest + bytes);
            placed.push((lifetime, lowest..lowest + bytes));
        }
    }

    #[test]
    fn memory_remembers_the_last_access_of_every_queue() {
        let mut number = numbers();
        let (mut memory, mut bytes) = (LastAccesses::default(), vec![[None; Queue::ALL.len()]; 64]);
        for at in 0..500 {
            let first = number(60);
            let range = first..first + 1 + number(64 - first);
            let mut accesses = [None; Queue::ALL.len()];
            accesses[number(Queue::ALL.len() as u64) as usize] = Some(at);
            let mut expected: Accesses = [None; Queue::ALL.len()];
            for byte in &mut bytes[range.start as usize..range.end as usize] {
                for queue in 0..Queue::ALL.len() {
                    expected[queue] = expected[queue].max(byte[queue]);
                    byte[queue] = accesses[queue].or(byte[queue]);
                }
            }
            assert_eq!(memory.replace(range, accesses), expected);
        }
    }
}
