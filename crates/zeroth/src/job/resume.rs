//! `--resume`: which checkpoint to use, and which of its settings to keep.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zeroth_base::counted;
use zeroth_config::resolve::{Origin, Resolved};
use zeroth_config::schema::TopLevel;
use zeroth_program::Settings;
use zeroth_train::checkpoint::{Checkpoint, CheckpointError, Manifest, newest_resumable};
use zeroth_train::{Job, ResumeError, SettingChange, config_changes, redistribute_batch};

use super::JobRequest;
use crate::planning::is_open;

/// Keys of the batch decomposition.
const BATCH_KEYS: [&str; 2] = ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
/// Their product with the ranks.
const TRAIN_BATCH: &str = "train_batch_size";
/// Keys that the fit chooses where they are open.
const FITTED_KEYS: [&str; 6] = [
    "zero_optimization.stage3_prefetch_bucket_size",
    "zeroth.frozen",
    "zeroth.recompute",
    "zeroth.recompute_blocks",
    "zeroth.update",
    "zeroth.update_window",
];
/// Maximum number of changed settings listed.
const SHOWN: usize = 12;

/// The longest plan.json that is read.
const LONGEST_PLAN: u64 = 16 << 20;

const ANEW: &str = "repair or restore one of them, or start over with --overwrite-output-dir instead of --resume, which \
                    removes them";

/// A checkpoint that cannot be resumed from.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum ResumeRequestError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Resume(#[from] ResumeError),
    #[error(
        "--resume {named}: no valid checkpoint found; give a run folder, one of its checkpoints/step-N, or \
         auto\n  {}",
        notes.join("\n  ")
    )]
    NoneFound { named: String, notes: Vec<String> },
    #[error(
        "{} on host {host} is not the checkpoint of that path that rank 0 resumes from: give all hosts one --output folder, or a          copy of that checkpoint",
        folder.display()
    )]
    AnotherCheckpoint { folder: PathBuf, host: String },
    #[error("{} cannot be read: {ANEW}", folder.display())]
    Unreadable { folder: PathBuf, source: Box<CheckpointError> },
    #[error(
        "{} has checkpoints, but none of them is valid:\n  {}\n{ANEW}",
        run.display(),
        refused.join("\n  ")
    )]
    AllDamaged { run: PathBuf, refused: Vec<String> },
    #[error(
        "train_batch_size is {given}, but the checkpoint was trained with {kept} samples per step, which resuming keeps: set it to \
         {kept}, or leave it out"
    )]
    TrainBatch { given: u64, kept: u64 },
    #[error(
        "{0} has weights only (--save-only-model): without the optimizer's state, training cannot be resumed after \
         step {step} of {steps}. Start a new run from its weights: `zeroth checkpoint export {0} --output MODEL`, then `zeroth \
         train --model MODEL` with another --output; or name a checkpoint with optimizer state with --resume",
        folder.display()
    )]
    WeightsOnly { folder: PathBuf, step: u64, steps: u64 },
}

/// The longest file name of common file systems.
const LONGEST_NAME: usize = 255;

/// Parses the name of a run, which can be a folder of its own.
pub fn run_name(text: &str) -> Result<String, String> {
    let is_folder = !text.contains('/') && !matches!(text, "" | "." | "..") && text.len() <= LONGEST_NAME;
    if !is_folder || text.chars().any(char::is_control) {
        return Err("it also names a folder: give 1 to 255 bytes without / and control characters".to_owned());
    }
    Ok(text.to_owned())
}

/// The name that a run in this folder was given before: it is resumed under it unless another one is given.
pub(super) fn kept_name(output: &Path) -> Option<String> {
    let path = output.join("plan.json");
    // Opening a FIFO of that name would wait for its writer.
    if !path.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LONGEST_PLAN).read_to_end(&mut bytes).ok()?;
    let plan: Value = serde_json::from_slice(&bytes).ok()?;
    run_name(plan["run_name"].as_str()?).ok()
}

/// The checkpoint to resume from, verified; `None` if `auto` finds none.
pub(super) fn find(
    request: &JobRequest,
    notes: &mut Vec<String>,
) -> Result<Option<Checkpoint>, ResumeRequestError> {
    match request.resume.as_deref() {
        None => Ok(None),
        Some("auto") => newest_resumable_or_none(&request.output, notes),
        Some(named) => {
            let folder = Path::new(named);
            if folder.join("manifest.json").is_file() {
                let checkpoint = Checkpoint::open(folder)?;
                checkpoint.verify()?;
                return Ok(Some(checkpoint));
            }
            let found = newest(folder, notes)?;
            let missing =
                || ResumeRequestError::NoneFound { named: named.to_owned(), notes: std::mem::take(notes) };
            Ok(Some(found.ok_or_else(missing)?))
        }
    }
}

/// The newest valid checkpoint of a run; `None` if it has saved none. If all are damaged, this fails, as starting at step 0
/// would overwrite them.
pub fn newest_resumable_or_none(
    run: &Path,
    notes: &mut Vec<String>,
) -> Result<Option<Checkpoint>, ResumeRequestError> {
    let mut refused = Vec::new();
    let found = newest(run, &mut refused).map_err(|source| ResumeRequestError::Unreadable {
        folder: run.join("checkpoints"),
        source: source.into(),
    })?;
    if found.is_none() && !refused.is_empty() {
        return Err(ResumeRequestError::AllDamaged { run: run.to_owned(), refused });
    }
    notes.extend(refused);
    Ok(found)
}

