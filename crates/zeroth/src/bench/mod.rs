//! Benchmarks that combine several crates: collectives against a memory copy, and whole training steps against the
//! CPU's limit. Kernels and disk are in [`zeroth_machine::bench`].

mod collectives;
mod step;

pub use collectives::{CollectivesError, collectives};
pub use step::{ModelSize, StepBenchError, StepBenchOptions, StepReport, StepShares, whole_step};
