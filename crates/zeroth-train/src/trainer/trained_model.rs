//! Writes the model at the end of a run.

use std::path::Path;

use zeroth_engine::Engine;

use super::best::BestTracker;
use super::error::TrainError;
use super::export_best::export_best;
use super::options::{OnTrainEvent, TrainEvent, TrainOptions};
use crate::export::{ExportSource, RunEnd, export};
use crate::job::Job;
use crate::resume::CheckpointSaver;

/// The model of a run that was not stopped.
pub(crate) struct TrainedModel<'a> {
    pub(crate) job: &'a Job,
    pub(crate) options: &'a TrainOptions<'a>,
    pub(crate) names: &'a [String],
    /// The step that the run started after.
    pub(crate) first: u64,
    /// The last step.
    pub(crate) step: u64,
    pub(crate) ended_early: bool,
}

impl TrainedModel<'_> {
    /// Writes the best model, else that of the last step.
    pub(crate) fn export(
        self,
        engine: &mut Engine<'_>,
        saver: &CheckpointSaver<'_>,
        best: Option<&BestTracker>,
        folder: &Path,
        on_event: OnTrainEvent<'_>,
    ) -> Result<(), TrainError> {
        let Self { job, options, names, first, step, ended_early } = self;
        on_event(TrainEvent::Exporting)?;
        // A checkpoint of the last step says that the run is complete; without one, the model has to.
        let is_saved = first == step || saver.has_saved(step);
        let end = (!is_saved).then_some(RunEnd { steps: step, early: ended_early });
        if let Some((best, from)) = best.and_then(|best| Some((best, best.to_export()?))) {
            export_best(job, engine, from.step, options, folder, end)?;
            return on_event(TrainEvent::Note(&format!("the model is that of {}", best.describe(from))));
        }
        let source = ExportSource { step, checkpoint: None, end: None, base: saver.base() };
        let from = options.resume_from.filter(|from| from.manifest().step == step).map(ExportSource::of);
        let written = saver.written(step).filter(|_| engine.rank() == 0);
        let source = written.as_ref().map(ExportSource::of).or(from).unwrap_or(source);
        export(job, engine, names, folder, &ExportSource { end, ..source })?;
        if best.is_some_and(BestTracker::exports_best) {
            on_event(TrainEvent::Note(&format!(
                "the model is that of step {step}: no saved step has a finite evaluation"
            )))?;
        }
        Ok(())
    }
}
