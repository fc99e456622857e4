//! Saving from a running engine: every rank streams what it owns, and rank 0 makes the checkpoint appear when all of it is
//! on disk.
//!
//! With `checkpoint.writer.decoupled` the wait for the disk happens beside the next steps. Nothing is copied for that: a
//! rank's file is written before the next step begins, and only its way from the system's cache to the disk remains.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use bytemuck::{Pod, Zeroable};
use zeroth_engine::{Engine, RunError, State};
use zeroth_kernel::Control;

use crate::checkpoint::{
    BatchEntry, Checkpoint, CheckpointError, DataEntry, FORMAT_VERSION, FileEntry, Manifest, ModelEntry,
    PartWriter, PartWritten, Piece, Unfinished, ZEROTH_VERSION, now, part_name, prune, step_folder,
};
use crate::finite::first_not_finite;
use crate::meeting::{AfterStep, Wish, tell_all};
use crate::resume::{control_state, data_hash};
use crate::{Job, ModelFiles, StepLine};

/// Where and when checkpoints are saved.
#[derive(Debug, Clone)]
pub struct Saves {
    /// The folder of checkpoints.
    pub folder: PathBuf,
    /// Steps from one to the next; the last step is always saved. 0: only when asked.
    pub every: u64,
    /// How many stay.
    pub limit: Option<u64>,
    /// Whether training goes on while files are on their way to the disk.
    pub decoupled: bool,
    /// What is the same in all checkpoints of a run.
    pub about: Manifest,
    /// The config and the tokenizer's files that a checkpoint carries.
    pub model: ModelFiles,
}

impl Saves {
    /// Whether a step is saved without being asked.
    pub fn is_due(&self, step: u64, last: u64) -> bool {
        self.every > 0 && (step.is_multiple_of(self.every) || step == last)
    }
}

impl Job {
    /// What is the same in all checkpoints of this job.
    pub fn about(&self, config: serde_json::Value) -> Manifest {
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
            },
            batch: BatchEntry {
                train_batch_size: self.shape.train_batch(),
                micro_batch: self.shape.micro_batch,
                accumulation: self.shape.accumulation,
            },
            ranks: self.shape.ranks,
            stage: self.settings.stage,
            dtype: self.settings.types.compute,
            optimizer: self.settings.optimizer.name().to_owned(),
            moments: self.settings.moment_dtype,
            model: ModelEntry::of(self.model.family.model_type(), &self.table, |_| true),
            states: Vec::new(),
            config,
            files: Vec::new(),
        }
    }
}

/// A checkpoint that could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// A file could not be written.
    #[error("step {step} could not be saved: {source}")]
    Checkpoint {
        /// The step.
        step: u64,
        /// What went wrong.
        source: Box<CheckpointError>,
    },
    /// Another rank could not write its part; it says why.
    #[error("step {step} could not be saved: rank {rank} failed")]
    OtherRank {
        /// The step.
        step: u64,
        /// The rank.
        rank: usize,
    },
    /// The engine failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// What rank 0 says of the folder that all ranks write to: its name, empty where it could not be made.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Begun {
    name: [u8; 128],
}

impl Begun {
    fn new(begun: Option<&Unfinished>) -> Self {
        let mut told = Self::zeroed();
        let name =
            begun.and_then(|begun| begun.path().file_name()).map_or(&[][..], |name| name.as_encoded_bytes());
        told.name[..name.len()].copy_from_slice(name);
        told
    }

    /// The folder among the checkpoints.
    fn folder(&self, checkpoints: &Path) -> Option<PathBuf> {
        let length = self.name.iter().position(|byte| *byte == 0).unwrap_or(self.name.len());
        let name = str::from_utf8(&self.name[..length]).ok().filter(|name| !name.is_empty());
        name.map(|name| checkpoints.join(name))
    }
}

/// What a rank says of its part.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Part {
    is_there: u64,
    bytes: u64,
    sha256: [u8; 64],
}

/// A part that is written and not yet known to be on disk everywhere.
struct Pending {
    manifest: Manifest,
    begun: Option<Unfinished>,
    entry: FileEntry,
    syncing: Syncing,
}

