//! This machine, for runs and for plans, and what the ranks of a job have of it.

use zeroth_config::resolve::Resolved;
use zeroth_config::schema::OffloadDevice;
use zeroth_cuda::CudaDevice;
use zeroth_machine::{DeviceKind, Gpu, Gpus, Machine, Rates, probe, probe_host};
use zeroth_plan::Processes;
use zeroth_program::Settings;

use super::error::JobError;
use super::rank_share::{GpuIdentity, GpuShare, RankShare};
use super::request::JobRequest;
use crate::planning::is_open;

/// Size of each rank's shared-memory send region; larger messages are sent in pieces of half of it.
pub const REGION: usize = 8 << 20;

/// GPUs of a machine.
pub fn gpus(machine: &Machine) -> u64 {
    match &machine.gpus {
        Gpus::Found { devices, .. } => devices.len() as u64,
        _ => 0,
    }
}

/// The ranks of a job that names none: one for every GPU, or one on CPUs.
pub fn usual_ranks(device: DeviceKind, machine: &Machine) -> u64 {
    match device {
        DeviceKind::Cuda => gpus(machine).max(1),
        DeviceKind::Cpu => 1,
    }
}

/// CPUs that this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Free bytes of a GPU for each rank: with more ranks than GPUs, ranks share them.
pub(super) fn free_device_memory(machine: &Machine, ranks: u64) -> Option<u64> {
    let Gpus::Found { devices, .. } = &machine.gpus else { return None };
    let all = devices.len() as u64;
    let used = devices.iter().zip(0..ranks);
    // Rank r has the GPU r modulo their number.
    used.map(|(gpu, first)| gpu.free.unwrap_or(gpu.total) / (ranks - first).div_ceil(all)).min()
}

/// How ranks are started. The rayon pool for data and weight initialisation has one thread per CPU.
pub(super) fn processes() -> Processes {
    Processes { region: REGION as u64, threads: cpus() as u64 }
}

/// Bytes of a GPU that a communicator of NCCL takes in each rank. 2.28.9 took 450 MB on an H200, 202 of them while it was opened.
const NCCL_BYTES: u64 = 512 << 20;

/// Ranks that a launcher has started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartedRanks {
    /// All ranks of the job.
    pub world: u64,
    /// Those of this host.
    pub local_world: u64,
    /// The number of this host.
    pub host: usize,
    /// The number of this process's rank among those of its host.
    pub local_rank: u64,
}

impl StartedRanks {
    /// All ranks of a job on this host, as the first of them sees them.
    pub fn on_one_host(world: u64) -> Self {
        Self { world, local_world: world, host: 0, local_rank: 0 }
    }

    /// The ranks of a group where the config leaves them open: those of a host if they divide the ranks, else 1; `None` on one
    /// host.
    pub(super) fn usual_group(&self) -> Option<u64> {
        let is_divisor = self.local_world > 0 && self.world.is_multiple_of(self.local_world);
        (self.world > self.local_world).then_some(if is_divisor { self.local_world } else { 1 })
    }

    /// Communicators of NCCL that a rank may open, by how many GPUs its host shows it: along its rail, and in its group if GPUs
    /// cannot map each other's memory.
    fn communicators(self, visible_gpus: usize) -> u64 {
        let between_gpus = self.local_world > 1 && visible_gpus > 1;
        u64::from(between_gpus) + u64::from(self.local_world < self.world)
    }
}

/// This host, and the job's ranks on it.
pub(super) struct JobMachine {
    pub(super) machine: Machine,
    pub(super) device: DeviceKind,
    pub(super) ranks: StartedRanks,
}