/// The newest checkpoint of a run that verifies, with optimizer state if there is one; rejected ones are noted.
fn newest(run: &Path, notes: &mut Vec<String>) -> Result<Option<Checkpoint>, CheckpointError> {
    let newest = newest_resumable(&run.join("checkpoints"))?;
    for (folder, error) in &newest.refused {
        notes.push(format!("{} was skipped: {error}", folder.display()));
    }
    Ok(newest.found)
}

/// Keeps the checkpoint's train batch size by changing batch keys that were left open.
pub(super) fn keep_batch(
    manifest: &Manifest,
    ranks: u64,
    resolved: &mut Resolved,
) -> Result<(), ResumeRequestError> {
    let typed = |key: &str| {
        let setting = resolved.get(key)?;
        let is_typed = matches!(setting.origin, Origin::File(_) | Origin::Flag(_));
        is_typed.then(|| setting.value.as_u64()).flatten()
    };
    let keys = BATCH_KEYS;
    let TopLevel { train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, .. } =
        resolved.values.top_level;
    let batch = manifest.batch.train_batch_size;
    if train_micro_batch_size_per_gpu
        .checked_mul(gradient_accumulation_steps)
        .and_then(|own| own.checked_mul(ranks))
        == Some(batch)
    {
        return Ok(());
    }
    if typed(TRAIN_BATCH).is_some_and(|typed| typed != batch) {
        return Err(ResumeRequestError::TrainBatch { given: train_batch_size, kept: batch });
    }
    let (micro, times) =
        redistribute_batch(batch, ranks, (typed(keys[0]), typed(keys[1])), manifest.batch.micro_batch)?;
    for (path, value) in keys.into_iter().zip([micro, times]) {
        resolved.set(path, value.into(), Origin::Auto("the checkpoint's samples per step".to_owned()));
    }
    if let Some(origin) = resolved.get(TRAIN_BATCH).map(|setting| setting.origin.clone()) {
        resolved.set(TRAIN_BATCH, batch.into(), origin);
    }
    Ok(())
}

/// Keeps the checkpoint's groups of ranks where the config leaves them open: with as many ranks, gradients are added up in the
/// same order.
pub(super) fn keep_groups(
    manifest: &Manifest,
    resolved: &Resolved,
    ranks: u64,
    settings: &mut Settings,
    notes: &mut Vec<String>,
) {
    let Some(group) = manifest.group.filter(|_| resolved.group().is_none()) else { return };
    if manifest.ranks == ranks {
        settings.group = Some(group);
    } else if !ranks.is_multiple_of(group) {
        notes.push(format!(
            "the checkpoint was written by {} ranks in groups of {group}, which {} cannot be: gradients are added up in other \
             groups from here on (zeroth.sum_group)",
            manifest.ranks,
            counted(ranks, "rank")
        ));
    }
}

/// Keeps the checkpoint's data order, whatever was given.
pub(super) fn keep_order(
    manifest: &Manifest,
    seed: &mut u64,
    data_seed: &mut u64,
    shuffle: &mut bool,
    notes: &mut Vec<String>,
) {
    let kept = (manifest.seed, manifest.data.seed.unwrap_or(manifest.seed), manifest.data.shuffle);
    if (*seed, *data_seed, *shuffle) != kept {
        let data_seed = manifest.data.seed.map(|seed| format!(", --data-seed {seed}")).unwrap_or_default();
        notes.push(format!(
            "--seed {}{data_seed} and --shuffle {} are those of the checkpoint: others would change the order of the data",
            manifest.seed, manifest.data.shuffle
        ));
    }
    (*seed, *data_seed, *shuffle) = kept;
}

/// Notes other changes since the checkpoint of what the remaining steps do, for which the command takes precedence.
pub(super) fn note_changes(
    manifest: &Manifest,
    job: &Job,
    resolved: &Resolved,
    ranks: u64,
    notes: &mut Vec<String>,
) {
    let ranks = (manifest.ranks != ranks).then(|| SettingChange {
        name: "ranks".to_owned(),
        before: manifest.ranks.to_string(),
        now: ranks.to_string(),
    });
    // What the fit chooses never changes a result.
    let is_chosen = |path: &str| FITTED_KEYS.contains(&path) && is_open(resolved, path);
    let keys = config_changes(&manifest.config, &resolved.to_json())
        .into_iter()
        .filter(|change| resolved.decides_training(&change.name) && !is_chosen(&change.name));
    let changed: Vec<SettingChange> =
        ranks.into_iter().chain(job.flag_changes(manifest)).chain(keys).collect();
    let more = changed.len().saturating_sub(SHOWN);
    notes.extend(changed.iter().take(SHOWN).map(|change| format!("changed since the checkpoint: {change}")));
    if more > 0 {
        notes.push(format!(
            "and {more} more; checkpoints keep the config they were written with in manifest.json"
        ));
    }
}

/// Refuses a checkpoint without optimizer state if steps remain. If none do, its weights are all that the model needs.
pub(super) fn refuse_weights_only(checkpoint: &Checkpoint, job: &Job) -> Result<(), ResumeRequestError> {
    let manifest = checkpoint.manifest();
    if !manifest.weights_only || job.is_complete(manifest) {
        return Ok(());
    }
    let folder = checkpoint.folder().to_owned();
    Err(ResumeRequestError::WeightsOnly { folder, step: manifest.step, steps: job.steps })
}

/// Whether a checkpoint is in a run folder.
pub fn is_inside(checkpoint: &Path, run: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().ok();
    match (whole(checkpoint), whole(&run.join("checkpoints"))) {
        (Some(checkpoint), Some(checkpoints)) => checkpoint.starts_with(checkpoints),
        _ => false,
    }
}
