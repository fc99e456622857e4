//! What a rank can have of its host, and what the least share of all ranks leaves for each: memory and scratch are planned once,
//! for equal ranks.

use serde::{Deserialize, Serialize};
use zeroth_machine::{DeviceKind, Rates};
use zeroth_plan::Budget;

use super::machine::processes;

/// A rank's share of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RankShare {
    /// The number of its host.
    pub host: usize,
    /// CPU threads.
    pub threads: usize,
    /// Free bytes of host memory, of which it has as much as the other ranks of its host.
    pub free_host_memory: Option<u64>,
    /// Its part of `--host-memory`.
    pub given_host_memory: Option<u64>,
    pub gpu: Option<GpuShare>,
    /// Measured rates, where something depends on them.
    pub rates: Option<Rates>,
}

/// A GPU as one rank sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct GpuShare {
    pub device: GpuIdentity,
    /// Its free bytes before any rank has used it.
    pub free: u64,
    /// Bytes of it that the rank's connections to other GPUs may take.
    pub connections: u64,
}

/// What tells the GPUs of a host apart. Indices do not where a launcher shows each rank a GPU of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuIdentity {
    /// `GPU-…`, or `MIG-…` of an instance.
    Uuid(String),
    /// Its index, where the driver does not tell more.
    Index(u32),
}

/// The least that any rank of a job has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeastShare {
    pub(crate) threads: usize,
    free_host_memory: Option<u64>,
    given_host_memory: Option<u64>,
    free_device_memory: Option<u64>,
    pub(crate) rates: Option<Rates>,
}

impl LeastShare {
    /// Of all ranks of a job.
    pub(crate) fn of(shares: &[RankShare]) -> Self {
        let least = |of: fn(&RankShare) -> Option<u64>| shares.iter().filter_map(of).min();
        let on_gpu = shares.iter().filter_map(|share| {
            let gpu = share.gpu.as_ref()?;
            let part = gpu.free / ranks_of_gpu(shares, share.host, &gpu.device);
            Some(part.saturating_sub(gpu.connections))
        });
        Self {
            threads: shares.iter().map(|share| share.threads).min().unwrap_or(1),
            free_host_memory: least(|share| share.free_host_memory),
            given_host_memory: least(|share| share.given_host_memory),
            free_device_memory: on_gpu.min(),
            rates: shares.iter().filter_map(|share| share.rates).reduce(slower),
        }
    }

    /// Memory budget of a rank: as given, else free memory.
    pub(crate) fn budget(&self, device: DeviceKind, given_device_memory: Option<u64>) -> Budget {
        let Self { free_host_memory: free, given_host_memory: given, free_device_memory, .. } = *self;
        match device {
            // On a CPU, device memory is host memory, unless separate budgets are given.
            DeviceKind::Cpu if given_device_memory.is_some() => {
                Budget { together: free, ..Budget::given(given_device_memory, given, true, processes()) }
            }
            DeviceKind::Cpu => Budget::given(None, given.or(free), true, processes()),
            DeviceKind::Cuda => {
                let device = given_device_memory.or(free_device_memory);
                Budget::given(device, given.or(free), false, processes())
            }
        }
    }
}

/// The ranks of a host that share a GPU.
fn ranks_of_gpu(shares: &[RankShare], host: usize, device: &GpuIdentity) -> u64 {
    let has_it = |share: &&RankShare| {
        share.host == host && share.gpu.as_ref().is_some_and(|gpu| gpu.device == *device)
    };
    shares.iter().filter(has_it).count().max(1) as u64
}

/// The lower of each rate: all ranks wait for the slowest.
fn slower(a: Rates, b: Rates) -> Rates {
    Rates {
        update: a.update.min(b.update),
        bus: a.bus.min(b.bus),
        memory: a.memory.min(b.memory),
        matmuls: a.matmuls.min(b.matmuls),
    }
}

#[cfg(test)]
mod tests {
    use zeroth_kernel::Tier;

    use super::*;

    fn share(host: usize, threads: usize, memory: u64, gpu: Option<(&str, u64)>) -> RankShare {
        let gpu = gpu.map(|(uuid, free)| GpuShare {
            device: GpuIdentity::Uuid(uuid.to_owned()),
            free,
            connections: 0,
        });
        let (free_host_memory, given_host_memory, rates) = (Some(memory), None, None);
        RankShare { host, threads, free_host_memory, given_host_memory, gpu, rates }
    }

    fn device_limit(shares: &[RankShare]) -> Option<u64> {
        LeastShare::of(shares).budget(DeviceKind::Cuda, None).limits[Tier::Device]
    }

    #[test]
    fn a_gpu_is_divided_by_the_ranks_that_share_it() {
        // One visible GPU a rank, as `srun --gpus-per-task=1` does it.
        let own: Vec<RankShare> =
            ["GPU-a", "GPU-b", "GPU-c"].map(|uuid| share(0, 1, 9, Some((uuid, 80)))).into();
        assert_eq!(device_limit(&own), Some(80));
        // All on one.
        let one: Vec<RankShare> = [(); 3].map(|()| share(0, 1, 9, Some(("GPU-a", 90)))).into();
        assert_eq!(device_limit(&one), Some(30));
        // Three ranks on two GPUs: the shared one has less for each, unless the other is nearly full.
        let mut uneven = [("GPU-a", 80), ("GPU-b", 80), ("GPU-a", 80)].map(|gpu| share(0, 1, 9, Some(gpu)));
        assert_eq!(device_limit(&uneven), Some(40));
        uneven[1] = share(0, 1, 9, Some(("GPU-b", 10)));
        assert_eq!(device_limit(&uneven), Some(10));
        // What connections take is each rank's own.
        let mut connected = one;
        connected.iter_mut().flat_map(|share| &mut share.gpu).for_each(|gpu| gpu.connections = 7);
        assert_eq!(device_limit(&connected), Some(23));
        // Containers of one machine may show one GPU to two hosts, and indices begin anew on each.
        let index = |host| RankShare {
            gpu: Some(GpuShare { device: GpuIdentity::Index(0), free: 80, connections: 0 }),
            ..share(host, 1, 9, None)
        };
        assert_eq!(device_limit(&[index(0), index(1)]), Some(80));
        assert_eq!(device_limit(&[index(0), index(0)]), Some(40));
    }

    #[test]
    fn the_least_of_all_hosts_counts() {
        let all =
            [share(0, 4, 100, None), share(0, 4, 100, None), share(1, 3, 200, None), share(2, 8, 50, None)];
        let least = LeastShare::of(&all);
        assert_eq!(least.threads, 3);
        assert_eq!(least.budget(DeviceKind::Cpu, None).together, Some(50));
        let given = all.map(|share| RankShare { given_host_memory: Some(70), ..share });
        assert_eq!(LeastShare::of(&given).budget(DeviceKind::Cpu, None).together, Some(70));
        let with_device = LeastShare::of(&given).budget(DeviceKind::Cpu, Some(30));
        assert_eq!((with_device.together, with_device.limits[Tier::Device]), (Some(50), Some(30)));
        assert_eq!(with_device.limits[Tier::Host], Some(70));
    }

    #[test]
    fn every_rate_is_that_of_the_slowest() {
        let rates = |update, bus| Rates { update, bus, memory: 7, matmuls: 9 };
        let of = |rates| RankShare { rates, ..share(0, 1, 1, None) };
        let all = [of(Some(rates(5, 2))), of(None), of(Some(rates(3, 4)))];
        assert_eq!(LeastShare::of(&all).rates, Some(rates(3, 2)));
        assert_eq!(LeastShare::of(&[of(None)]).rates, None);
    }
}
