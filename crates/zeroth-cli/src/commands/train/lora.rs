//! The line of the start-up summary that says what adapters are trained.

use zeroth::job::ResolvedJob;
use zeroth::model::Lora;
use zeroth::train::{LoraJob, describe_lora};

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
