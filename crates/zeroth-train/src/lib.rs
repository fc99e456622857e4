//! The loop around the step: which samples a step takes, at which learning rate, and what a run leaves on disk.
//!
//! [`data`] holds the samples, [`Order`] says which one comes when, [`Batches`] puts them together for a rank,
//! [`Schedule`] gives the learning rate, [`RunFolder`] and [`Reporters`] keep what happened, [`progress`],
//! [`report`] and [`loss_curve`] show it; [`Inference`] lets the trained model speak. All of it is a function of its inputs:
//! a position in the data is a number of samples seen,
//! and no rank has to ask another one.

mod batch;
pub mod checkpoint;
mod curve;
mod evaluate;
mod export;
mod export_record;
mod finite;
mod fit;
pub mod from_config;
mod generate;
mod heap;
mod job;
mod leftovers;
mod loading;
mod meeting;
mod metrics;
mod model_files;
mod order;
mod overhead;
mod overwrite;
mod permutation;
pub mod progress;
mod rank;
pub mod report;
mod resident;
mod resume;
mod row_sizes;
mod run_folder;
mod run_inputs;
mod run_lock;
mod save;
mod schedule;
mod staged;
mod step_batches;
mod threads;
mod unstarted;
mod weights;

pub use batch::{BatchShape, Batches, MicroBatch};
pub use curve::{loss_curve, loss_curves};
pub use export::ExportError;
pub use export_record::check_export;
pub use fit::{Budget, Choice, Freedom, Misfit};
pub use generate::{
    BatchSize, End, GenerateError, Generated, Generation, Generator, Inference, begin_id, stop_ids,
};
pub use heap::release_freed_memory;
pub use job::{Evaluation, Job, JobError};
pub use meeting::Wish;
pub use metrics::{
    EvaluationLine, MetricsError, MetricsFile, StepCounts, StepLine, count_steps, read_evaluation_losses,
    read_losses,
};
pub use model_files::{ModelFile, ModelFiles, ModelFilesError};
pub use order::{Length, LengthError, Order, Place};
pub use overhead::{Overhead, Processes};
pub use rank::{Chores, Done, Ended, TrainError, train};
pub use report::{Report, ReportPlan, ReportToError, Reporters};
pub use resident::resident_bytes;
pub use resume::{ResumeError, changes, cut_again, same_data};
pub use row_sizes::RowSizes;
pub use run_folder::{Existing, RunFolder, RunFolderError};
pub use run_inputs::Input;
pub use run_lock::LockError;
pub use save::{SaveError, Saves};
pub use schedule::{
    HuggingFace, HuggingFaceShape, LrRangeTest, Momentum, OneCycle, Schedule, ScheduleError, Warmup,
    WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupShape, warmup_steps,
};
pub use threads::{ThreadsError, start_threads};
pub use unstarted::Unstarted;
pub use weights::Weights;
