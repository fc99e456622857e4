//! The training loop and everything around it: batches, learning-rate schedules, checkpoints, metrics and reports.
//!
//! [`SampleOrder`] shuffles samples and [`Batches`] assembles them into micro-batches; [`Schedule`] gives the learning
//! rate; [`train`] runs a rank's steps. [`RunFolder`] and [`Reporters`] write a run's files, and [`progress`],
//! [`report`] and [`loss_curve`] display it. [`Inference`] generates text with the result. Everything is a function
//! of its inputs: the position in the data is a number of samples, so ranks need no communication to agree on it.

pub mod checkpoint;
mod data;
mod distill;
mod export;
mod generate;
mod job;
pub mod report;
mod resume;
mod run_folder;
mod schedule;
mod trainer;
mod weights;

pub use checkpoint::{ModelFile, ModelFiles, ModelFilesError};
pub use data::*;
pub use distill::*;
pub use export::*;
pub use generate::*;
pub use job::*;
pub use report::{
    EvalMetrics, EventLog, LossParts, MetricsError, MetricsFile, ReportPlan, ReportTo, ReportToError,
    Reporters, RouterLoad, RunEvent, RunFacts, RunState, StatusWriter, StepMetrics, StepSummary,
    UnstartedReports, WriteGate, loss_curve, loss_curves, progress, read_evaluation_losses, read_losses,
    resident_bytes, summarize_steps,
};
pub use resume::*;
pub use run_folder::*;
pub use schedule::*;
pub use trainer::*;
pub use weights::*;
pub use zeroth_plan::{BatchShape, Budget, Freedom, Misfit, Overhead, Processes, RowSizes, SizingError};
