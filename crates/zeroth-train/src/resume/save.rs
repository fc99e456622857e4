//! Saves checkpoints from a running engine: every rank streams its shard, and rank 0 commits once all shards are on
//! disk.
//!
//! With `checkpoint.writer.decoupled`, the fsync overlaps the next steps. Nothing is copied for that: a rank's file
//! is fully written before the next step starts, and only the write-back from the page cache remains.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use bytemuck::{Pod, Zeroable};
use zeroth_engine::{Engine, RunError, StateKind};
use zeroth_graph::ParamId;
use zeroth_kernel::{Control, Moment};

use super::error::SaveError;
use super::restore::{control_state, data_hash};
use crate::checkpoint::{
    BaseEntry, BatchEntry, BestEntry, Checkpoint, CheckpointError, DataEntry, DistillEntry, FORMAT_VERSION,
    FileEntry, LoraEntry, Manifest, ModelEntry, ModelFiles, ShardPiece, ShardWriter, UnfinishedCheckpoint,
    WrittenShard, ZEROTH_VERSION, now, prune, shard_name, step_folder,
};
use crate::job::{Interval, Job};
use crate::report::StepMetrics;
use crate::trainer::{ControlRequest, StepStatus};
use crate::weights::first_not_finite;

/// Checkpoint settings.
#[derive(Debug, Clone)]
pub struct CheckpointOptions {
    /// The checkpoint directory.
    pub folder: PathBuf,
    /// When a checkpoint is due. `Never` saves only on request.
    pub interval: Interval,
    /// Whether a step is also saved because its evaluation is the best so far.
    pub on_best: bool,
    /// Whether checkpoints have weights only.
    pub weights_only: bool,
    /// Maximum number of checkpoints kept.
    pub limit: Option<u64>,
    /// Whether training continues while files are synced to disk.
    pub decoupled: bool,
    /// Manifest fields common to all checkpoints of the run.
    pub manifest: Manifest,
    /// Config and tokenizer files to include.
    pub model: ModelFiles,
}

impl Job {
    /// Manifest fields common to all checkpoints of this job.
    pub fn manifest_template(&self, config: serde_json::Value) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            zeroth_version: ZEROTH_VERSION.to_owned(),
            created: 0,
            step: 0,
            samples_seen: 0,
            loss: None,
            control: control_state(&Control::start(&self.recipe)),
            seed: self.seed,
            data: DataEntry {
                hash: data_hash(&self.samples),
                samples: self.samples.count().get(),
                shuffle: self.order.is_shuffled(),
                seed: Some(self.data_seed).filter(|seed| *seed != self.seed),
            },
            batch: BatchEntry {
                train_batch_size: self.shape.train_batch(),
                micro_batch: self.shape.micro_batch,
                accumulation: self.shape.accumulation,
            },
            ranks: self.shape.ranks,
            group: self.settings.group.filter(|group| *group < self.shape.ranks),
            stage: self.settings.stage,
            dtype: self.settings.types.compute,
            optimizer: self.settings.optimizer.name().to_owned(),
            moments: self.settings.moment_dtype,
            model: ModelEntry {
                function: Some(self.model.function()),
                ..ModelEntry::of(self.model.family.model_type(), &self.saved_table(), |_| true)
            },
            states: Vec::new(),
            weights_only: false,
            best: None,
            lora: self.lora.as_ref().map(LoraEntry::of),
            distillation: self.objective.distillation().map(DistillEntry::of),
            config,
            flags: self.step_flags(),
            files: Vec::new(),
        }
    }
}

/// Broadcast by rank 0: the name of the folder that all ranks write to, empty on failure.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SaveFolder {
    name: [u8; 128],
}

impl SaveFolder {
    fn new(begun: Option<&UnfinishedCheckpoint>) -> Self {
        let mut broadcast = Self::zeroed();
        let name =
            begun.and_then(|begun| begun.path().file_name()).map_or(&[][..], |name| name.as_encoded_bytes());
        broadcast.name[..name.len()].copy_from_slice(name);
        broadcast
    }

