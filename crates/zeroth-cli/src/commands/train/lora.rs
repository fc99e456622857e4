//! `--train-type lora`: the adapters of a run, from the flags or from an adapter folder.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use zeroth::model::{Adapter, Lora, ParameterTable, adapts_experts, add_adapters};
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::{GivenBase, Job, LoraJob, LoraWeights, check_adapter_base, check_base, describe_lora};

use super::resolve_job::ResolvedJob;
use crate::cli::TrainArgs;

/// The adapters to train, and the table with them.
pub(super) fn resolve(
    arguments: &TrainArgs,
    base: &ParameterTable,
    folder: &Path,
    notes: &mut Vec<String>,
) -> anyhow::Result<(LoraJob, ParameterTable)> {
    let flags = &arguments.lora;
    let quantized = flags.quantizes()?;
    let given = flags.adapter_folder();
    let adapter = given.map(|folder| Adapter::open(Path::new(folder), base)).transpose();
    let adapter = adapter.map_err(|error| anyhow::anyhow!("--adapter: {error}"))?;
    if flags.allow_other_base && given.is_none() {
        notes.push("--allow-other-base has no effect without --adapter".to_owned());
    }
    let mut lora = flags.lora(given.zip(adapter.as_ref().map(Adapter::lora)))?;
    if flags.lora_dropout.is_none() && lora.dropout > 0.0 && adapts_experts(base, &lora)? {
        lora.dropout = 0.0;
        notes.push("LoRA dropout is 0: adapters of experts and routers have none".to_owned());
    }
    let mut table = add_adapters(base, &lora)?;
    if quantized {
        table.quantize();
    }
    if let (Some(given), Some(adapter)) = (given, &adapter) {
        check_targets(given, adapter, &table)?;
        if flags.init_lora_weights.is_some() {
            notes.push(
                "--init-lora-weights has no effect with --adapter, whose weights are the first".to_owned(),
            );
        }
    }
    let job = LoraJob {
        lora,
        init: flags.init_lora_weights.unwrap_or_default(),
        adapter: given.map(PathBuf::from),
        base: base_name(&arguments.model, folder),
        random_base: flags.random_weights,
        quantized,
        allows_other_base: flags.allow_other_base,
    };
    Ok((job, table))
}

/// Refuses `--target-modules` that differ from the modules of `--adapter`.
fn check_targets(folder: &str, adapter: &Adapter, table: &ParameterTable) -> anyhow::Result<()> {
    let known = table.by_name();
    let (own, here) = (adapter.table().iter().count(), table.iter().filter(|p| p.trained).count());
    let missing = adapter.table().iter().find(|parameter| !known.contains_key(parameter.name.as_str()));
    anyhow::ensure!(
        missing.is_none() && own == here,
        "--adapter {folder} continues an adapter, with its own targets: it has {own} matrices, and --target-modules asks for \
         {here}{}; leave --target-modules out, or --adapter",
        missing.map(|parameter| format!(" without `{}`", parameter.name)).unwrap_or_default()
    );
    Ok(())
}

/// What `adapter_config.json` calls the base: a folder by its full path, which holds from any working directory, else its
/// Hub name.
fn base_name(given: &str, folder: &Path) -> String {
    match Path::new(given).canonicalize() {
        Ok(path) if path.is_dir() => path.display().to_string(),
        Ok(_) => folder.display().to_string(),
        Err(_) => given.to_owned(),
    }
}

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