/// The way of a rank's part to the disk.
enum Syncing {
    /// Beside the next steps.
    Thread(JoinHandle<Result<(), CheckpointError>>),
    /// It has come to its end.
    Done(Result<(), CheckpointError>),
}

impl Syncing {
    /// Begins it on a thread, or waits for it here where the system gives none.
    fn start(part: PartWritten) -> Self {
        let part = Arc::new(part);
        let on_thread = Arc::clone(&part);
        let started = std::thread::Builder::new().name("sync".to_owned()).spawn(move || on_thread.sync());
        started.map_or_else(|_| Self::Done(part.sync()), Self::Thread)
    }

    fn is_finished(&self) -> bool {
        match self {
            Self::Thread(thread) => thread.is_finished(),
            Self::Done(_) => true,
        }
    }

    fn wait(self) -> Result<(), CheckpointError> {
        match self {
            Self::Thread(thread) => thread.join().expect("syncing a file does not panic"),
            Self::Done(synced) => synced,
        }
    }
}

/// What saves, on one rank.
pub(crate) struct Saver<'a> {
    saves: Option<&'a Saves>,
    names: &'a [String],
    pending: Option<Pending>,
    /// The newest checkpoint that is there.
    saved: Option<u64>,
    /// Old checkpoints that could not be removed: each is told once.
    told: HashSet<String>,
    notes: Vec<String>,
}

impl<'a> Saver<'a> {
    pub(crate) fn new(saves: Option<&'a Saves>, names: &'a [String]) -> Self {
        Self { saves, names, pending: None, saved: None, told: HashSet::new(), notes: Vec::new() }
    }

    /// Ranks meet after a step: the strongest wish counts, and a checkpoint that has reached the disk everywhere appears;
    /// its step is given.
    pub(crate) fn meet(
        &mut self,
        engine: &Engine<'_>,
        step: u64,
        own: Wish,
    ) -> Result<(Wish, Option<u64>), SaveError> {
        let settled = self.pending.as_ref().is_none_or(|pending| pending.syncing.is_finished());
        let told = tell_all(engine, step, "end of a step", &AfterStep::new(own, settled))?;
        let all_settled = told.iter().all(|rank| rank.settled != 0);
        let appeared = if all_settled { self.finish(engine)? } else { None };
        Ok((told.iter().map(|rank| rank.wish()).max().unwrap_or_default(), appeared))
    }

    /// Saves the state after a step; all ranks call it together, after [`Self::finish`]. The step is given where the
    /// checkpoint is there already.
    pub(crate) fn save(
        &mut self,
        engine: &mut Engine<'_>,
        line: &StepLine,
    ) -> Result<Option<u64>, SaveError> {
        let Some(saves) = self.saves else { return Ok(None) };
        let (step, rank) = (line.step, engine.rank());
        let begun = (rank == 0).then(|| Unfinished::begin(&saves.folder, step)).transpose();
        let own = Begun::new(begun.as_ref().ok().and_then(Option::as_ref));
        let told = tell_all(engine, step, "beginning of a checkpoint", &own)?;
        let begun = begun.map_err(failed(step))?;
        self.note(begun.iter().flat_map(Unfinished::not_removed));
        let Some(folder) = told[0].folder(&saves.folder) else {
            return Err(SaveError::OtherRank { step, rank: 0 });
        };
        let control = control_state(&engine.control()?);
        let manifest = Manifest {
            created: now(),
            step,
            samples_seen: line.samples_seen,
            loss: line.loss.is_finite().then_some(line.loss),
            control,
            states: engine.states(),
            ..saves.about.clone()
        };
        let written = self.write(engine, &folder)?;
        let decoupled = saves.decoupled;
        let (entry, syncing) = match written {
            Ok(part) => {
                let entry = part.entry().clone();
                (entry, Syncing::start(part))
            }
            Err(error) => {
                let nothing = FileEntry { name: String::new(), bytes: 0, sha256: String::new() };
                (nothing, Syncing::Done(Err(error)))
            }
        };
        self.pending = Some(Pending { manifest, begun, entry, syncing });
        if decoupled { Ok(None) } else { self.finish(engine) }
    }

