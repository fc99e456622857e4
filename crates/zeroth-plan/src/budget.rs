//! The memory budget of a rank, and what a program lacks of it.

use zeroth_kernel::{ByTier, Tier};
use zeroth_program::Compiled;

use crate::overhead::{DataSize, Overhead, Processes};

/// The memory budget of one rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Budget {
    /// The limit of each tier.
    pub limits: ByTier<Option<u64>>,
    /// Of all tiers together, for devices that compute in host memory.
    pub together: Option<u64>,
    /// How ranks are started: a host budget includes the overhead of their processes.
    pub processes: Processes,
}

/// A budget that a program exceeds.
#[derive(Clone, Copy)]
pub(crate) struct Shortfall {
    /// The kind of memory, for messages.
    pub(crate) of: &'static str,
    /// What the program needs.
    pub(crate) needed: u64,
    /// The budget.
    pub(crate) given: u64,
    /// The part of `needed` that is process overhead.
    pub(crate) overhead: u64,
}

impl Budget {
    /// A limit of device memory alone.
    pub fn of_device(bytes: u64) -> Self {
        Self { limits: ByTier::on_device(Some(bytes)), ..Self::default() }
    }

    /// The budget of a rank with so much memory on its device and on its host. A device that computes in host memory and
    /// has no budget of its own shares the host's.
    pub fn given(device: Option<u64>, host: Option<u64>, shares_host: bool, processes: Processes) -> Self {
        let is_together = shares_host && device.is_none();
        Self {
            limits: ByTier::on_device(device).with(Tier::Host, host.filter(|_| !is_together)),
            together: host.filter(|_| is_together),
            processes,
        }
    }

    /// Whether any memory is limited.
    pub(crate) fn is_limited(&self) -> bool {
        self.limits.iter().any(|(_, limit)| limit.is_some()) || self.together.is_some()
    }

    /// The first budget that the program exceeds.
    pub(crate) fn shortfall(&self, data: DataSize, compiled: &Compiled) -> Option<Shortfall> {
        let overhead = ByTier::default().with(Tier::Host, self.overhead(data, compiled));
        let needed = self.needed(data, compiled);
        let over = |of, needed: u64, overhead: u64, given: Option<u64>| {
            given.filter(|given| needed > *given).map(|given| Shortfall { of, needed, given, overhead })
        };
        let of_tier = |tier: Tier| over(tier.memory(), needed[tier], overhead[tier], self.limits[tier]);
        let together = || over("memory", needed.sum(), overhead.sum(), self.together);
        Tier::ALL.into_iter().find_map(of_tier).or_else(together)
    }

    /// Host bytes of a rank's process outside its arena.
    fn overhead(&self, data: DataSize, compiled: &Compiled) -> u64 {
        Overhead::of(data, compiled, self.processes).total
    }

    /// Bytes of a rank in each tier, process overhead included.
    pub(crate) fn needed(&self, data: DataSize, compiled: &Compiled) -> ByTier<u64> {
        let host = compiled.memory.arena(Tier::Host) + self.overhead(data, compiled);
        compiled.memory.arenas().with(Tier::Host, host)
    }
}
