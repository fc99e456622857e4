//! What a machine can do: processors, memory, accelerators, disks and libraries as found on it, and the
//! figures of known cards for planning a machine that is not there.

mod cards;
pub mod cpu;
mod probe;

pub use cards::{Card, UnknownCard, card, cards};
pub use probe::{
    Attempt, ComputeCapability, Cpu, DeviceMemory, Disk, DiskError, Gpu, Gpus, GroupLimit, HugePages,
    InstructionSets, KernelPath, Library, LibraryState, Limit, Machine, Memory, SharedMemory, Unknown, disk,
    probe,
};
