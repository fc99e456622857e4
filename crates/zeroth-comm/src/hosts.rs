//! The hosts of a job.

mod address;

pub use address::{PortChoice, Rank0Address};
