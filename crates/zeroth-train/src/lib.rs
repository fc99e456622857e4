//! The training loop and everything around it: batches, learning-rate schedules, checkpoints, metrics and reports.
//!
//! [`SampleOrder`] shuffles samples and [`Batches`] assembles them into micro-batches; [`Schedule`] gives the learning
//! rate; [`train`] runs a rank's steps. [`RunFolder`] and [`Reporters`] write a run's files, and [`progress`],
//! [`report`] and [`loss_curve`] display it. [`Inference`] generates text with the result. Everything is a function
//! of its inputs: the position in the data is a number of samples, so ranks need no communication to agree on it.

mod adapter_base;
mod append_file;
mod base_hash;
mod batch;
mod best;
mod changes;
pub mod checkpoint;
mod control;
mod distill;
mod evaluate;
mod events;
mod export;
mod export_best;
mod export_error;
mod export_record;
mod finite;
pub mod from_config;
mod generate;
mod heap;
mod initial_weights;
mod interval;
mod job;
mod load;
mod load_progress;
mod lora;
mod lora_weights;
mod loss_curve;
mod merge;
mod metrics;
mod model_files;
mod objective;
mod output_folder;
mod overwrite_plan;
mod permutation;
pub mod progress;
pub mod report;
mod resident;
mod resume;
mod router_load;
mod run_files;
mod run_folder;
mod run_folder_error;
mod run_input;
mod sample_order;
mod save;
mod schedule;
mod split;
mod staged_files;
mod stale_files;
mod status;
mod step_batches;
mod threads;
mod train;
mod train_error;
mod trained_model;
mod unstarted_run;

pub use adapter_base::{AdapterBaseError, GivenBase, OtherBase, check_adapter_base};
pub use batch::{Batches, MicroBatch};
pub use best::{BestMetric, BestPolicy};
pub use changes::{SettingChange, config_changes};
pub use control::ControlRequest;
pub use distill::{
    BlockChecksums, CacheJob, CacheManifest, CacheProgress, CacheWriter, CachedData, Distillation,
    MakeCacheError, OpenedCache, TeacherCache, TeacherCacheError, TeacherError, TeacherModel, TeacherSource,
    TeacherWeights, VerifiedCache,
};
pub use events::{EventLog, RunEvent};
pub use export_error::ExportError;
pub use export_record::{RunEnd, check_export, completed_run, exported_step};
pub use generate::{
    BatchSize, BeamSettings, EarlyStopping, End, GenerateError, Generated, Generation, Generator, Inference,
    begin_id, stop_ids,
};
pub use heap::release_freed_memory;
pub use initial_weights::InitialWeights;
pub use interval::{Interval, RunSteps};
pub use job::{Evaluation, Job};
pub use lora::{LoraJob, adapted_modules, adapter_table, base_table, describe as describe_lora};
pub use lora_weights::{LoraWeights, LoraWeightsError, check_base};
pub use loss_curve::{loss_curve, loss_curves};
pub use merge::{MergeBase, MergeOutput};
pub use metrics::{
    EvalMetrics, LossParts, MetricsError, MetricsFile, StepMetrics, StepSummary, read_evaluation_losses,
    read_losses, summarize_steps,
};
pub use model_files::{ModelFile, ModelFiles, ModelFilesError};
pub use objective::JobObjective;
pub use output_folder::{check_output, check_writable};
pub use report::{Report, ReportPlan, ReportToError, Reporters, UnstartedReports};
pub use resident::resident_bytes;
pub use resume::{
    ResumeError, check_same_adapters, check_same_data, check_same_distillation, check_same_function,
    redistribute_batch,
};
pub use router_load::RouterLoad;
pub use run_folder::{ExistingRun, RunFolder};
pub use run_folder_error::RunFolderError;
pub use run_input::RunInput;
pub use sample_order::{EpochSample, RunLength, RunLengthError, SampleOrder};
pub use save::{CheckpointOptions, SaveError};
pub use schedule::{
    HuggingFace, HuggingFaceShape, LrRangeTest, Momentum, OneCycle, Schedule, ScheduleError, Warmup,
    WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupShape, WarmupStableDecay, warmup_steps,
};
pub use split::{SplitError, share_of, split_dataset};
pub use status::{RunFacts, RunState, StatusWriter, WriteGate};
pub use threads::{ThreadsError, start_threads};
pub use train::{OnTrainEvent, TrainEvent, TrainHooks, TrainOptions, TrainOutcome, train};
pub use train_error::TrainError;
pub use unstarted_run::UnstartedRun;
pub use zeroth_plan::{BatchShape, Budget, Freedom, Misfit, Overhead, Processes, RowSizes, SizingError};
