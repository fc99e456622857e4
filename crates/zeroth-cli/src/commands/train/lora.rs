//! `--train-type lora`: checks the weights of a run's adapters and sums them up.

use anyhow::Context as _;
use zeroth::model::Lora;
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::{GivenBase, Job, LoraJob, LoraWeights, check_adapter_base, check_base, describe_lora};

use super::resolve_job::ResolvedJob;

/// Checks the weights that a run starts from, and, where it is resumed, that the base is that of the checkpoint, as far as
/// it is known without reading all of it. Returns notes.
pub(super) fn check_weights(
    job: &Job,
    lora: &LoraJob,
    checkpoint: Option<&Checkpoint>,
) -> anyhow::Result<Vec<String>> {
    let weights = LoraWeights::open(job, lora, checkpoint.is_some())?;
    if let Some(checkpoint) = checkpoint {
        check_base(checkpoint, &lora.base, |saved| &saved.sample, &weights.sample()?)?;
    }
    let mut notes = weights.notes(lora);
    if let Some(adapter) = lora.adapter.as_ref().filter(|_| checkpoint.is_none()) {
        let given = GivenBase { name: &lora.base, folder: &job.folder };
        let note = check_adapter_base(adapter, given, lora.allows_other_base, || weights.sample());
        notes.extend(note.context("--adapter")?);
    }
    Ok(notes)
}

/// The line of the start-up summary: what is trained, and how the base is kept.
pub(super) fn summary(resolved_job: &ResolvedJob) -> Option<String> {
    let LoraJob { lora, quantized, adapter, .. } = resolved_job.job.lora.as_ref()?;
    let Lora { alpha, rslora, dropout, .. } = lora;
    let scale = if *rslora { " (rslora)" } else { "" };
    let kept = if *quantized { "; the base's linear layers are kept in nf4" } else { "" };
    let from =
        adapter.as_ref().map(|folder| format!("; starts from {}", folder.display())).unwrap_or_default();
    let words = describe_lora(lora, &resolved_job.job.table);
    Some(format!("{words}; alpha {alpha}{scale}, dropout {dropout}{kept}{from}"))
}
