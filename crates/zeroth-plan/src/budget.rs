//! The memory budget of a rank, and what a program lacks of it.

use zeroth_kernel::{ByTier, Tier};
use zeroth_program::Compiled;

use crate::overhead::{Overhead, Processes};
use crate::sizing::Sizing;

/// The memory budget of one rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Budget {
    /// Device memory.
    pub device: Option<u64>,
    /// Host memory.
    pub host: Option<u64>,
    /// Both together, for devices that compute in host memory.
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
    /// The budget of a rank with so much memory on its device and on its host. A device that computes in host memory and
    /// has no budget of its own shares the host's.
    pub fn given(device: Option<u64>, host: Option<u64>, shares_host: bool, processes: Processes) -> Self {
        let is_together = shares_host && device.is_none();
        Self {
            device,
            host: host.filter(|_| !is_together),
            together: host.filter(|_| is_together),
            processes,
        }
    }

    /// Whether any memory is limited.
    pub(crate) fn is_limited(&self) -> bool {
        self.device.or(self.host).or(self.together).is_some()
    }

    /// The first budget that the program exceeds.
    pub(crate) fn shortfall(&self, sizing: &Sizing<'_>, compiled: &Compiled) -> Option<Shortfall> {
        let device = compiled.memory.arena(Tier::Device);
        let [host, overhead] = self.on_host(sizing, compiled);
        let of = |of, needed: u64, overhead: u64, given: Option<u64>| {
            given.filter(|given| needed > *given).map(|given| Shortfall { of, needed, given, overhead })
        };
        of("device memory", device, 0, self.device)
            .or_else(|| of("host memory", host, overhead, self.host))
            .or_else(|| of("memory", device + host, overhead, self.together))
    }

    /// Host bytes of a rank, and the part of them that is process overhead.
    fn on_host(&self, sizing: &Sizing<'_>, compiled: &Compiled) -> [u64; 2] {
        let overhead = Overhead::of(sizing.data, compiled, self.processes).total;
        [compiled.memory.arena(Tier::Host) + overhead, overhead]
    }

    /// Bytes of a rank in each tier, process overhead included.
    pub(crate) fn needed(&self, sizing: &Sizing<'_>, compiled: &Compiled) -> ByTier<u64> {
        let [host, _] = self.on_host(sizing, compiled);
        compiled.memory.arenas().with(Tier::Host, host)
    }
}
