//! The axes of the mesh of ranks.

use std::fmt;

/// An axis of the mesh of ranks: groups that share a machine's memory or links, and rails between them.
///
/// Of `H` groups with `G` ranks each, rank `r` has place `r mod G` in group `r div G`. Ranks with the same place form a
/// rail. A job of one group has no rails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// The ranks of one group, in the order of their places.
    Group,
    /// The ranks with the same place, in the order of their groups.
    Rail,
}

impl Axis {
    /// Both axes.
    pub const ALL: [Self; 2] = [Self::Group, Self::Rail];

    /// Its name in dumps and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Rail => "rail",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
