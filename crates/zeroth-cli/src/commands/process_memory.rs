//! Whether a program of one process fits, with what the process itself takes: the executable, threads, and buffers that weights
//! are read into.

use zeroth::kernel::Tier;
use zeroth::machine::{Machine, probe_host};
use zeroth::plan::Overhead;
use zeroth::program::Compiled;
use zeroth::train::resident_bytes;

/// What the process held before it opened a tokenizer or data, which are in memory when a program is fitted.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProcessMemory {
    at_start: u64,
}

/// A program that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryShortfall {
    /// Bytes of the program in the memory that is short.
    pub(super) program: u64,
    /// Bytes of the process outside of it, in host memory.
    pub(super) process: u64,
    /// What is free.
    pub(super) free: u64,
}

impl ProcessMemory {
    pub(super) fn at_start() -> Self {
        Self { at_start: resident_bytes() }
    }

    /// What is missing for a program, of what is free now.
    pub(super) fn shortfall(self, compiled: &Compiled, machine: &Machine) -> Option<MemoryShortfall> {
        let device = machine.device_memory().map(|memory| memory.free);
        self.shortfall_of(compiled, device, probe_host().host_memory_available())
    }

    fn shortfall_of(
        self,
        compiled: &Compiled,
        device: Option<u64>,
        host: Option<u64>,
    ) -> Option<MemoryShortfall> {
        let overhead = Overhead::of_inference(compiled);
        let process = overhead.total - overhead.process.min(self.at_start);
        let arenas = compiled.memory.arenas();
        let (on_device, on_host) = if compiled.target.is_host() {
            (0, arenas.sum())
        } else {
            (arenas[Tier::Device], arenas[Tier::Host])
        };
        let lacks = |program: u64, process: u64, free: Option<u64>| {
            let free = free.filter(|free| *free < program + process)?;
            Some(MemoryShortfall { program, process, free })
        };
        lacks(on_device, 0, device).or_else(|| lacks(on_host, process, host))
    }
}
