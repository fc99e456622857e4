//! The training step: how many bytes it needs, before it runs.
//!
//! This is the closed form: arithmetic over numbers that the caller hands in, no files and no flags. [`plan`] answers
//! an [`Ask`] with a row for every [`Placement`]: bytes on a device and on a host, bytes a rank sends, what fits, what
//! to take, and, where nothing fits, the single changes that would. What a run really holds is counted from its
//! compiled program; until a program is compiled, these are the numbers.

mod activations;
mod advice;
mod ask;
mod buffers;
mod changes;
mod claims;
mod closed_form;
mod communication;
pub mod deepspeed;
mod figures;
mod plan;
mod recommend;

pub use activations::{ActivationShape, Block, FeedForward, HEAD_SLICE_TOKENS, Stack};
pub use advice::{Advice, GpuAdvice, LADDER, SizeAdvice, advice_by_gpu, advice_by_size};
pub use ask::{Adapters, Ask, AskError, Offload, Placement, Shape, States, TrainType};
pub use buffers::{DeviceBuffers, device_buffers, gathered_layer, host_buffers};
pub use changes::{Change, Lever, MOST_RANKS, SHORTEST_LENGTH, changes};
pub use claims::{Claim, CountedIn, Holding, claims};
pub use closed_form::{BytesPerParameter, device_states, host_states};
pub use communication::{sent_per_step, volume_in_parameters};
pub use plan::{Footprint, Plan, Row, footprint, plan};
