//! Checkpoints of a run: where, how often, and whether the disk has room for them.

use std::path::Path;

use zeroth::base::{DType, format_bytes};
use zeroth::step::run::State;
use zeroth::train::Saves;
use zeroth::train::checkpoint::{free_bytes, list, needed_bytes};

use super::ask::{Asked, DEFAULT_STEPS};
use crate::cli::TrainArgs;

pub(super) fn saves(arguments: &TrainArgs, asked: &Asked) -> Saves {
    Saves {
        folder: arguments.output.join("checkpoints"),
        every: arguments.save_steps.unwrap_or(DEFAULT_STEPS),
        limit: arguments.save_total_limit,
        decoupled: asked.resolved.is_on("checkpoint.writer.decoupled"),
        about: asked.job.about(asked.resolved.to_json()),
        model: asked.job.files.clone(),
    }
}

/// What is missing on the disk for the checkpoints and the model to come, in words.
pub(super) fn lack_of_space(arguments: &TrainArgs, asked: &Asked) -> Option<String> {
    let job = &asked.job;
    let every = arguments.save_steps.unwrap_or(DEFAULT_STEPS);
    let done = asked.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.manifest().step);
    let coming = match every {
        0 => 0,
        _ => (job.steps / every).saturating_sub(done / every) + u64::from(!job.steps.is_multiple_of(every)),
    };
    // A new one is whole before an old one goes; those that are there already take no more.
    let there = list(&arguments.output.join("checkpoints")).map_or(0, |found| found.len() as u64);
    let kept = arguments
        .save_total_limit
        .map_or(coming, |limit| (there + coming).min(limit + 1).saturating_sub(there));
    let [has_first, has_second] = job.settings.optimizer.moments();
    let moments = job.settings.moments;
    let mut states = vec![(State::Weights, DType::F32)];
    states.extend(has_first.then_some((State::First, moments)));
    states.extend(has_second.then_some((State::Second, moments)));
    let checkpoint = needed_bytes(&job.table, &states, &job.folder);
    let run = if job.settings.types.run == DType::F32 { DType::F32 } else { DType::Bf16 };
    let model =
        if asked.writes_model { needed_bytes(&job.table, &[(State::Weights, run)], &job.folder) } else { 0 };
    let needed = kept * checkpoint + model;
    let free = existing(&arguments.output).and_then(|folder| free_bytes(folder).ok())?;
    let given = arguments.disk_space.map_or(free, |typed| typed.min(free));
    if needed <= given {
        return None;
    }
    let whose = if given < free { "--disk-space gives" } else { "the disk has" };
    let fewer = match arguments.save_total_limit {
        Some(1) => "",
        _ => "keep fewer (--save-total-limit 1), ",
    };
    let checkpoints = if kept == 1 { "1 checkpoint".to_owned() } else { format!("{kept} checkpoints") };
    Some(format!(
        "{} of disk are needed for {checkpoints} of {} and a model of {} in {}, and {whose} {}: {} are missing: \
         {fewer}save less often (--save-steps {}), or choose another --output",
        format_bytes(needed),
        format_bytes(checkpoint),
        format_bytes(model),
        arguments.output.display(),
        format_bytes(given),
        format_bytes(needed - given),
        job.steps
    ))
}

/// The folder, or the nearest one above it that is there.
pub(super) fn existing(folder: &Path) -> Option<&Path> {
    let above = folder.ancestors().find(|folder| folder.exists())?;
    Some(if above.as_os_str().is_empty() { Path::new(".") } else { above })
}
