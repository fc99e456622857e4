//! Measurements that join several parts: collectives beside a copy of the memory, and whole training steps beside the
//! processor's limit. Single kernels and the disk: [`zeroth_machine::bench`].

mod collectives;
mod step;

pub use collectives::{CollectivesError, collectives};
pub use step::{ModelSize, StepAsk, StepBenchError, StepReport, StepShares, whole_step};