    /// The folder's path.
    fn folder(&self, checkpoints: &Path) -> Option<PathBuf> {
        let length = self.name.iter().position(|byte| *byte == 0).unwrap_or(self.name.len());
        let name = str::from_utf8(&self.name[..length]).ok().filter(|name| !name.is_empty());
        name.map(|name| checkpoints.join(name))
    }
}

/// A rank's report about its shard.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ShardReport {
    is_ok: u64,
    bytes: u64,
    sha256: [u8; 64],
}

/// A shard that is written, but not yet known to be synced on all ranks.
struct Pending {
    manifest: Manifest,
    begun: Option<UnfinishedCheckpoint>,
    entry: FileEntry,
    syncing: Syncing,
}

/// The fsync of a rank's shard.
enum Syncing {
    /// On a thread, overlapping the next steps.
    Thread(JoinHandle<Result<(), CheckpointError>>),
    Finished(Result<(), CheckpointError>),
}

impl Syncing {
    /// Syncs on a thread, or inline if no thread can be started.
    fn start(part: WrittenShard) -> Self {
        let part = Arc::new(part);
        let on_thread = Arc::clone(&part);
        let started = std::thread::Builder::new().name("sync".to_owned()).spawn(move || on_thread.sync());
        started.map_or_else(|_| Self::Finished(part.sync()), Self::Thread)
    }

    fn is_finished(&self) -> bool {
        match self {
            Self::Thread(thread) => thread.is_finished(),
            Self::Finished(_) => true,
        }
    }

    fn wait(self) -> Result<(), CheckpointError> {
        match self {
            Self::Thread(thread) => thread.join().expect("syncing a file does not panic"),
            Self::Finished(synced) => synced,
        }
    }
}

/// The identities of a run's frozen models.
#[derive(Debug, Default)]
pub(crate) struct FrozenModels {
    /// LoRA's base.
    pub(crate) base: Option<BaseEntry>,
    /// The teacher of a distillation.
    pub(crate) teacher: Option<BaseEntry>,
}

impl FrozenModels {
    /// Whether there are any. All other parameters are trained.
    fn is_any(&self) -> bool {
        self.base.is_some() || self.teacher.is_some()
    }
}

/// Saves checkpoints on one rank.
pub(crate) struct CheckpointSaver<'a> {
    options: Option<&'a CheckpointOptions>,
    names: &'a [String],
    /// The frozen models of the run, of which nothing is saved.
    frozen: FrozenModels,
    pending: Option<Pending>,
    /// The newest committed checkpoint.
    saved: Option<u64>,
    /// Removal errors already reported, each only once.
    reported: HashSet<String>,
    notes: Vec<String>,
}

impl<'a> CheckpointSaver<'a> {
    pub(crate) fn new(
        options: Option<&'a CheckpointOptions>,
        names: &'a [String],
        frozen: FrozenModels,
    ) -> Self {
        Self {
            options,
            names,
            frozen,
            pending: None,
            saved: None,
            reported: HashSet::new(),
            notes: Vec::new(),
        }
    }

    /// Synchronises ranks after a step: the strongest control request wins, and a checkpoint synced on all ranks is
    /// committed. Returns its step.
    pub(crate) fn sync_ranks(
        &mut self,
        engine: &Engine<'_>,
        step: u64,
        own: ControlRequest,
    ) -> Result<(ControlRequest, Option<u64>), SaveError> {
        let is_synced = self.pending.as_ref().is_none_or(|pending| pending.syncing.is_finished());
        let all = engine.all_gather(step, "end of a step", &StepStatus::new(own, is_synced))?;
        let all_synced = all.iter().all(|rank| rank.is_synced != 0);
        let committed = if all_synced { self.finish(engine)? } else { None };
        Ok((all.iter().map(|rank| rank.request()).max().unwrap_or_default(), committed))
    }

