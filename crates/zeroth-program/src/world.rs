//! The ranks of a job as a mesh of groups and rails.

use zeroth_base::Axis;

/// The ranks of a job: groups of equal size, as in a PyTorch `DeviceMesh` whose inner dimension shards.
///
/// Rank `r` has place `r mod G` in group `r div G`. Sums and gathers run inside the groups first, where ranks share
/// memory or links, and then along rails: the ranks with the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// The number of ranks.
    pub ranks: u64,
    /// Ranks of a group; it divides the number of ranks.
    pub group: u64,
}

impl World {
    /// The number of groups.
    pub const fn groups(self) -> u64 {
        self.ranks / self.group
    }

    /// A rank's place in its group.
    pub const fn place(self, rank: u64) -> u64 {
        rank % self.group
    }

    /// The group of a rank.
    pub const fn group_of(self, rank: u64) -> u64 {
        rank / self.group
    }

    /// The position of a rank's shard in every flat. The shards of a rail follow each other, so that what a place has
    /// in all groups is one range: the shard of a group's rank.
    pub const fn position(self, rank: u64) -> u64 {
        self.place(rank) * self.groups() + self.group_of(rank)
    }

    /// The number of ranks along an axis.
    pub const fn along(self, axis: Axis) -> u64 {
        match axis {
            Axis::Group => self.group,
            Axis::Rail => self.groups(),
        }
    }

    /// A rank's number along an axis.
    pub const fn number(self, axis: Axis, rank: u64) -> u64 {
        match axis {
            Axis::Group => self.place(rank),
            Axis::Rail => self.group_of(rank),
        }
    }

    /// Whether it has both axes: several groups of several ranks.
    pub const fn has_two_levels(self) -> bool {
        self.group > 1 && self.groups() > 1
    }

    /// The axes of a reduction, in order. Gathers take them the other way round.
    pub const fn levels(self) -> &'static [Axis] {
        match (self.group > 1, self.groups() > 1) {
            (true, true) => &[Axis::Group, Axis::Rail],
            (false, true) => &[Axis::Rail],
            (_, false) => &[Axis::Group],
        }
    }

    /// The axis of a reduction's last level.
    pub const fn last_level(self) -> Axis {
        if self.groups() > 1 { Axis::Rail } else { Axis::Group }
    }

    /// The axis along which a gather ends.
    pub const fn gather_axis(self) -> Axis {
        if self.group == 1 && self.groups() > 1 { Axis::Rail } else { Axis::Group }
    }
}

/// One group.
impl From<u64> for World {
    fn from(ranks: u64) -> Self {
        Self { ranks, group: ranks }
    }
}
