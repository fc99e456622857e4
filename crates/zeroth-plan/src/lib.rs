//! Memory planning: how many bytes a training job needs, before it runs.
//!
//! The plan is a closed form: arithmetic over the caller's numbers, without files or flags. [`plan`] answers a
//! [`PlanRequest`] with a row for every [`Placement`]: bytes per device and host, bytes sent per rank, what fits, a
//! recommendation and, where nothing fits, single changes after which something does. A run counts its memory from its
//! compiled program instead.

mod activations;
mod advice;
mod buffers;
mod changes;
mod claims;
mod closed_form;
mod communication;
pub mod deepspeed;
mod format;
mod plan;
mod recommend;
mod request;
mod row;
mod state_bytes;

pub use activations::{ActivationShape, Block, FeedForward, HEAD_SLICE_TOKENS, Stack};
pub use advice::{Advice, GpuAdvice, SizeAdvice, TRY_ORDER, advice_by_gpu, advice_by_size};
pub use buffers::{DeviceBuffers, device_buffers, gathered_layer, host_buffers};
pub use changes::{Change, ChangeKind, MOST_RANKS, SHORTEST_LENGTH, changes};
pub use claims::{Claim, ClaimRange, CountedIn, claims};
pub use closed_form::{device_states, host_states};
pub use communication::{bytes_sent_per_step, volume_in_parameters};
pub use plan::{Plan, plan};
pub use request::{
    Adapters, BytesPerParameter, Offload, Placement, PlanError, PlanRequest, Shape, States, TrainType,
};
pub use row::{Footprint, Row, footprint};
