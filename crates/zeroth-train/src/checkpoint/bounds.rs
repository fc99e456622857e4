//! Range checks for a manifest's numbers. A checksum proves that they were written, not that they make sense. The
//! limits are far beyond any real run, and nothing derived from numbers within them overflows.

use std::collections::HashSet;
use std::path::Path;

use zeroth_model::MAX_PARAMETERS;

use super::file_names::{parse_step_folder, step_folder};
use super::lora_entry::LoraEntry;
use super::manifest::{BestEntry, ControlState, Evaluated, Manifest};

/// Steps of a run.
const MAX_STEPS: u64 = 1 << 40;
/// Samples per step.
const MAX_BATCH: u64 = 1 << 32;
/// Samples per epoch, and over all steps.
pub(crate) const MAX_SAMPLES: u64 = 1 << 62;
/// Ranks that wrote the checkpoint.
const MAX_RANKS: u64 = 1 << 20;
/// Total bytes of all files.
const MAX_BYTES: u64 = 1 << 62;
const MAX_STAGE: u64 = 3;
/// Inner width of an adapter.
const MAX_LORA_RANK: u64 = 1 << 24;

/// Checks every number of a manifest; the error describes the first that is out of range.
pub(super) fn check(manifest: &Manifest) -> Result<(), String> {
    let Manifest { step, samples_seen, batch, ranks, .. } = *manifest;
    within("step", step, 0, MAX_STEPS)?;
    within("batch.train_batch_size", batch.train_batch_size, 1, MAX_BATCH)?;
    within("batch.micro_batch", batch.micro_batch, 1, MAX_BATCH)?;
    within("batch.accumulation", batch.accumulation, 1, MAX_BATCH)?;
    within("ranks", ranks, 1, MAX_RANKS)?;
    if let Some(group) = manifest.group.filter(|group| *group == 0 || !ranks.is_multiple_of(*group)) {
        return Err(format!("`group` is {group}, and {ranks} ranks cannot be groups of {group}"));
    }
    within("stage", u64::from(manifest.stage), 0, MAX_STAGE)?;
    within("data.samples", manifest.data.samples, 1, MAX_SAMPLES)?;
    within("samples_seen", samples_seen, 0, MAX_SAMPLES)?;
    let product = batch.micro_batch.checked_mul(batch.accumulation).and_then(|own| own.checked_mul(ranks));
    if product != Some(batch.train_batch_size) {
        return Err(format!(
            "`batch.train_batch_size` is {}, but `batch.micro_batch` × `batch.accumulation` × `ranks` is {} × {} × {ranks}",
            batch.train_batch_size, batch.micro_batch, batch.accumulation
        ));
    }
    if step.checked_mul(batch.train_batch_size) != Some(samples_seen) {
        return Err(format!(
            "`samples_seen` is {samples_seen}, but {step} steps take {} samples each",
            batch.train_batch_size
        ));
    }
    check_control(&manifest.control, step)?;
    manifest.best.as_ref().map_or(Ok(()), |best| check_best(best, step))?;
    manifest.lora.as_ref().map_or(Ok(()), check_lora)?;
    check_elements(manifest)?;
    check_files(manifest)
}

fn check_lora(lora: &LoraEntry) -> Result<(), String> {
    within("lora.rank", lora.rank, 1, MAX_LORA_RANK)?;
    if !(lora.alpha.is_finite() && lora.alpha > 0.0) {
        return Err(format!("`lora.alpha` is {}: expected a finite number above 0", lora.alpha));
    }
    if !(0.0..1.0).contains(&lora.dropout) {
        return Err(format!("`lora.dropout` is {}: expected at least 0 and below 1", lora.dropout));
    }
    within("lora.base.total", lora.base.total, 1, MAX_PARAMETERS)
}

fn check_control(control: &ControlState, step: u64) -> Result<(), String> {
    let ControlState { applied, skipped, loss_scale, iteration, last_overflow, hysteresis_left: _ } =
        *control;
    if applied.checked_add(skipped).is_none_or(|steps| steps > step) {
        return Err(format!("`control` counts {applied} applied and {skipped} skipped steps of {step}"));
    }
    within("control.iteration", iteration, 0, step)?;
    if !(-1..=iteration.cast_signed()).contains(&last_overflow) {
        return Err(format!("`control.last_overflow` is {last_overflow}: expected -1 to {iteration}"));
    }
    if !(loss_scale.is_finite() && loss_scale > 0.0) {
        return Err(format!("`control.loss_scale` is {loss_scale}: expected a finite number above 0"));
    }
    Ok(())
}

fn check_best(best: &BestEntry, step: u64) -> Result<(), String> {
    within("best.stale", best.stale, 0, step)?;
    for (name, evaluated) in [("best.evaluated", best.evaluated), ("best.saved", best.saved)] {
        let Some(Evaluated { step: at, value }) = evaluated else { continue };
        within(&format!("{name}.step"), at, 1, step)?;
        if !value.is_finite() {
            return Err(format!("`{name}.value` is {value}: expected a finite number"));
        }
    }
    Ok(())
}

fn check_elements(manifest: &Manifest) -> Result<(), String> {
    let mut total = 0_u64;
    for entry in &manifest.model.parameters {
        let sum = entry.elements().and_then(|elements| total.checked_add(elements));
        total = sum.filter(|sum| *sum <= MAX_PARAMETERS).ok_or_else(|| {
            format!("`{}` has the shape {:?}: too many elements for a model", entry.name, entry.shape)
        })?;
    }
    if total == manifest.model.total {
        Ok(())
    } else {
        Err(format!("`model.total` is {}, but its parameters have {total} elements", manifest.model.total))
    }
}

fn check_files(manifest: &Manifest) -> Result<(), String> {
    let mut names = HashSet::new();
    let mut total = 0_u64;
    for file in &manifest.files {
        if !names.insert(&file.name) {
            return Err(format!("it lists `{}` twice", file.name));
        }
        let sum = total.checked_add(file.bytes).filter(|sum| *sum <= MAX_BYTES);
        total =
            sum.ok_or_else(|| format!("`{}` has an implausible size of {} bytes", file.name, file.bytes))?;
    }
    Ok(())
}

/// Checks that a folder named `step-N` holds step N. Copies may have any other name.
pub(super) fn check_folder(folder: &Path, manifest: &Manifest) -> Result<(), String> {
    // `.` and `..` have no name of their own.
    let named = if folder.file_name().is_some() { Ok(folder.to_owned()) } else { folder.canonicalize() };
    let name = named.ok().and_then(|folder| Some(folder.file_name()?.to_str()?.to_owned()));
    match name.as_deref().and_then(parse_step_folder) {
        Some(step) if step != manifest.step => Err(format!(
            "its `step` is {}, but its folder is {}: rename the folder to {}",
            manifest.step,
            step_folder(step),
            step_folder(manifest.step)
        )),
        _ => Ok(()),
    }
}

fn within(name: &str, value: u64, least: u64, most: u64) -> Result<(), String> {
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err(format!("`{name}` is {value}: expected {least} to {most}"))
    }
}