impl JobMachine {
    /// As asked for; `started` are ranks that a launcher has started. Without one, all ranks are those of this host.
    pub(super) fn find(request: &JobRequest, started: Option<StartedRanks>) -> Result<Self, JobError> {
        let machine = if request.device == Some(DeviceKind::Cpu) { probe_host() } else { probe() };
        let found = if gpus(&machine) > 0 { DeviceKind::Cuda } else { DeviceKind::Cpu };
        let device = request.device.unwrap_or(found);
        if device == DeviceKind::Cuda && gpus(&machine) == 0 {
            return Err(JobError::NoGpu);
        }
        let ranks = started.unwrap_or_else(|| {
            let world = request.ranks.unwrap_or_else(|| usual_ranks(device, &machine));
            StartedRanks::on_one_host(world)
        });
        Ok(Self { machine, device, ranks })
    }

    /// CPU threads of a rank.
    pub(super) fn threads(&self, request: &JobRequest) -> usize {
        let share = (cpus() / self.ranks.local_world as usize).max(1);
        request.threads_per_rank.map_or(share, |threads| threads as usize)
    }

    /// What a rank of this host can have of it: with more ranks than GPUs, ranks share them.
    pub(super) fn share(&self, request: &JobRequest, local_rank: u64) -> RankShare {
        let local_world = self.ranks.local_world;
        let of_gpu = |devices: &[Gpu]| {
            let gpu = devices.get(local_rank as usize % devices.len().max(1))?;
            let device = gpu.uuid.clone().map_or(GpuIdentity::Index(gpu.index), GpuIdentity::Uuid);
            let connections = self.ranks.communicators(devices.len()) * NCCL_BYTES;
            Some(GpuShare { device, free: gpu.free.unwrap_or(gpu.total), connections })
        };
        RankShare {
            host: self.ranks.host,
            threads: self.threads(request),
            free_host_memory: self.machine.host_memory_available().map(|bytes| bytes / local_world),
            given_host_memory: request.host_memory.map(|bytes| bytes / local_world),
            gpu: match &self.machine.gpus {
                Gpus::Found { devices, .. } if self.device == DeviceKind::Cuda => of_gpu(devices),
                _ => None,
            },
            rates: None,
        }
    }

    /// Shares of all ranks of this host, as this process sees its GPUs; with measured rates in the first.
    pub(super) fn shares(&self, request: &JobRequest, rates: Option<Rates>) -> Vec<RankShare> {
        let mut shares: Vec<RankShare> =
            (0..self.ranks.local_world).map(|rank| self.share(request, rank)).collect();
        if let Some(first) = shares.first_mut() {
            first.rates = rates;
        }
        shares
    }

    /// A rank's share of the measured update rates, if the placement of the offloaded optimizer update depends on them.
    pub(super) fn rates(&self, resolved: &Resolved, notes: &mut Vec<String>) -> Option<Rates> {
        let is_offloaded = resolved.values.offload_optimizer.device == OffloadDevice::Cpu;
        let is_free = is_open(resolved, "zeroth.update") && is_open(resolved, "zeroth.update_window");
        // In fp32 there is nothing to choose: there are no separate master weights.
        let is_narrow = resolved.values.bf16.enabled || resolved.values.fp16.enabled;
        if self.device != DeviceKind::Cuda || !is_offloaded || !is_free || !is_narrow {
            return None;
        }
        let Settings { moment_dtype: moments, stochastic_rounding, .. } = Settings::from_config(resolved);
        let measured = CudaDevice::open(0, Rates::arenas())
            .and_then(|mut gpu| Rates::measure(&mut gpu, moments, stochastic_rounding));
        match measured {
            Ok(Rates { update, bus, memory, matmuls }) => {
                let ranks_per_gpu = self.ranks.local_world.div_ceil(gpus(&self.machine).max(1));
                let [bus, memory, matmuls] = [bus, memory, matmuls].map(|rate| rate / ranks_per_gpu);
                Some(Rates { update: update / self.ranks.local_world, bus, memory, matmuls })
            }
            Err(error) => {
                notes.push(format!("zeroth.update is \"device\": cannot measure which is faster: {error}"));
                None
            }
        }
    }
}
