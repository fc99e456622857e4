//! What a machine can do: processors, memory, accelerators, disks and libraries as found on it, and the
//! figures of known cards for planning a machine that is not there.

pub mod bench;
mod beside;
mod cards;
mod control;
pub mod cpu;
pub mod cuda;
mod device;
mod exchange;
mod kernel;
mod master;
mod probe;
mod rates;

pub use beside::{ARENA as BESIDE_ARENA, beside_processor};
pub use cards::{Card, UnknownCard, card, cards};
pub use control::{Control, GROUPS, RATES, Recipe, Record, Report, StepInput, StepNumbers};
pub use device::{Device, DeviceError, NOTES, Queue, RankSum, ReadWrite, Seat, Shared, Sight, Target};
pub use exchange::{Doors, Exchange, Take, Way, Words};
pub use kernel::{Access, Kernel, Landing, Launch, Optimizer, OwnTokens, Rounding, Span, Tier, WaitingRows};
pub use master::{MasterForm, rest, settled, with_rest};
pub use probe::{
    Attempt, ComputeCapability, Cpu, DeviceMemory, Disk, DiskError, Gpu, Gpus, GroupLimit, HugePages,
    InstructionSets, KernelPath, Library, LibraryState, Limit, Machine, Memory, SharedMemory, Unknown, disk,
    probe, probe_processor,
};
pub use rates::Rates;
