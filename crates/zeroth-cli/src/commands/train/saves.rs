//! Checkpoints of a run: where, how often, and whether the disk has room for them.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use zeroth::base::{DType, format_bytes};
use zeroth::engine::State;
use zeroth::train::Saves;
use zeroth::train::checkpoint::{Checkpoint, free_bytes, list, needed_bytes};

use super::ask::{Asked, DEFAULT_STEPS};
use crate::cli::TrainArgs;

/// Numbers of checkpoints that are tried.
const TRIED: usize = 1000;

pub(super) fn saves(arguments: &TrainArgs, asked: &Asked) -> Saves {
    Saves {
        folder: arguments.output.join("checkpoints"),
        every: arguments.save_steps.unwrap_or(DEFAULT_STEPS),
        limit: arguments.save_total_limit,
        decoupled: asked.resolved.values.checkpoint.writer_decoupled,
        about: asked.job.about(asked.resolved.to_json()),
        model: asked.job.files.clone(),
    }
}

/// The checkpoints that a run found in its folder, without the one it goes on from: damaged ones that were passed over, ones
/// of later steps. A save of the same step is another folder.
pub(super) struct Earlier(HashSet<(PathBuf, u64)>);

impl Earlier {
    pub(super) fn of(checkpoints: &Path, from: Option<&Checkpoint>) -> Self {
        let from = from.and_then(|from| from.folder().canonicalize().ok());
        let found = list(checkpoints).unwrap_or_default().into_iter().map(|found| found.folder);
        let others = found.filter(|folder| from.is_none() || folder.canonicalize().ok() != from);
        Self(others.filter_map(named_inode).collect())
    }

    /// The newest that the run has written or gone on from.
    pub(super) fn newest_after(&self, checkpoints: &Path) -> anyhow::Result<Option<PathBuf>> {
        let mut all = list(checkpoints)?.into_iter().rev().map(|found| found.folder);
        Ok(all.find(|folder| named_inode(folder.clone()).is_none_or(|found| !self.0.contains(&found))))
    }
}

/// Inodes are used again, but not under the same name while its folder is replaced.
fn named_inode(folder: PathBuf) -> Option<(PathBuf, u64)> {
    let inode = std::fs::symlink_metadata(&folder).ok()?.ino();
    Some((folder, inode))
}

/// What is missing on the disk for the checkpoints and the model to come, in words, with changes that would do.
pub(super) fn lack_of_space(arguments: &TrainArgs, asked: &Asked) -> Option<String> {
    let writes = Writes::new(arguments, asked);
    let (every, limit) = (arguments.save_steps.unwrap_or(DEFAULT_STEPS), arguments.save_total_limit);
    let needed = writes.bytes(every, limit);
    let free = existing(&arguments.output).and_then(|folder| free_bytes(folder).ok())?;
    let given = arguments.disk_space.map_or(free, |typed| typed.min(free));
    if needed <= given {
        return None;
    }
    let whose = if given < free { "--disk-space gives" } else { "the disk has" };
    let kept = writes.kept(every, limit);
    let checkpoints = if kept == 1 { "1 checkpoint".to_owned() } else { format!("{kept} checkpoints") };
    let mut lack = format!(
        "{} of disk are needed for {checkpoints} of {} and a model of {} in {}, and {whose} {}: {} are missing. One of these \
         would do:",
        format_bytes(needed),
        format_bytes(writes.checkpoint),
        format_bytes(writes.model),
        arguments.output.display(),
        format_bytes(given),
        format_bytes(needed - given),
    );
    if let Some(limit) = writes.limit_within(every, limit, given) {
        lack.push_str(&format!(
            "\n  --save-total-limit {limit}: {}",
            format_bytes(writes.bytes(every, Some(limit)))
        ));
    }
    if let Some(every) = writes.every_within(every, limit, given) {
        let only = if every == 0 { ", saved only when asked to" } else { "" };
        lack.push_str(&format!(
            "\n  --save-steps {every}: {}{only}",
            format_bytes(writes.bytes(every, limit))
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

/// What a run will write: sizes, and how many checkpoints are to come.
struct Writes {
    /// Bytes of a checkpoint.
    checkpoint: u64,
    /// Bytes of the model at the end; 0 where none is written.
    model: u64,
    /// Steps of the run, and those that are done.
    steps: u64,
    done: u64,
    /// Checkpoints that are there already and take no more.
    there: u64,
}

impl Writes {
    fn new(arguments: &TrainArgs, asked: &Asked) -> Self {
        let job = &asked.job;
        let [has_first, has_second] = job.settings.optimizer.moments();
        let moments = job.settings.moments;
        let mut states = vec![(State::Weights, DType::F32)];
        states.extend(has_first.then_some((State::First, moments)));
        states.extend(has_second.then_some((State::Second, moments)));
        let run = if job.settings.types.run == DType::F32 { DType::F32 } else { DType::Bf16 };
        let model = [(State::Weights, run)];
        Self {
            checkpoint: needed_bytes(&job.table, &states, &job.folder),
            model: if asked.writes_model { needed_bytes(&job.table, &model, &job.folder) } else { 0 },
            steps: job.steps,
            done: asked.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.manifest().step),
            there: list(&arguments.output.join("checkpoints")).map_or(0, |found| found.len() as u64),
        }
    }

    /// Checkpoints that the disk will hold at once beyond those there are.
    fn kept(&self, every: u64, limit: Option<u64>) -> u64 {
        // The last step is saved, too; 0 saves nothing unasked.
        let coming = self.steps.checked_div(every).map_or(0, |whole| {
            whole.saturating_sub(self.done / every) + u64::from(!self.steps.is_multiple_of(every))
        });
        // A new one is whole before an old one goes.
        let most = limit.map_or(u64::MAX, |limit| limit.saturating_add(1));
        self.there.saturating_add(coming).min(most).saturating_sub(self.there)
    }

    fn bytes(&self, every: u64, limit: Option<u64>) -> u64 {
        self.kept(every, limit).saturating_mul(self.checkpoint).saturating_add(self.model)
    }

    /// The largest limit on checkpoints that fits.
    fn limit_within(&self, every: u64, typed: Option<u64>, given: u64) -> Option<u64> {
        let room = given.checked_sub(self.model)? / self.checkpoint.max(1);
        let limit = self.there.saturating_add(room).saturating_sub(1);
        let limit = typed.map_or(limit, |typed| limit.min(typed.saturating_sub(1)));
        (limit > 0 && self.bytes(every, Some(limit)) <= given).then_some(limit)
    }

    /// The fewest steps between checkpoints, above those typed, that fit; 0, which saves nothing unasked, where none do.
    fn every_within(&self, typed: u64, limit: Option<u64>, given: u64) -> Option<u64> {
        let room = given.checked_sub(self.model)? / self.checkpoint.max(1);
        // Evenly spread: so many checkpoints in the steps there are, one of them the last.
        let counts = (1..=room.min(self.steps)).rev().take(TRIED);
        let spread = counts.chain((room > 0).then_some(1)).map(|count| self.steps.div_ceil(count));
        let mut fitting = spread.chain([0]).filter(|every| *every == 0 || *every > typed);
        fitting.find(|every| *every != typed && self.bytes(*every, limit) <= given)
    }
}

/// The folder, or the nearest one above it that is there.
pub(super) fn existing(folder: &Path) -> Option<&Path> {
    let above = folder.ancestors().find(|folder| folder.exists())?;
    Some(if above.as_os_str().is_empty() { Path::new(".") } else { above })
}
