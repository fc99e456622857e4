//! A rank's share of a machine, for runs and for plans.

use zeroth_config::resolve::Resolved;
use zeroth_config::schema::OffloadDevice;
use zeroth_cuda::CudaDevice;
use zeroth_machine::{DeviceKind, Gpus, Machine, Rates, probe, probe_host};
use zeroth_plan::{Budget, Processes};
use zeroth_program::Settings;

use super::error::JobError;
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
pub(super) fn usual_ranks(device: DeviceKind, machine: &Machine) -> u64 {
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
    let sharing = ranks.div_ceil(gpus(machine).max(1));
    machine.device_memory().map(|memory| memory.free / sharing)
}

/// How ranks are started. The rayon pool for data and weight initialisation has one thread per CPU.
pub(super) fn processes() -> Processes {
    Processes { region: REGION as u64, threads: cpus() as u64 }
}

/// The machine of a job, and what its ranks take of it.
pub(super) struct JobMachine {
    pub(super) machine: Machine,
    pub(super) device: DeviceKind,
    pub(super) ranks: u64,
}

impl JobMachine {
    /// As asked for; `ranks` are those that an external launcher has started.
    pub(super) fn find(request: &JobRequest, ranks: Option<u64>) -> Result<Self, JobError> {
        let machine = if request.device == Some(DeviceKind::Cpu) { probe_host() } else { probe() };
        let found = if gpus(&machine) > 0 { DeviceKind::Cuda } else { DeviceKind::Cpu };
        let device = request.device.unwrap_or(found);
        let ranks = ranks.or(request.ranks).unwrap_or_else(|| usual_ranks(device, &machine));
        if device == DeviceKind::Cuda && gpus(&machine) == 0 {
            return Err(JobError::NoGpu);
        }
        Ok(Self { machine, device, ranks })
    }

    /// CPU threads of a rank.
    pub(super) fn threads(&self, request: &JobRequest) -> usize {
        let share = (cpus() / self.ranks as usize).max(1);
        request.threads_per_rank.map_or(share, |threads| threads as usize)
    }

    /// Memory budget of a rank: as given, else free memory.
    pub(super) fn budget(&self, request: &JobRequest) -> Budget {
        let typed_host = request.host_memory.map(|bytes| bytes / self.ranks);
        let free_host = self.machine.host_memory_available().map(|bytes| bytes / self.ranks);
        match self.device {
            // On a CPU, device memory is host memory, unless separate budgets are given.
            DeviceKind::Cpu if request.device_memory.is_some() => Budget {
                together: free_host,
                ..Budget::given(request.device_memory, typed_host, true, processes())
            },
            DeviceKind::Cpu => Budget::given(None, typed_host.or(free_host), true, processes()),
            DeviceKind::Cuda => {
                let free = free_device_memory(&self.machine, self.ranks);
                let device = request.device_memory.or(free);
                Budget::given(device, typed_host.or(free_host), false, processes())
            }
        }
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
                let ranks_per_gpu = self.ranks.div_ceil(gpus(&self.machine).max(1));
                let [bus, memory, matmuls] = [bus, memory, matmuls].map(|rate| rate / ranks_per_gpu);
                Some(Rates { update: update / self.ranks, bus, memory, matmuls })
            }
            Err(error) => {
                notes.push(format!("zeroth.update is \"device\": cannot measure which is faster: {error}"));
                None
            }
        }
    }
}
