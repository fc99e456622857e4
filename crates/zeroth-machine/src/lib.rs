//! The machine: hardware probe, table of known GPUs, and benchmarks.

pub mod bench;
mod device_kind;
mod known_gpus;
mod probe;
mod rates;

pub use device_kind::DeviceKind;
pub use known_gpus::{KnownGpu, UnknownGpu, known_gpu, known_gpus, other_sizes};
pub use probe::{
    Attempt, ComputeCapability, Cpu, DeviceMemory, Disk, DiskError, Gpu, GpuMemory, Gpus, GroupLimit,
    HostMemory, HugePages, Library, LibraryState, Limit, Machine, SharedMemory, Unknown, disk, probe,
    probe_host,
};
pub use rates::Rates;
