//! Loads what a rank starts from: the model's weights, the base of adapters, or a checkpoint, and a teacher beside them.

use zeroth_engine::Engine;

use super::error::TrainError;
use super::options::{OnTrainEvent, TrainEvent};
use crate::checkpoint::{Checkpoint, DistillEntry};
use crate::distill::{Distillation, TeacherLoad, TeacherWeights};
use crate::job::Job;
use crate::resume::{FrozenModels, check_same_distillation, restore};
use crate::weights::{InitialWeights, LoraWeights};

/// Loads this rank's shards, and says which frozen models they are of. Collective over all ranks.
pub(crate) fn load(
    job: &Job,
    engine: &mut Engine<'_>,
    names: &[String],
    resume_from: Option<&Checkpoint>,
    on_event: OnTrainEvent<'_>,
) -> Result<FrozenModels, TrainError> {
    let mut reported = Ok(());
    let mut report = |loaded, total| {
        if reported.is_ok() {
            reported = on_event(TrainEvent::Loading { loaded, total });
        }
    };
    let teacher = job.objective.distillation().and_then(Distillation::model);
    let teacher = teacher.map(|teacher| TeacherWeights::open(teacher, job.seed)).transpose()?;
    let mut teacher = teacher.map(|weights| TeacherLoad::beside_student(weights, engine, names));
    let mut base = None;
    if let Some(lora) = &job.lora {
        let weights = LoraWeights::open(job, lora, resume_from.is_some())?;
        base = Some(weights.load(job, lora, engine, resume_from, &mut teacher, &mut report)?);
    } else if let Some(checkpoint) = resume_from {
        restore(checkpoint, engine, names, &mut teacher, &mut report)?;
    } else {
        let weights = InitialWeights::open(&job.folder, &job.model, &job.table, job.seed)?;
        weights.load(&job.table, engine, names, &mut teacher, &mut report)?;
    }
    reported?;
    let teacher = teacher.map(|teacher| teacher.finish(engine)).transpose()?;
    if let (Some(from), Some(distillation)) = (resume_from, job.objective.distillation()) {
        let now = DistillEntry::of(distillation);
        let now = DistillEntry { teacher: teacher.clone().unwrap_or_else(|| now.teacher.clone()), ..now };
        check_same_distillation(from, Some(&now))?;
    }
    Ok(FrozenModels { base, teacher })
}