    /// Streams what this rank owns to its file. A device that fails ends the run; a disk that fails ends the save.
    fn write(
        &self,
        engine: &mut Engine<'_>,
        folder: &Path,
    ) -> Result<Result<PartWritten, CheckpointError>, RunError> {
        let mut pieces = Vec::new();
        for state in engine.states() {
            let owned = engine.owned(state).into_iter();
            pieces.extend(owned.map(|(param, range, dtype)| Piece {
                state,
                name: self.names[param.index()].clone(),
                first: range.start,
                count: range.end - range.start,
                dtype,
            }));
        }
        let world = engine.comm().map_or(1, |comm| comm.world() as u64);
        let mut writer = match PartWriter::create(folder, engine.rank(), world, pieces) {
            Ok(writer) => writer,
            Err(error) => return Ok(Err(error)),
        };
        let mut broken = None;
        for state in engine.states() {
            let read = engine.read(state, &mut |param, range, elements| {
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
                    broken = Some(error);
                    words.into()
                })
            });
            if let Some(error) = broken {
                return Ok(Err(error));
            }
            read?;
        }
        Ok(writer.finish())
    }

    /// Waits until a checkpoint on its way has reached the disk on every rank, makes it appear, and gives its step.
    pub(crate) fn finish(&mut self, engine: &Engine<'_>) -> Result<Option<u64>, SaveError> {
        let (Some(saves), Some(pending)) = (self.saves, self.pending.take()) else { return Ok(None) };
        let Pending { mut manifest, begun, entry, syncing } = pending;
        let step = manifest.step;
        let synced = syncing.wait();
        let mut sha256 = [0; 64];
        sha256[..entry.sha256.len()].copy_from_slice(entry.sha256.as_bytes());
        let own = Part { is_there: u64::from(synced.is_ok()), bytes: entry.bytes, sha256 };
        let all = tell_all(engine, step, "end of a checkpoint", &own)?;
        synced.map_err(failed(step))?;
        if let Some(rank) = all.iter().position(|part| part.is_there == 0) {
            return Err(SaveError::OtherRank { step, rank });
        }
        let committed = begun.map(|begun| {
            manifest.files =
                all.iter().zip(0..).map(|(part, rank)| part.entry(rank, all.len() as u64)).collect();
            begun.commit(manifest, &saves.model)?;
            prune(&saves.folder, saves.limit, Some(step))
        });
        let committed = committed.transpose();
        let is_there = tell_all(engine, step, "checkpoint", &u64::from(committed.is_ok()))?;
        let pruned = committed.map_err(failed(step))?;
        self.note(pruned.iter().flat_map(|pruned| &pruned.failed));
        if is_there[0] == 0 {
            return Err(SaveError::OtherRank { step, rank: 0 });
        }
        self.saved = Some(step);
        Ok(Some(step))
    }

    fn note<'e>(&mut self, errors: impl Iterator<Item = &'e CheckpointError>) {
        for error in errors {
            let error = error.to_string();
            if !self.told.contains(&error) {
                self.notes.push(format!(
                    "an old checkpoint could not be removed: {error}; it takes room until it is removed by hand"
                ));
                self.told.insert(error);
            }
        }
    }

    /// What is worth knowing and was not told yet.
    pub(crate) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// The checkpoint that this run has written after so many steps, if it did and it can be opened.
    pub(crate) fn written(&self, step: u64) -> Option<Checkpoint> {
        let saves = self.saves.filter(|_| self.saved == Some(step))?;
        Checkpoint::open(&saves.folder.join(step_folder(step))).ok()
    }
}

impl Part {
    fn entry(&self, rank: u64, world: u64) -> FileEntry {
        FileEntry {
            name: part_name(rank, world),
            bytes: self.bytes,
            sha256: self.sha256.iter().map(|digit| *digit as char).collect(),
        }
    }
}

/// A state for messages.
const fn state_words(state: State) -> &'static str {
    match state {
        State::Weights => "weights",
        State::First => "first moments",
        State::Second => "second moments",
        State::Gradient => "gradients",
    }
}

fn failed(step: u64) -> impl FnOnce(CheckpointError) -> SaveError {
    move |source| SaveError::Checkpoint { step, source: Box::new(source) }
}
