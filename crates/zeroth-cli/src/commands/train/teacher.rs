//! The line of the start-up summary that says what a run distils from.

use zeroth::base::format_count;
use zeroth::job::ResolvedJob;
use zeroth::program::TeacherPlacement;
use zeroth::train::{Distillation, TeacherSource};

/// The line of the start-up summary.
pub(super) fn summary(resolved_job: &ResolvedJob) -> Option<String> {
    let Distillation { spec, alpha, teacher } = resolved_job.job.objective.distillation()?;
    let from = match teacher {
        TeacherSource::Weights(teacher) => {
            let TeacherPlacement { sharded, offloaded } = resolved_job.job.settings.teacher;
            let place = match (sharded, offloaded) {
                (_, true) => "sharded in host memory",
                (true, false) => "sharded",
                (false, false) => "whole on every rank",
            };
            let kept = if teacher.quantized { ", linear layers in nf4" } else { "" };
            let total = teacher.table.total();
            let family = teacher.config.family.model_type();
            format!("{}: {family} with {} parameters, {place}{kept}", teacher.name, format_count(total))
        }
        TeacherSource::Cache { cache, tail } => format!(
            "{}: the {} most probable tokens of {}, {}",
            cache.folder().display(),
            cache.manifest().k,
            cache.manifest().teacher.name,
            if *tail { "the others as one bucket" } else { "renormalised" }
        ),
    };
    let squared = if spec.squared { " · T²" } else { "" };
    Some(format!(
        "distilled from {from}; loss {alpha} · KD{squared} + {} · CE, beta {}, temperature {}",
        1.0 - alpha,
        spec.beta,
        spec.temperature
    ))
}
