//! `--resume`: which checkpoint, and what of it a command keeps.

use std::path::Path;

use anyhow::Context;
use zeroth::config::resolve::{Flags, Origin, Resolved};
use zeroth::config::schema::TopLevel;
use zeroth::train::checkpoint::{Checkpoint, Manifest, newest_good};
use zeroth::train::{changes, cut_again};

use crate::cli::TrainArgs;

/// How a rank's samples of a step are cut.
const CUT: [&str; 2] = ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
/// How many changed keys are listed.
const SHOWN: usize = 12;

/// The checkpoint to go on from, verified; none where `auto` finds none.
pub(super) fn find(arguments: &TrainArgs, notes: &mut Vec<String>) -> anyhow::Result<Option<Checkpoint>> {
    match arguments.resume.as_deref() {
        None => Ok(None),
        Some("auto") => newest_or_none(&arguments.output, notes),
        Some(named) => {
            let folder = Path::new(named);
            if folder.join("manifest.json").is_file() {
                let checkpoint = Checkpoint::open(folder)?;
                checkpoint.verify()?;
                return Ok(Some(checkpoint));
            }
            let found = newest(folder, notes)?;
            let missing = || {
                format!(
                    "--resume {named}: there is no good checkpoint; give a run's folder, one of its checkpoints/step-N, or \
                     auto\n  {}",
                    notes.join("\n  ")
                )
            };
            Ok(Some(found.with_context(missing)?))
        }
    }
}

/// The newest good checkpoint of a run; none where it has saved none. Where it has and none can be used, starting at step 0
/// would replace them: that is refused.
pub(super) fn newest_or_none(run: &Path, notes: &mut Vec<String>) -> anyhow::Result<Option<Checkpoint>> {
    const ANEW: &str = "mend or restore one of them, or start anew with --overwrite-output-dir in place of --resume, which \
                        removes them";
    let mut refused = Vec::new();
    let found = newest(run, &mut refused)
        .with_context(|| format!("{} cannot be read: {ANEW}", run.join("checkpoints").display()))?;
    anyhow::ensure!(
        found.is_some() || refused.is_empty(),
        "{} has checkpoints and none of them can be used, so there is nothing to go on from:\n  {}\n{ANEW}",
        run.display(),
        refused.join("\n  ")
    );
    notes.extend(refused);
    Ok(found)
}

/// The newest checkpoint of a run that verifies. Those that do not are named.
fn newest(run: &Path, notes: &mut Vec<String>) -> anyhow::Result<Option<Checkpoint>> {
    let newest = newest_good(&run.join("checkpoints"))?;
    for (folder, error) in &newest.refused {
        notes.push(format!("{} was passed over: {error}", folder.display()));
    }
    Ok(newest.found)
}

/// Keeps the checkpoint's samples a step: sets what was left open so that the ranks there are share them. Whether anything
/// was set.
pub(super) fn keep_batch(
    manifest: &Manifest,
    resolved: &Resolved,
    ranks: u64,
    flags: &mut Flags,
) -> anyhow::Result<bool> {
    let typed = |key: &str| {
        let setting = resolved.get(key)?;
        let is_typed = matches!(setting.origin, Origin::File(_) | Origin::Flag(_));
        is_typed.then(|| setting.value.as_u64()).flatten()
    };
    let keys = CUT;
    let TopLevel { train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, .. } =
        resolved.values.top_level;
    let batch = manifest.batch.train_batch_size;
    if train_micro_batch_size_per_gpu
        .checked_mul(gradient_accumulation_steps)
        .and_then(|own| own.checked_mul(ranks))
        == Some(batch)
    {
        return Ok(false);
    }
    anyhow::ensure!(
        typed("train_batch_size").is_none_or(|typed| typed == batch),
        "train_batch_size is {}, and the checkpoint was trained with {batch} samples a step; going on keeps that: set it to \
         {batch}, or leave it out",
        train_batch_size
    );
    let (micro, times) =
        cut_again(batch, ranks, (typed(keys[0]), typed(keys[1])), manifest.batch.micro_batch)?;
    flags.per_device_train_batch_size = Some(micro);
    flags.gradient_accumulation_steps = Some(times);
    Ok(true)
}

/// Says of what [`keep_batch`] set where it came from.
pub(super) fn name_origin(resolved: &mut Resolved) {
    for path in CUT {
        if let Some(value) = resolved.get(path).map(|setting| setting.value.clone()) {
            resolved.set(path, value, Origin::Auto("the checkpoint's samples a step".to_owned()));
        }
    }
}

/// The order of the data stays the checkpoint's, whatever was typed.
pub(super) fn keep_order(manifest: &Manifest, seed: &mut u64, shuffle: &mut bool, notes: &mut Vec<String>) {
    if (*seed, *shuffle) != (manifest.seed, manifest.data.shuffle) {
        notes.push(format!(
            "--seed {} and --shuffle {} stay those of the checkpoint: others would change the order of the data",
            manifest.seed, manifest.data.shuffle
        ));
    }
    (*seed, *shuffle) = (manifest.seed, manifest.data.shuffle);
}

/// What else has changed: the command wins, and says so.
pub(super) fn note_changes(manifest: &Manifest, resolved: &Resolved, ranks: u64, notes: &mut Vec<String>) {
    if manifest.ranks != ranks {
        notes.push(format!("changed since the checkpoint: ranks: {} → {ranks}", manifest.ranks));
    }
    let changed = changes(&manifest.config, &resolved.to_json());
    let more = changed.len().saturating_sub(SHOWN);
    notes.extend(
        changed.into_iter().take(SHOWN).map(|change| format!("changed since the checkpoint: {change}")),
    );
    if more > 0 {
        notes.push(format!(
            "and {more} more; checkpoints keep the config they were written with in manifest.json"
        ));
    }
}

/// Whether a checkpoint belongs to a run's folder.
pub(super) fn is_inside(checkpoint: &Path, run: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().ok();
    match (whole(checkpoint), whole(&run.join("checkpoints"))) {
        (Some(checkpoint), Some(checkpoints)) => checkpoint.starts_with(checkpoints),
        _ => false,
    }
}
