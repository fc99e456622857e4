//! What every device can compute: the list of kernels, their dimensions and operands, and the [`Device`] trait.
//!
//! A program is lowered to [`Launch`]es over [`Span`]s of arenas; a device enqueues them. [`conformance()`] is the test that
//! every implementation of [`Device`] must pass.

#![allow(
    clippy::inline_always,
    reason = "conversions are compiled with the instructions of the kernel that calls them"
)]

mod conformance;
mod control;
mod device;
mod dims;
mod element;
mod exact_sum;
mod exchange;
mod kernel;
mod master;

pub use conformance::{ARENA as CONFORMANCE_ARENA, SelfTest, conformance};
pub use control::{Control, GROUPS, RATES, Recipe, Record, Report, StepInput, StepNumbers, Told, decide};
pub use device::{CpuShare, Device, DeviceError, PeerMapping, Queue, READBACKS, RankSum, ReadWrite, Shared};
pub use dims::{
    AttentionDims, EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, RmsNormDims,
    RopeDims,
};
pub use element::{Element, is_endless};
pub use exact_sum::{BLOCK, ExactSum};
pub use exchange::{BarrierCounters, Exchange, IpcHandles, Take, Transport, before};
pub use kernel::{
    Access, GradStore, Kernel, Launch, Optimizer, OwnTokens, Rounding, RowKey, Span, Tier, WaitingRows,
};
pub use master::{MasterForm, rest, settled, with_rest};
