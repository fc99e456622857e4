//! The passes, one file each: functions from a program to a program.

mod checkpoint;
mod gather;
mod in_place;
mod lower;
mod offload;
mod operands;
mod overlap;
mod reduce;
mod unpack;
mod update;

pub(super) use checkpoint::checkpoint;
pub(super) use gather::gather;
pub use in_place::in_place;
pub(super) use lower::{lower, lower_inference, lower_top_log_probs};
pub(super) use offload::{hold, offload};
pub(super) use operands::operands;
pub(super) use overlap::overlap;
pub(super) use reduce::reduce;
pub(super) use unpack::unpack;
pub(super) use update::update;
