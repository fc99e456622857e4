//! The interface between programs and devices: the kernel list, the [`Device`] trait, and the test every device must pass.
//!
//! A program is lowered to [`Launch`]es over [`Span`]s of arenas, one in each [`Tier`]; a device enqueues them.
//!
//! - **Kernels:** [`Kernel`] lists every op a device computes, [`Launch`] adds dtype and scratch. [`Element`] is a stored number
//!   type, [`GradStore`] says how a weight gradient is stored, [`MasterForm`] how fp32 master weights are.
//! - **Dimensions:** one struct per op: [`LinearDims`], [`RmsNormDims`], [`RopeDims`], [`AttentionDims`], [`HeadLossDims`], ….
//! - **Spans:** [`Span`] is a byte range of an arena, [`Tier`] the arena: one row a tier.
//! - **Control:** [`Recipe`] and [`StepInput`] go to the device, [`decide`] turns the ranks' reports ([`ReportLayout`]) into clipping, loss
//!   scaling and the optimizer's [`StepNumbers`], and a [`Record`] comes back. [`ExactSum`] makes the gradient norm exact.
//! - **Devices:** [`Target`] is a kind of device, which programs are compiled for; [`Device`] is one with its [`Queue`]s, events, readbacks and graphs; [`Exchange`] moves bytes between ranks' devices.
//! - **Conformance:** [`conformance()`] compares every kernel of a device with a reference device.

#![allow(
    clippy::inline_always,
    reason = "conversions are compiled with the instructions of the kernel that calls them"
)]

mod conformance;
mod control;
mod device;
mod dims;
mod element;
mod error;
mod exact_sum;
mod exchange;
mod kernel;
mod master;
mod nf4;
mod target;
mod tier;

pub use conformance::{ARENA as CONFORMANCE_ARENA, Deviation, SelfTest, conformance};
pub use control::{
    Control, GROUPS, LOSSES, RATES, RankReport, Recipe, Record, ReportLayout, StepInput, StepNumbers, decide,
};
pub use device::{CpuShare, Device, PeerMapping, Queue, READBACKS, RankSum, ReadWrite, Shared};
pub use dims::{
    AttentionDims, BalanceDims, EmbeddingDims, ExpertRowsDims, GatedRowsDims, GroupedLinearDims,
    HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, MAX_CLAMPED, PositionBiasDims, RmsNormDims,
    RopeDims, RouteDims, StoreRowsDims,
};
pub use element::{Element, is_nonfinite};
pub use error::DeviceError;
pub use exact_sum::{BLOCK, ExactSum};
pub use exchange::{BarrierCounters, Exchange, IpcHandles, PeerCopy, PeerPlace, Transport, bytes_before};
pub use kernel::{
    Access, AttentionContext, AttentionDropout, Balance, BiasGrad, CacheRange, DivergenceSpec, GradStore,
    HeadLossDw, Kernel, Launch, Rounding, RowKey, Span, TeacherSpans, TiedRowsIn, TiedRowsOut, operands,
};
pub use master::{MasterForm, canonical_master, join_low_bits, low_bits};
pub use nf4::{NF4_BLOCK, NF4_CODEBOOK, NF4_MIDPOINTS, NF4_ZERO, Nf4Record};
pub use target::Target;
pub use tier::{ByTier, Tier};
pub use zeroth_base::{MOMENTS, Moment, Optimizer};
