//! The training loop of a rank: what it starts from, its steps and evaluations, requests from outside, and how it ends.

mod best;
mod control;
mod error;
mod evaluate;
mod export_best;
mod heap;
mod load;
mod options;
mod step_batches;
mod threads;
mod train;
mod trained_model;

pub use control::ControlRequest;
pub(crate) use control::StepStatus;
pub use error::TrainError;
pub use heap::release_freed_memory;
pub use options::{OnTrainEvent, TrainEvent, TrainHooks, TrainOptions, TrainOutcome};
pub use threads::{ThreadsError, start_threads};
pub use train::train;