    /// Saves the state after a step; collective, after [`Self::finish`]. Returns the step if the checkpoint is
    /// already committed.
    pub(crate) fn save(
        &mut self,
        engine: &mut Engine<'_>,
        line: &StepMetrics,
        best: Option<&BestEntry>,
    ) -> Result<Option<u64>, SaveError> {
        let Some(options) = self.options else { return Ok(None) };
        let (step, rank) = (line.step, engine.rank());
        let begun = (rank == 0).then(|| UnfinishedCheckpoint::begin(&options.folder, step)).transpose();
        let own = SaveFolder::new(begun.as_ref().ok().and_then(Option::as_ref));
        let all = engine.all_gather(step, "beginning of a checkpoint", &own)?;
        let begun = begun.map_err(failed(step))?;
        self.note(begun.iter().flat_map(UnfinishedCheckpoint::not_removed));
        let Some(folder) = all[0].folder(&options.folder) else {
            return Err(SaveError::OtherRank { step, rank: 0 });
        };
        let control = control_state(&engine.control()?);
        let manifest = Manifest {
            created: now(),
            step,
            samples_seen: line.samples_seen,
            loss: line.loss.is_finite().then_some(line.loss),
            control,
            states: self.states(engine),
            weights_only: options.weights_only,
            best: best.cloned(),
            lora: self.lora_entry(&options.manifest),
            distillation: self.distill_entry(&options.manifest),
            ..options.manifest.clone()
        };
        let written = self.write(engine, &folder)?;
        let decoupled = options.decoupled;
        let (entry, syncing) = match written {
            Ok(part) => {
                let entry = part.entry().clone();
                (entry, Syncing::start(part))
            }
            Err(error) => {
                let nothing = FileEntry { name: String::new(), bytes: 0, sha256: String::new() };
                (nothing, Syncing::Finished(Err(error)))
            }
        };
        self.pending = Some(Pending { manifest, begun, entry, syncing });
        if decoupled { Ok(None) } else { self.finish(engine) }
    }

    /// The adapters of the manifest's template, with the base that was loaded.
    fn lora_entry(&self, template: &Manifest) -> Option<LoraEntry> {
        let entry = template.lora.clone()?;
        Some(LoraEntry { base: self.frozen.base.clone().unwrap_or_default(), ..entry })
    }

    /// The base of adapters.
    pub(crate) fn base(&self) -> Option<BaseEntry> {
        self.frozen.base.clone()
    }

    /// The distillation of the manifest's template, with the teacher that was loaded. That of a cache is known already.
    fn distill_entry(&self, template: &Manifest) -> Option<DistillEntry> {
        let entry = template.distillation.clone()?;
        let teacher = self.frozen.teacher.clone().unwrap_or_else(|| entry.teacher.clone());
        Some(DistillEntry { teacher, ..entry })
    }

    /// The states to save.
    fn states(&self, engine: &Engine<'_>) -> Vec<StateKind> {
        let weights_only = self.options.is_some_and(|options| options.weights_only);
        engine.states().into_iter().filter(|state| !weights_only || *state == StateKind::Weights).collect()
    }

    /// Streams this rank's shard to its file. A device error ends the run; a disk error only fails the save.
    fn write(
        &self,
        engine: &mut Engine<'_>,
        folder: &Path,
    ) -> Result<Result<WrittenShard, CheckpointError>, RunError> {
        let mut pieces = Vec::new();
        let states = self.states(engine);
        for &state in &states {
            let owned = if self.frozen.is_any() {
                engine.owned_trained(state).into_iter()
            } else {
                engine.owned(state).into_iter()
            };
            pieces.extend(owned.map(|(param, range, dtype)| ShardPiece {
                state,
                name: self.names[param.index()].clone(),
                first: range.start,
                count: range.end - range.start,
                dtype,
            }));
        }
        let world = engine.comm().map_or(1, |comm| comm.world() as u64);
        let mut writer = match ShardWriter::create(folder, engine.rank(), world, pieces) {
            Ok(writer) => writer,
            Err(error) => return Ok(Err(error)),
        };
        let mut failed = None;
        for state in states {
            let mut sink = |param: ParamId, range: Range<u64>, elements: &[f32]| {
                let written = match first_not_finite(elements) {
                    Some(place) => Err(CheckpointError::NotFinite {
                        state: state_words(state),
                        parameter: self.names[param.index()].clone(),
                        element: range.start + place as u64,
                        value: elements[place],
                    }),
                    None => writer.append_f32(elements),
                };
                written.map_err(|error| {
                    let words = error.to_string();
                    failed = Some(error);
                    words.into()
                })
            };
            let read = if self.frozen.is_any() {
                engine.read_trained(state, &mut sink)
            } else {
                engine.read(state, &mut sink)
            };
            if let Some(error) = failed {
                return Ok(Err(error));
            }
            read?;
        }
        Ok(writer.finish())
    }

