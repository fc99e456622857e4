//! Looking at the machine this program runs on: everything best effort, nothing started, nothing changed.
//!
//! What cannot be read is `None`, with the reason in [`Machine::unknown`].

mod cgroup;
mod cpu;
mod disk;
mod gpu;
mod memory;
mod mounts;
#[cfg(test)]
mod test_library;
mod software;
mod tree;

use std::fmt;
use std::path::Path;

use serde::Serialize;

pub use cpu::Cpu;
pub use disk::{Disk, DiskError, disk};
pub use gpu::{ComputeCapability, Gpu, Gpus};
pub use memory::{GroupLimit, HugePages, Limit, Memory, SharedMemory};
pub use software::{Attempt, Library, LibraryState};

use tree::Tree;

/// What this machine offers to this process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Processors and their instruction sets.
    pub cpu: Cpu,
    /// Host memory and what limits its use.
    pub memory: Memory,
    /// NVIDIA GPUs, or why there are none.
    pub gpus: Gpus,
    /// The disk of the current folder.
    pub disk: Option<Disk>,
    /// Libraries that are opened at run time.
    pub software: Vec<Library>,
    /// What could not be found out, and why.
    pub unknown: Vec<Unknown>,
}

/// One thing that could not be found out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unknown {
    /// The thing, by the path of its field: `memory.available`.
    pub what: &'static str,
    /// What stood in the way.
    pub why: String,
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

/// Looks at this machine. Never fails and starts no process; without a GPU it takes a few milliseconds.
pub fn probe() -> Machine {
    look(gpu::probe, |gpus| software::probe(matches!(gpus, Gpus::NoDriver { .. })))
}

/// Looks at this machine but for its GPUs and their libraries, for a process that will not use them: in every one that opens
/// them they take 150 MB.
pub fn probe_host() -> Machine {
    look(|_| Gpus::NoDevice { why: "none was looked for".to_owned() }, |_| Vec::new())
}

fn look(gpus: impl FnOnce(&mut Notes) -> Gpus, software: impl FnOnce(&Gpus) -> Vec<Library>) -> Machine {
    let tree = Tree::system();
    let mut notes = Notes::default();
    let cpu = cpu::probe(&tree, &mut notes);
    let memory = memory::probe(&tree, &mut notes);
    let gpus = gpus(&mut notes);
    let disk = notes.keep("disk", disk(Path::new(".")));
    let software = software(&gpus);
    Machine { cpu, memory, gpus, disk, software, unknown: notes.0 }
}

impl Machine {
    /// The memory of the GPU with the least free bytes: every rank plans with the same budget. `None` without GPU.
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

    /// Bytes of host memory that this process can still take: what the kernel calls available, or what its
    /// control groups leave, whichever is less.
    pub fn host_memory_available(&self) -> Option<u64> {
        let groups = self.memory.groups.iter().map(|group| group.headroom);
        self.memory.available.into_iter().chain(groups).min()
    }

    /// Bytes of host memory that this process could ever have: the machine's, or the least limit of its groups.
    pub fn host_memory_total(&self) -> Option<u64> {
        let groups = self.memory.groups.iter().map(|group| group.limit);
        self.memory.total.into_iter().chain(groups).min()
    }
}

/// Collects what could not be found out, in the order it was looked for.
#[derive(Debug, Default)]
struct Notes(Vec<Unknown>);

impl Notes {
    fn add(&mut self, what: &'static str, why: impl fmt::Display) {
        self.0.push(Unknown { what, why: why.to_string() });
    }

    /// The value, or nothing and a note.
    fn keep<T>(&mut self, what: &'static str, found: Result<T, impl fmt::Display>) -> Option<T> {
        found.map_err(|why| self.add(what, why)).ok()
    }

    /// What `parse` makes of a file of the system, or nothing and a note.
    fn look<T>(
        &mut self,
        what: &'static str,
        tree: &Tree,
        path: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.keep(what, tree.read(path))?;
        self.keep(what, parse(&text).ok_or_else(|| format!("{path} does not say it in a form that is known")))
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
    fn this_machine_is_probed_and_written_as_json() {
        let machine = probe();
        let available = machine.host_memory_available().unwrap();
        assert!(available > 0 && available <= machine.host_memory_total().unwrap(), "{machine:?}");
        assert!(machine.cpu.threads >= 1);
        let json = serde_json::to_value(&machine).unwrap();
        assert_eq!(json["memory"]["total"], machine.memory.total.unwrap());
        assert!(json["gpus"]["state"].is_string(), "{json}");
    }

    #[test]
    fn the_gpu_with_the_least_free_memory_sets_the_budget() {
        let machine = with_gpus(vec![gpu("A", 80, Some(79)), gpu("B", 80, Some(20)), gpu("C", 48, Some(47))]);
        let memory = machine.device_memory().unwrap();
        assert_eq!(memory, DeviceMemory { free: 20, total: 80, name: "B".to_owned(), count: 3 });
    }

    #[test]
    fn a_gpu_whose_free_memory_is_unknown_counts_with_all_of_it() {
        assert_eq!(with_gpus(vec![gpu("A", 80, None)]).device_memory().unwrap().free, 80);
        assert_eq!(with_gpus(vec![]).device_memory(), None);
    }

    #[test]
    fn host_memory_is_the_least_of_the_machine_and_every_group() {
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
