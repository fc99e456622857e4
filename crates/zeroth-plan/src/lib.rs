//! Memory planning: how many bytes a training job needs, before it runs.
//!
//! [`plan()`] answers a [`PlanRequest`] with a row for every [`Placement`]: bytes per device and host, bytes sent per rank,
//! what fits, a recommendation and, where nothing fits, single changes after which something does. With a model that
//! can be trained, the step of every row is compiled, and its bytes are those of the run; otherwise they are closed
//! forms, and the row says so. [`Sizing`] searches the settings that a config leaves open, for runs and for plans.

mod advice;
mod between_hosts;
mod budget;
mod by_program;
mod changes;
mod choice;
mod claims;
mod closed_form;
mod communication;
pub mod deepspeed;
mod format;
mod misfit;
mod most_tokens;
mod overhead;
mod plan;
mod prefetch;
mod recommend;
mod request;
mod row;
mod row_sizes;
mod sizing;
mod state_bytes;
mod teacher;
mod trainable_model;

pub use advice::{Advice, GpuAdvice, SizeAdvice, TRY_ORDER, advice_by_gpu, advice_by_size};
pub use between_hosts::{BetweenHosts, WithHpz, bytes_between_hosts, hpz_extra_bytes};
pub use budget::Budget;
pub use by_program::compile;
pub use changes::{Change, ChangeKind, MOST_RANKS, SHORTEST_LENGTH, changes};
pub use choice::summary;
pub use claims::{Claim, ClaimRange, CountedIn, claims};
pub use closed_form::{device_states, host_states};
pub use communication::{bytes_sent_per_step, volume_in_parameters};
pub use misfit::Misfit;
pub use overhead::{DataSize, Overhead, Processes};
pub use plan::{Plan, plan};
pub use prefetch::PrefetchLimit;
pub use request::{
    BytesPerParameter, OffloadedStates, Placement, PlanError, PlanRequest, PlannedRows, States, TrainType,
};
pub use row::{Basis, Footprint, Row, footprint};
pub use row_sizes::RowSizes;
pub use sizing::{BatchShape, Detail, Freedom, Sizing, SizingError, batch_of};
pub use teacher::{PlannedSource, PlannedTeacher};
pub use trainable_model::{PlanDevice, TrainableModel};
