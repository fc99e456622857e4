//! Exports the model of the best checkpoint at the end of a run.

use std::path::PathBuf;

use zeroth_engine::Engine;
use zeroth_model::DEFAULT_SHARD_BYTES;

use super::error::TrainError;
use super::options::TrainOptions;
use crate::checkpoint::{Checkpoint, step_folder};
use crate::export::{ExportDestination, ExportError, ExportSource, RunEnd, export_from, propagate_failure};
use crate::job::Job;

/// The folder of a step's checkpoint: in the run's own folder or, if it was resumed from another run, in that one.
fn folder_of(step: u64, options: &TrainOptions<'_>) -> Option<PathBuf> {
    let own = options.checkpoints.map(|checkpoints| checkpoints.folder.clone());
    let before = options.resume_from.and_then(|from| from.folder().parent()).map(PathBuf::from);
    let folders = own.into_iter().chain(before).map(|folder| folder.join(step_folder(step)));
    folders.into_iter().find(|folder| folder.join("manifest.json").is_file())
}

/// Whether a step's checkpoint exists, as rank 0 sees it. Collective.
pub(crate) fn exists(engine: &Engine<'_>, step: u64, options: &TrainOptions<'_>) -> Result<bool, TrainError> {
    let own = u64::from(folder_of(step, options).is_some());
    Ok(engine.all_gather(step, "best checkpoint", &own)?[0] != 0)
}

/// Writes the model of a step's checkpoint to `to`, on rank 0; collective over all ranks.
pub(crate) fn export_best(
    job: &Job,
    engine: &Engine<'_>,
    step: u64,
    options: &TrainOptions<'_>,
    to: &std::path::Path,
    end: Option<RunEnd>,
) -> Result<(), ExportError> {
    let dtype = job.export_dtype();
    let export = || {
        let folder = folder_of(step, options).ok_or(ExportError::NoBest { step })?;
        let checkpoint = Checkpoint::open(&folder)?;
        checkpoint.verify()?;
        let source = ExportSource { end, ..ExportSource::of(&checkpoint) };
        export_from(&checkpoint, to, ExportDestination::Overwrite, dtype, DEFAULT_SHARD_BYTES, &source)
    };
    let exported = (engine.rank() == 0).then(export).transpose();
    propagate_failure(engine, step, exported).map(drop)
}
