//! From what a user asks for to a job: one resolver for runs, plans, launchers and users of the library.
//!
//! A [`JobRequest`] is plain data. [`resolve`] reads the inputs and makes a [`ResolvedJob`] of it, or says what is wrong with
//! what was asked for. Ranks resolve the same request with the [`LauncherHandoff`] of their launcher. [`resolve_plan`] makes
//! of it what a plan needs to compile the same step, without data.

mod config;
mod data;
mod data_error;
mod data_files;
mod error;
mod events;
mod handoff;
mod lora;
mod machine;
mod pairs;
mod plan;
mod rank_facts;
mod rank_share;
mod request;
mod resolve;
mod resolved_job;
mod resume;
mod row_length;
mod strategies;
mod teacher;
mod weights;

pub use data::Reading;
pub use data_error::DataRequestError;
pub use data_files::{data_files, nearest_existing, refuse_output_inside, system_message, token_cache};
pub use error::JobError;
pub use events::{OnEvent, ResolveEvent};
pub use handoff::{
    HANDOFF_VARIABLE, InheritedInputs, Inputs, InputsError, LauncherHandoff, ResumePoint, TokenCaches,
};
pub use lora::{LoraRequest, LoraRequestError, ResolvedLora};
pub use machine::{REGION, StartedRanks, cpus, gpus, usual_ranks};
pub use pairs::{PairLengths, PairRequest};
pub use plan::{
    ParameterCount, PlanOptions, PlanRequestError, PlannedModel, ResolvedPlan, builtin_note, resolve_plan,
};
pub use rank_facts::{RankFacts, collectives_asked, differences as rank_differences};
pub use rank_share::{GpuIdentity, GpuShare, RankShare};
pub use request::{DataRequest, JobRequest, ReadingRequest};
pub use resolve::resolve;
pub use resolved_job::ResolvedJob;
pub use resume::{ResumeRequestError, is_inside, newest_resumable_or_none, run_name};
pub use strategies::{DEFAULT_STEPS, Every, LOGGING_STEPS, StepCount, Strategies, StrategyRequest};
pub use teacher::{
    DistillRequest, DistillRequestError, Student, TeacherConfig, check_tokens, open_teacher,
    teacher_placement,
};
pub use weights::JobWeightsError;
