//! Resuming from a checkpoint: re-deriving the batch decomposition, refusing other inputs, and restoring a rank's state.

use std::collections::BTreeSet;

use zeroth_engine::{Engine, RunError, StateKind};
use zeroth_kernel::Control;
use zeroth_model::{ModelConfig, ParameterTable, adapted_module};

use super::error::ResumeError;
use crate::checkpoint::{Checkpoint, ControlState, DistillEntry, Manifest};
use crate::distill::{TeacherLoad, read_teacher};
use crate::job::LoraJob;
use crate::weights::LoadProgress;
use zeroth_data::Samples;

/// Runs in O(√n): a manifest's batch may have 32 bits.
fn divisors(number: u64) -> Vec<u64> {
    let mut small: Vec<u64> =
        (1..=number.isqrt()).filter(|divisor| number.is_multiple_of(*divisor)).collect();
    let large: Vec<u64> = small.iter().rev().map(|divisor| number / divisor).collect();
    small.extend(large);
    small.dedup();
    small
}

/// Micro-batch and accumulation for `batch` samples per step on `ranks` ranks, keeping the `typed` ones. Otherwise the
/// micro-batch stays as before, or becomes the next smaller size that divides a rank's samples.
pub fn redistribute_batch(
    batch: u64,
    ranks: u64,
    typed: (Option<u64>, Option<u64>),
    before: u64,
) -> Result<(u64, u64), ResumeError> {
    if !batch.is_multiple_of(ranks) {
        return Err(ResumeError::Ranks { batch, ranks, works: divisors(batch) });
    }
    let own = batch / ranks;
    let fits = |(micro, times): &(u64, u64)| {
        typed.0.is_none_or(|typed| typed == *micro) && typed.1.is_none_or(|typed| typed == *times)
    };
    let works: Vec<(u64, u64)> = divisors(own).into_iter().map(|micro| (micro, own / micro)).collect();
    let nearest = works.iter().filter(|cut| fits(cut)).max_by_key(|(micro, _)| {
        // The largest that does not exceed the previous one; else the smallest.
        if *micro <= before { (1, *micro) } else { (0, u64::MAX - micro) }
    });
    nearest.copied().ok_or_else(|| {
        let micro = typed.0.map(|micro| format!("train_micro_batch_size_per_gpu {micro}"));
        let times = typed.1.map(|times| format!("gradient_accumulation_steps {times}"));
        let requested = [micro, times].into_iter().flatten().collect::<Vec<_>>().join(" with ");
        ResumeError::Batch { batch, ranks, requested, works: works.clone() }
    })
}

/// Checks that the data is that of the checkpoint.
pub fn check_same_data(manifest: &Manifest, samples: &Samples) -> Result<(), ResumeError> {
    let (before, now) = (manifest.data.samples, samples.count().get());
    if manifest.data.hash == data_hash(samples) { Ok(()) } else { Err(ResumeError::Data { before, now }) }
}

/// Checks that the adapters of a command are those of the checkpoint: whether there are any, their shapes and their scale.
/// Dropout may differ.
pub fn check_same_adapters(
    checkpoint: &Checkpoint,
    lora: Option<&LoraJob>,
    table: &ParameterTable,
) -> Result<(), ResumeError> {
    let (folder, manifest) = (checkpoint.folder().display().to_string(), checkpoint.manifest());
    if manifest.lora.is_some() != lora.is_some() {
        return Err(ResumeError::TrainType { checkpoint: folder, is_lora: manifest.lora.is_some() });
    }
    let (Some(saved), Some(LoraJob { lora: now, .. })) = (&manifest.lora, lora) else { return Ok(()) };
    let numbers = [
        ("--lora-rank", now.rank.to_string(), saved.rank.to_string()),
        ("--lora-alpha", now.alpha.to_string(), saved.alpha.to_string()),
        ("--use-rslora", now.rslora.to_string(), saved.rslora.to_string()),
    ];
    let differs = numbers.into_iter().filter(|(_, now, saved)| now != saved);
    let mut differences: Vec<String> = differs
        .map(|(flag, now, saved)| format!("{flag} is {now}, that of the checkpoint {saved}"))
        .collect();
    let before: BTreeSet<&str> =
        manifest.model.parameters.iter().filter_map(|p| adapted_module(&p.name)).collect();
    let after: BTreeSet<&str> = table.iter().filter_map(|p| Some(p.adapts.as_ref()?.module())).collect();
    if let Some(module) = before.difference(&after).next() {
        differences
            .push(format!("--target-modules leaves out {module}, which has an adapter in the checkpoint"));
    }
    if let Some(module) = after.difference(&before).next() {
        differences
            .push(format!("--target-modules includes {module}, which has no adapter in the checkpoint"));
    }
    if differences.is_empty() {
        Ok(())
    } else {
        Err(ResumeError::Adapters { checkpoint: folder, differences })
    }
}

/// Checks that the model computes what that of the checkpoint does. Checkpoints of earlier versions do not say it.
pub fn check_same_function(checkpoint: &Checkpoint, model: &ModelConfig) -> Result<(), ResumeError> {
    let Some(saved) = &checkpoint.manifest().model.function else { return Ok(()) };
    let differences = model.function().differences(saved, "the checkpoint");
    if differences.is_empty() {
        return Ok(());
    }
    let checkpoint = checkpoint.folder().display().to_string();
    Err(ResumeError::Function { checkpoint, differences })
}