    /// Waits until the pending checkpoint is synced on all ranks, commits it, and returns its step.
    pub(crate) fn finish(&mut self, engine: &Engine<'_>) -> Result<Option<u64>, SaveError> {
        let (Some(options), Some(pending)) = (self.options, self.pending.take()) else { return Ok(None) };
        let Pending { mut manifest, begun, entry, syncing } = pending;
        let step = manifest.step;
        let synced = syncing.wait();
        let mut sha256 = [0; 64];
        sha256[..entry.sha256.len()].copy_from_slice(entry.sha256.as_bytes());
        let own = ShardReport { is_ok: u64::from(synced.is_ok()), bytes: entry.bytes, sha256 };
        let all = engine.all_gather(step, "end of a checkpoint", &own)?;
        synced.map_err(failed(step))?;
        if let Some(rank) = all.iter().position(|part| part.is_ok == 0) {
            return Err(SaveError::OtherRank { step, rank });
        }
        let committed = begun.map(|begun| {
            let best = manifest.best.as_ref().and_then(|best| best.saved).map(|best| best.step);
            manifest.files =
                all.iter().zip(0..).map(|(part, rank)| part.entry(rank, all.len() as u64)).collect();
            begun.commit(manifest, &options.model)?;
            prune(&options.folder, options.limit, Some(step), best)
        });
        let committed = committed.transpose();
        let is_committed = engine.all_gather(step, "checkpoint", &u64::from(committed.is_ok()))?;
        let pruned = committed.map_err(failed(step))?;
        self.note(pruned.iter().flat_map(|pruned| &pruned.failed));
        if is_committed[0] == 0 {
            return Err(SaveError::OtherRank { step, rank: 0 });
        }
        self.saved = Some(step);
        Ok(Some(step))
    }

    fn note<'e>(&mut self, errors: impl Iterator<Item = &'e CheckpointError>) {
        for error in errors {
            let error = error.to_string();
            if !self.reported.contains(&error) {
                self.notes.push(format!(
                    "cannot remove an old checkpoint: {error}; remove it by hand to free its space"
                ));
                self.reported.insert(error);
            }
        }
    }

    /// Notes not yet reported.
    pub(crate) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Whether this run's newest checkpoint is that of `step`.
    pub(crate) fn has_saved(&self, step: u64) -> bool {
        self.saved == Some(step)
    }

    /// The checkpoint that this run committed at `step`, if it can be opened.
    pub(crate) fn written(&self, step: u64) -> Option<Checkpoint> {
        let options = self.options.filter(|_| self.has_saved(step))?;
        Checkpoint::open(&options.folder.join(step_folder(step))).ok()
    }
}

impl ShardReport {
    fn entry(&self, rank: u64, world: u64) -> FileEntry {
        FileEntry {
            name: shard_name(rank, world),
            bytes: self.bytes,
            sha256: self.sha256.iter().map(|digit| *digit as char).collect(),
        }
    }
}

/// A state's name for messages.
const fn state_words(state: StateKind) -> &'static str {
    match state {
        StateKind::Weights => "weights",
        StateKind::Moment(Moment::First) => "first moments",
        StateKind::Moment(Moment::Second) => "second moments",
        StateKind::Moment(Moment::Third) => "third moments",
        StateKind::Gradient => "gradients",
    }
}

fn failed(step: u64) -> impl FnOnce(CheckpointError) -> SaveError {
    move |source| SaveError::Checkpoint { step, source: Box::new(source) }
}
