//! Probes this machine: best effort, without starting processes or changing anything.
//!
//! What cannot be read is `None`, with the reason in [`Machine::unknown`].

mod cgroup;
mod cpu;
mod disk;
mod gpu;
mod memory;
mod mounts;
mod notes;
mod software;
#[cfg(test)]
mod test_library;
mod tree;

use std::path::Path;

use serde::Serialize;

pub use cpu::Cpu;
pub use disk::{Disk, DiskError, disk};
pub use gpu::{ComputeCapability, Gpu, GpuMemory, Gpus};
pub use memory::{GroupLimit, HostMemory, HugePages, Limit, SharedMemory};
pub use notes::Unknown;
pub use software::{Attempt, Library, LibraryState};

use notes::Notes;
use tree::Tree;

/// The hardware and software available to this process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// CPUs and their instruction sets.
    pub cpu: Cpu,
    /// Host memory and its limits.
    pub memory: HostMemory,
    /// NVIDIA GPUs, or why there are none.
    pub gpus: Gpus,
    /// The disk of the current folder.
    pub disk: Option<Disk>,
    /// Libraries loaded at run time.
    pub software: Vec<Library>,
    /// Facts that could not be determined.
    pub unknown: Vec<Unknown>,
}

/// The memory a rank can plan with on the GPUs of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// Bytes free on the GPU that has the least; all of its bytes where the free ones are not known.
    pub free: u64,
    /// Bytes of that GPU.
    pub total: u64,
    /// Name of that GPU.
    pub name: String,
    /// Number of GPUs.
    pub count: usize,
}

/// Probes this machine. Never fails; takes a few milliseconds without a GPU.
pub fn probe() -> Machine {
    probe_with(gpu::probe, |gpus| software::probe(matches!(gpus, Gpus::NoDriver { .. })))
}

/// Probes this machine without GPUs and their libraries, which take 150 MB in every process that loads them.
pub fn probe_host() -> Machine {
    probe_with(|_| Gpus::NoDevice { why: "GPUs were not probed".to_owned() }, |_| Vec::new())
}

fn probe_with(
    gpus: impl FnOnce(&mut Notes) -> Gpus,
    software: impl FnOnce(&Gpus) -> Vec<Library>,
) -> Machine {
    let tree = Tree::system();
    let mut notes = Notes::default();
    let cpu = cpu::probe(&tree, &mut notes);
    let memory = memory::probe(&tree, &mut notes);
    let gpus = gpus(&mut notes);
    let disk = notes.or_note("disk", disk(Path::new(".")));
    let software = software(&gpus);
    Machine { cpu, memory, gpus, disk, software, unknown: notes.0 }
}

impl Machine {
    /// The memory of the GPU with the least free bytes, which every rank plans with. `None` without a GPU.
    pub fn device_memory(&self) -> Option<DeviceMemory> {
        let Gpus::Found { devices, .. } = &self.gpus else { return None };
        let least = devices.iter().min_by_key(|gpu| (gpu.free.unwrap_or(gpu.total), gpu.total))?;
        Some(DeviceMemory {
            free: least.free.unwrap_or(least.total),
            total: least.total,
            name: least.name.clone(),
            count: devices.len(),
        })
    }

    /// Bytes of host memory still available to this process: the lesser of the kernel's estimate and its cgroups' headroom.
    pub fn host_memory_available(&self) -> Option<u64> {
        let groups = self.memory.groups.iter().map(|group| group.headroom);
        self.memory.available.into_iter().chain(groups).min()
    }

    /// Bytes of host memory this process could ever have: the lesser of the machine's and its cgroups' limits.
    pub fn host_memory_total(&self) -> Option<u64> {
        let groups = self.memory.groups.iter().map(|group| group.limit);
        self.memory.total.into_iter().chain(groups).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, total: u64, free: Option<u64>) -> Gpu {
        Gpu {
            index: 0,
            name: name.to_owned(),
            uuid: None,
            compute_capability: ComputeCapability { major: 9, minor: 0 },
            multiprocessors: 132,
            total,
            free,
        }
    }

    fn with_gpus(devices: Vec<Gpu>) -> Machine {
        Machine { gpus: Gpus::Found { driver_version: "13.0".to_owned(), devices }, ..probe() }
    }

    #[test]
    fn this_machine_is_probed_and_serialized() {
        let machine = probe();
        let available = machine.host_memory_available().unwrap();
        assert!(available > 0 && available <= machine.host_memory_total().unwrap(), "{machine:?}");
        assert!(machine.cpu.threads >= 1);
        let json = serde_json::to_value(&machine).unwrap();
        assert_eq!(json["memory"]["total"], machine.memory.total.unwrap());
        assert!(json["gpus"]["state"].is_string(), "{json}");
    }

    #[test]
    fn the_gpu_with_the_least_free_memory_is_planned_with() {
        let machine = with_gpus(vec![gpu("A", 80, Some(79)), gpu("B", 80, Some(20)), gpu("C", 48, Some(47))]);
        let memory = machine.device_memory().unwrap();
        assert_eq!(memory, DeviceMemory { free: 20, total: 80, name: "B".to_owned(), count: 3 });
    }

    #[test]
    fn unknown_free_memory_counts_as_all_free() {
        assert_eq!(with_gpus(vec![gpu("A", 80, None)]).device_memory().unwrap().free, 80);
        assert_eq!(with_gpus(vec![]).device_memory(), None);
    }

    #[test]
    fn host_memory_is_the_least_of_machine_and_cgroups() {
        let group = |limit, headroom| GroupLimit {
            group: "/job".into(),
            limit,
            used: limit - headroom,
            reclaimable: 0,
            headroom,
        };
        let mut machine = probe();
        machine.memory.total = Some(1000);
        machine.memory.available = Some(700);
        machine.memory.groups = vec![group(400, 300), group(500, 100)];
        assert_eq!(machine.host_memory_available(), Some(100));
        assert_eq!(machine.host_memory_total(), Some(400));
        machine.memory.groups.clear();
        assert_eq!(machine.host_memory_available(), Some(700));
    }
}
