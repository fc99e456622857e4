//! Lanes of a segment: which of its ranks meet in a communicator.
//!
//! All ranks of a segment share one lane. In a mesh there are two more, of a rank's group and of its rail, so that a
//! collective along one axis does not wait for ranks that take no part. A lane has round counters and regions of its own.

/// The ranks that meet, as slots of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lane {
    /// Which counters and regions they use.
    pub(crate) number: usize,
    /// The number of ranks.
    pub(crate) world: usize,
    first: usize,
    stride: usize,
}

impl Lane {
    /// Lanes of a segment.
    pub(crate) const COUNT: usize = 3;

    /// All ranks of a segment.
    pub(crate) const fn all(world: usize) -> Self {
        Self { number: 0, world, first: 0, stride: 1 }
    }

    /// The group of a slot, in a segment whose ranks are groups of `group`.
    pub(crate) const fn group(slot: usize, group: usize) -> Self {
        Self { number: 1, world: group, first: slot / group * group, stride: 1 }
    }

    /// The rail of a slot, in a segment of `world` ranks.
    pub(crate) const fn rail(slot: usize, group: usize, world: usize) -> Self {
        Self { number: 2, world: world / group, first: slot % group, stride: group }
    }

    /// All ranks of a segment, each of which is on a rail that leaves the machine.
    pub(crate) const fn rails(world: usize) -> Self {
        Self { number: 2, ..Self::all(world) }
    }

    /// Whether its ranks are those of a rail.
    pub(crate) const fn is_rail(self) -> bool {
        self.number == 2
    }

    /// Slots from one rank to the next.
    pub(crate) const fn stride(self) -> usize {
        self.stride
    }

    /// The slot of a rank of the lane.
    pub(crate) const fn slot(self, rank: usize) -> usize {
        self.first + rank * self.stride
    }

    /// The number of a slot of the lane.
    pub(crate) const fn rank(self, slot: usize) -> usize {
        (slot - self.first) / self.stride
    }

    /// All slots, in the order of the ranks.
    pub(crate) fn slots(self) -> impl Iterator<Item = usize> {
        (0..self.world).map(move |rank| self.slot(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_rails_are_the_rows_and_columns_of_the_mesh() {
        let (group, world) = (3, 12);
        for slot in 0..world {
            let of = [Lane::all(world), Lane::group(slot, group), Lane::rail(slot, group, world)];
            for lane in of {
                assert_eq!(lane.slot(lane.rank(slot)), slot);
                assert_eq!(lane.slots().filter(|other| *other == slot).count(), 1);
            }
            assert_eq!(of.map(|lane| lane.rank(slot)), [slot, slot % group, slot / group]);
        }
        let slots = |lane: Lane| lane.slots().collect::<Vec<_>>();
        assert_eq!(slots(Lane::group(7, group)), [6, 7, 8]);
        assert_eq!(slots(Lane::rail(7, group, world)), [1, 4, 7, 10]);
    }
}
