//! A rank's share of a machine, for runs and for plans.

use zeroth::machine::{Gpus, Machine};
use zeroth::train::Processes;

use crate::value_args::DeviceArg;

/// Size of each rank's shared-memory send region; larger messages are sent in pieces of half of it.
pub(crate) const REGION: usize = 8 << 20;

/// GPUs of a machine.
pub(crate) fn gpus(machine: &Machine) -> u64 {
    match &machine.gpus {
        Gpus::Found { devices, .. } => devices.len() as u64,
        _ => 0,
    }
}

/// The ranks of a job that names none: one for every GPU, or one on CPUs.
pub(crate) fn usual_ranks(device: DeviceArg, machine: &Machine) -> u64 {
    match device {
        DeviceArg::Cuda => gpus(machine).max(1),
        DeviceArg::Cpu => 1,
    }
}

/// CPUs that this process may use.
pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Free bytes of a GPU for each rank: with more ranks than GPUs, ranks share them.
pub(crate) fn free_device_memory(machine: &Machine, ranks: u64) -> Option<u64> {
    let sharing = ranks.div_ceil(gpus(machine).max(1));
    machine.device_memory().map(|memory| memory.free / sharing)
}

/// How ranks are started. The rayon pool for data and weight initialisation has one thread per CPU.
pub(crate) fn processes() -> Processes {
    Processes { region: REGION as u64, threads: cpus() as u64 }
}
