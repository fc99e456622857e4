//! Checkpoint options of a run, and whether they fit on the disk.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use zeroth::base::{DType, counted, format_bytes};
use zeroth::engine::StateKind;
use zeroth::job::{ResolvedJob, nearest_existing};
use zeroth::train::checkpoint::{Checkpoint, free_bytes, list, needed_bytes};
use zeroth::train::{CheckpointOptions, Interval, RunSteps};

use crate::cli::TrainArgs;

/// Maximum number of save intervals tried.
const TRIED: usize = 1000;

pub(super) fn options(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> CheckpointOptions {
    CheckpointOptions {
        folder: arguments.output.join("checkpoints"),
        interval: resolved_job.strategies.saving,
        on_best: resolved_job.strategies.saves_best,
        weights_only: arguments.evaluation.save_only_model,
        limit: arguments.save_total_limit,
        decoupled: resolved_job.resolved.values.checkpoint.writer_decoupled,
        manifest: resolved_job.job.manifest_template(resolved_job.resolved.to_json()),
        model: resolved_job.job.files.clone(),
    }
}

/// Checkpoints found in the run folder, without the one being resumed: damaged ones, and ones of later steps. Saving the
/// same step again creates another folder.
pub(super) struct Earlier(HashSet<(PathBuf, u64)>);

impl Earlier {
    pub(super) fn of(checkpoints: &Path, from: Option<&Checkpoint>) -> Self {
        let from = from.and_then(|from| from.folder().canonicalize().ok());
        let found = list(checkpoints).unwrap_or_default().into_iter().map(|found| found.folder);
        let others = found.filter(|folder| from.is_none() || folder.canonicalize().ok() != from);
        Self(others.filter_map(named_inode).collect())
    }

    /// The newest checkpoint that the run has written or resumed from.
    pub(super) fn newest_after(&self, checkpoints: &Path) -> anyhow::Result<Option<PathBuf>> {
        let mut all = list(checkpoints)?.into_iter().rev().map(|found| found.folder);
        Ok(all.find(|folder| named_inode(folder.clone()).is_none_or(|found| !self.0.contains(&found))))
    }
}

/// Inodes are reused, but not under the same name while its folder is being replaced.
fn named_inode(folder: PathBuf) -> Option<(PathBuf, u64)> {
    let inode = std::fs::symlink_metadata(&folder).ok()?.ino();
    Some((folder, inode))
}

/// The error if the disk is too small for the coming checkpoints and model, with changes that would fit.
pub(super) fn lack_of_space(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> Option<String> {
    let needs = DiskNeeds::new(arguments, resolved_job);
    let (interval, limit) = (resolved_job.strategies.saving, arguments.save_total_limit);
    let needed = needs.bytes(interval, limit);
    let free = nearest_existing(&arguments.output).and_then(|folder| free_bytes(folder).ok())?;
    let given = arguments.disk_space.map_or(free, |typed| typed.min(free));
    if needed <= given {
        return None;
    }
    let whose = if given < free { "--disk-space gives" } else { "the disk has" };
    let kept = needs.kept(interval, limit);
    let checkpoints = counted(kept, "checkpoint");
    // Another number of steps may contradict --load-best-model-at-end.
    let steps_typed = match interval {
        _ if arguments.evaluation.load_best_model_at_end || resolved_job.strategies.saves_best => None,
        Interval::Steps(every) => Some(every.get()),
        Interval::Never | Interval::Epoch => None,
    };
    let mut lack = format!(
        "{} of disk space are needed for {checkpoints} of {} and a model of {} in {}, but {whose} {}: {} are missing. Any \
         of these would fit:",
        format_bytes(needed),
        format_bytes(needs.checkpoint),
        format_bytes(needs.model),
        arguments.output.display(),
        format_bytes(given),
        format_bytes(needed - given),
    );
    if let Some(limit) = needs.limit_within(interval, limit, given) {
        lack.push_str(&format!(
            "\n  --save-total-limit {limit}: {}",
            format_bytes(needs.bytes(interval, Some(limit)))
        ));
    }
    if let Some(every) = steps_typed.and_then(|every| needs.every_within(every, limit, given)) {
        let only = if every == 0 { ", saved only on request" } else { "" };
        lack.push_str(&format!(
            "\n  --save-steps {every}: {}{only}",
            format_bytes(needs.bytes(Interval::steps(every), limit))
        ));
    }
    match arguments.disk_space {
        Some(_) if needed <= free => {
            lack.push_str(&format!("\n  --disk-space {needed}: the disk has {}", format_bytes(free)));
        }
        _ => lack.push_str(&format!("\n  an --output on a disk with {} free", format_bytes(needed))),
    }
    Some(lack)
}

/// Disk space that a run will need.
struct DiskNeeds {
    /// Size of a checkpoint.
    checkpoint: u64,
    /// Size of the exported model; 0 if none.
    model: u64,
    /// The steps of the run, and those completed.
    run: RunSteps,
    done: u64,
    /// Evaluations to come that may be saved as the best so far.
    best: u64,
    /// Whether the best checkpoint is kept besides the newest.
    keeps_best: bool,
    /// Checkpoints that already exist.
    existing: u64,
}

impl DiskNeeds {
    fn new(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> Self {
        let (job, strategies) = (&resolved_job.job, resolved_job.strategies);
        let done = resolved_job.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.manifest().step);
        let states: Vec<_> = StateKind::of_optimizer(job.settings.optimizer)
            .filter(|state| *state == StateKind::Weights || !arguments.evaluation.save_only_model)
            .map(|state| {
                (state, if state == StateKind::Weights { DType::F32 } else { job.settings.moment_dtype })
            })
            .collect();
        let (table, model) = (job.saved_table(), [(StateKind::Weights, job.export_dtype())]);
        Self {
            checkpoint: needed_bytes(&table, &states, &job.folder),
            model: if resolved_job.writes_model { needed_bytes(&table, &model, &job.folder) } else { 0 },
            run: job.run_steps(),
            done,
            best: if strategies.saves_best { strategies.evaluation.count(done, job.run_steps()) } else { 0 },
            keeps_best: job.best_policy().is_some()
                || resolved_job.checkpoint.as_ref().is_some_and(|found| found.manifest().best.is_some()),
            existing: list(&arguments.output.join("checkpoints")).map_or(0, |found| found.len() as u64),
        }
    }

    /// The largest number of additional checkpoints on disk at once.
    fn kept(&self, interval: Interval, limit: Option<u64>) -> u64 {
        let coming = interval.count(self.done, self.run) + self.best;
        // A new checkpoint is complete before an old one is removed.
        let least = if self.keeps_best { 2 } else { 1 };
        let most = limit.map_or(u64::MAX, |limit| limit.max(least).saturating_add(1));
        self.existing.saturating_add(coming).min(most).saturating_sub(self.existing)
    }

    fn bytes(&self, interval: Interval, limit: Option<u64>) -> u64 {
        self.kept(interval, limit).saturating_mul(self.checkpoint).saturating_add(self.model)
    }

    /// The largest --save-total-limit that fits.
    fn limit_within(&self, interval: Interval, typed: Option<u64>, given: u64) -> Option<u64> {
        let room = given.checked_sub(self.model)? / self.checkpoint.max(1);
        let limit = self.existing.saturating_add(room).saturating_sub(1);
        let limit = typed.map_or(limit, |typed| limit.min(typed.saturating_sub(1)));
        (limit > 0 && self.bytes(interval, Some(limit)) <= given).then_some(limit)
    }

    /// The smallest --save-steps above the given one that fits; 0 (save only on request) if none does.
    fn every_within(&self, typed: u64, limit: Option<u64>, given: u64) -> Option<u64> {
        let room = given.checked_sub(self.model)? / self.checkpoint.max(1);
        // Evenly spaced checkpoints, the last of them at the last step.
        let counts = (1..=room.min(self.run.total)).rev().take(TRIED);
        let spread = counts.chain((room > 0).then_some(1)).map(|count| self.run.total.div_ceil(count));
        let mut fitting = spread.chain([0]).filter(|every| *every == 0 || *every > typed);
        fitting.find(|every| *every != typed && self.bytes(Interval::steps(*every), limit) <= given)
    }
}
