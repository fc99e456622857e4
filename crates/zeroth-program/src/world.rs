//! The ranks of a job.

/// The ranks of a job and their distribution over hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// The number of ranks.
    pub ranks: u64,
    /// Ranks on one host.
    pub per_host: u64,
}

impl World {
    /// Whether all ranks are on one host and can map each other's memory.
    pub const fn shares_memory(self) -> bool {
        self.per_host >= self.ranks
    }
}

/// Ranks on one host.
impl From<u64> for World {
    fn from(ranks: u64) -> Self {
        Self { ranks, per_host: ranks }
    }
}
