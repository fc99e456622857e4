//! What a training loop is given, what it reports while it runs, and how it ends.

use std::path::PathBuf;
use std::time::Duration;

use zeroth_engine::{InstructionTime, Trace};

use super::control::ControlRequest;
use super::error::TrainError;
use crate::checkpoint::Checkpoint;
use crate::report::timing::StepProfile;
use crate::report::{EvalMetrics, StepMetrics};
use crate::resume::CheckpointOptions;

/// Options of a rank's training loop.
pub struct TrainOptions<'a> {
    /// Folder for the trained model; `None` skips the export.
    pub export_to: Option<PathBuf>,
    /// Records every instruction for a timeline.
    pub trace: bool,
    /// Emits [`TrainEvent::StepProfile`] with the instruction times of every step.
    pub profile: bool,
    /// Enqueues a step before reading back the previous one, unless an evaluation or a save comes between them, so that
    /// an asynchronous device never waits for the host.
    pub run_ahead: bool,
    /// Steps between measurements of resident memory.
    pub rss_interval: u64,
    /// Checkpoint settings; `None` saves none.
    pub checkpoints: Option<&'a CheckpointOptions>,
    /// The checkpoint to resume from.
    pub resume_from: Option<&'a Checkpoint>,
}

/// Receives the events of a training loop.
pub type OnTrainEvent<'a> = &'a mut dyn FnMut(TrainEvent<'_>) -> Result<(), TrainError>;

/// Connects a training loop to its caller.
pub struct TrainHooks<'a> {
    /// Receives events as training progresses. An error ends the run.
    pub on_event: OnTrainEvent<'a>,
    /// Polled after every step for requests from outside.
    pub control: &'a dyn Fn() -> ControlRequest,
}

/// An event of a rank's training loop.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum TrainEvent<'a> {
    /// The transport between GPU ranks, described; once, before the first step.
    TransportChosen(&'a str),
    /// Progress of loading weights and optimizer state.
    Loading {
        /// Elements loaded, approximately.
        loaded: u64,
        /// Elements to load.
        total: u64,
    },
    /// Weights and state are loaded; the first step comes next.
    Loaded,
    /// The timeline of a step as requested by [`ControlRequest::Trace`], as lines of this rank.
    Timeline {
        step: u64,
        /// Events in Chrome's trace format, one per line.
        lines: &'a str,
    },
    /// All ranks have handled their [`TrainEvent::Timeline`] of this step.
    TimelineComplete(u64),
    /// An evaluation begins.
    EvalStarting,
    /// The model is about to be written.
    Exporting,
    /// Instruction times of a step, just before its [`TrainEvent::Step`].
    StepProfile(StepProfile<'a>),
    /// A completed step.
    Step(&'a StepMetrics),
    /// A completed evaluation, with its instruction times.
    Eval(&'a EvalMetrics, &'a [InstructionTime]),
    /// A checkpoint of this step is about to be written: metrics up to here must be on disk.
    CheckpointStarting(u64),
    /// A checkpoint was committed.
    CheckpointSaved {
        step: u64,
        /// How long training was stalled by it.
        stalled: Duration,
    },
    /// A message for the user.
    Note(&'a str),
}

/// The outcome of a rank's training loop.
#[derive(Debug)]
pub struct TrainOutcome {
    /// Metrics of the last step.
    pub last: Option<StepMetrics>,
    /// The recorded timeline.
    pub trace: Option<Trace>,
    /// Whether it was stopped before its last step.
    pub stopped: bool,
    /// The strongest request of any rank after the last step run.
    pub request: ControlRequest,
}