/// Checks that the distillation of a command is that of the checkpoint: the teacher, as far as it is known, and the loss. The
/// teacher's placement may differ.
pub fn check_same_distillation(
    checkpoint: &Checkpoint,
    now: Option<&DistillEntry>,
) -> Result<(), ResumeError> {
    let differences = DistillEntry::differences(checkpoint.manifest().distillation.as_ref(), now);
    if differences.is_empty() {
        return Ok(());
    }
    let checkpoint = checkpoint.folder().display().to_string();
    Err(ResumeError::Distillation { checkpoint, differences })
}

/// The data's hash in the format of manifests.
pub(crate) fn data_hash(samples: &Samples) -> String {
    format!("{:016x}", samples.hash())
}

/// Loads a rank's shard of a checkpoint: weights, moments and the control block.
pub(crate) fn restore(
    checkpoint: &Checkpoint,
    engine: &mut Engine<'_>,
    names: &[String],
    teacher: &mut Option<TeacherLoad<'_>>,
    report: &mut dyn FnMut(u64, u64),
) -> Result<(), RunError> {
    let manifest = checkpoint.manifest();
    let mut progress = LoadProgress::new(engine.compiled(), manifest.states.len(), report);
    engine.load(&mut |param, range, elements| {
        let end = range.end;
        if !read_teacher(teacher, param.index(), &range, elements)? {
            checkpoint.read_f32(StateKind::Weights, &names[param.index()], range, elements)?;
        }
        progress.loaded(param.index(), end);
        Ok(())
    })?;
    restore_optimizer(checkpoint, engine, names, &mut progress)
}

/// Loads a rank's shard of the optimizer's state: moments and the control block.
pub(crate) fn restore_optimizer(
    checkpoint: &Checkpoint,
    engine: &mut Engine<'_>,
    names: &[String],
    progress: &mut LoadProgress<'_>,
) -> Result<(), RunError> {
    let manifest = checkpoint.manifest();
    for state in engine.states() {
        // A different optimizer starts with fresh state.
        if state != StateKind::Weights && manifest.states.contains(&state) {
            progress.next_state();
            engine.restore(state, &mut |param, range, elements| {
                let end = range.end;
                checkpoint.read_f32(state, &names[param.index()], range, elements)?;
                progress.loaded(param.index(), end);
                Ok(())
            })?;
        }
    }
    let started = engine.control()?;
    engine.resume_at(manifest.step, &with(started, &manifest.control))
}

/// The starting control block with the saved fields applied.
fn with(started: Control, saved: &ControlState) -> Control {
    Control {
        applied: saved.applied,
        skipped: saved.skipped,
        loss_scale: saved.loss_scale,
        iteration: saved.iteration,
        last_overflow: saved.last_overflow,
        hysteresis_left: saved.hysteresis_left,
        ..started
    }
}

/// The fields of the control block that a checkpoint keeps.
pub(crate) fn control_state(control: &Control) -> ControlState {
    ControlState {
        applied: control.applied,
        skipped: control.skipped,
        loss_scale: control.loss_scale,
        iteration: control.iteration,
        last_overflow: control.last_overflow,
        hysteresis_left: control.hysteresis_left,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batch_is_redistributed_over_any_divisor_of_it() {
        let open = (None, None);
        assert_eq!(redistribute_batch(12, 2, open, 2), Ok((2, 3)));
        assert_eq!(redistribute_batch(12, 1, open, 2), Ok((2, 6)));
        assert_eq!(redistribute_batch(12, 3, open, 2), Ok((2, 2)));
        assert_eq!(redistribute_batch(12, 4, open, 2), Ok((1, 3)));
        assert_eq!(redistribute_batch(12, 12, open, 2), Ok((1, 1)));
        assert_eq!(redistribute_batch(12, 2, (Some(6), None), 2), Ok((6, 1)));
        assert_eq!(redistribute_batch(12, 2, (None, Some(2)), 2), Ok((3, 2)));
    }

    #[test]
    fn errors_list_valid_alternatives() {
        assert_eq!(
            redistribute_batch(12, 5, (None, None), 2).unwrap_err().to_string(),
            "the checkpoint was trained with 12 samples per step, which resuming keeps: 5 ranks cannot share them evenly; \
             1, 2, 3, 4, 6, 12 can"
        );
        assert_eq!(
            redistribute_batch(12, 2, (Some(4), None), 2).unwrap_err().to_string(),
            "the checkpoint was trained with 12 samples per step, which resuming keeps: train_micro_batch_size_per_gpu 4 on \
             2 ranks does not give that; leave batch sizes open, or use one of these for train_micro_batch_size_per_gpu × \
             gradient_accumulation_steps: 1 × 6, 2 × 3, 3 × 2, 6 × 1"
        );
    }

    #[test]
    fn divisors_are_sorted_and_fast_for_large_batches() {
        assert_eq!(divisors(1), [1]);
        assert_eq!(divisors(36), [1, 2, 3, 4, 6, 9, 12, 18, 36]);
        assert_eq!(divisors(37), [1, 37]);
        assert_eq!(divisors(1 << 32), (0..=32).map(|power| 1 << power).collect::<Vec<u64>>());
        let error = redistribute_batch(1 << 32, 3, (None, None), 1).unwrap_err().to_string();
        assert!(error.ends_with("4194304, 8388608 and 9 more can"), "{error}");
    }
}
