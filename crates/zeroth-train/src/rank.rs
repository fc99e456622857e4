//! One rank's loop over the steps of a job.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use zeroth_comm::Comm;
use zeroth_engine::{Engine, Rank, RunError, StepRecord, Timed, Trace};
use zeroth_kernel::{Device, RATES, Tier};
use zeroth_model::WeightsError;
use zeroth_program::Compiled;

use crate::checkpoint::Checkpoint;
use crate::evaluate::evaluate;
use crate::export::{ExportError, export};
use crate::export_record::ExportSource;
use crate::report::timing::StepTimes;
use crate::resident::resident_bytes;
use crate::resume::restore;
use crate::save::{SaveError, Saver, Saves};
use crate::step_batches::StepBatches;
use crate::weights::Weights;
use crate::{Batches, EvaluationLine, Job, MetricsError, MicroBatch, StepLine, Wish};
use zeroth_data::DataError;

/// What a rank is to do besides its steps.
pub struct Chores<'a> {
    /// Where the trained model goes; none: nowhere.
    pub model: Option<PathBuf>,
    /// Whether every instruction is timed and kept for a timeline.
    pub trace: bool,
    /// Whether the times of a step's instructions are told with it.
    pub timed: bool,
    /// Whether a step is enqueued before the host looks at the one before it, unless something comes between them: a device
    /// that works by itself then never waits for the host.
    pub ahead: bool,
    /// How often resident memory is looked at, in steps.
    pub look: u64,
    /// Where checkpoints go; none: nowhere.
    pub saves: Option<&'a Saves>,
    /// The checkpoint to go on from.
    pub from: Option<&'a Checkpoint>,
    /// What is asked for from outside; looked at after every step.
    pub wish: &'a dyn Fn() -> Wish,
}

/// What a rank tells as it goes.
#[derive(Debug, Clone, Copy)]
pub enum Done<'a> {
    /// How ranks on cards meet, in words; once, before the first step.
    Met(&'a str),
    /// About how many elements of the weights and their state are there.
    Loading {
        /// Those that are there.
        done: u64,
        /// All of them.
        total: u64,
    },
    /// Weights and state are there: the first step comes next.
    Loaded,
    /// The times of a step's instructions, just before the step itself.
    Times(StepTimes<'a>),
    /// A step.
    Step(&'a StepLine),
    /// An evaluation, and the times of its instructions.
    Evaluation(&'a EvaluationLine, &'a [Timed]),
    /// A checkpoint of this step is about to appear: what was told so far must be on disk.
    Saving(u64),
    /// Something on the way that somebody should know.
    Note(&'a str),
    /// It is there, and training stood still for so long.
    Saved(u64, Duration),
}

/// How a rank ended.
#[derive(Debug)]
pub struct Ended {
    /// The last step's line.
    pub last: Option<StepLine>,
    /// What was timed.
    pub trace: Option<Trace>,
    /// Whether it was asked to stop before its last step.
    pub stopped: bool,
    /// What any of the ranks was asked for after the last step that was run.
    pub wish: Wish,
}

/// A rank that could not go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The engine failed, or another rank did.
    #[error(transparent)]
    Run(Box<RunError>),
    /// Weights could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A checkpoint could not be saved.
    #[error("{0}")]
    Save(#[source] Box<SaveError>),
    /// The model could not be written.
    #[error(transparent)]
    Export(Box<ExportError>),
    /// Data could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Metrics could not be written.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// fp16 overflows at the smallest loss scale there may be.
    #[error(
        "step {step}: {what} not finite at a loss scale of {scale}, the smallest that fp16.min_loss_scale allows; train in \
         bf16, or with a lower learning rate"
    )]
    AtMinScale {
        /// The step.
        step: u64,
        /// Whose gradient, in words.
        what: String,
        /// The scale.
        scale: f64,
    },
    /// A loss or a gradient is not finite.
    #[error(
        "step {step}: {what} not finite (loss {loss}); the update was not applied, and the weights are those after step \
         {}. The samples it computed with, counted from 0 as they were read: {samples}. A lower learning rate or a look at \
         these samples may help; --max-skipped-steps N lets N such steps pass", step - 1
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// Whose loss or gradient, in words.
        what: String,
        /// The loss of the step.
        loss: f64,
        /// The samples of that rank, or of all where the rank is not known.
        samples: String,
    },
}

impl From<RunError> for TrainError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl From<SaveError> for TrainError {
    fn from(error: SaveError) -> Self {
        Self::Save(Box::new(error))
    }
}

impl From<ExportError> for TrainError {
    fn from(error: ExportError) -> Self {
        Self::Export(Box::new(error))
    }
}

/// Trains: loads this rank's part of the weights or of a checkpoint, runs the steps that are left, writes the model.
/// `done` is called after each step.
pub fn train(
    job: &Job,
    compiled: &Compiled,
    device: Box<dyn Device>,
    comm: Option<Box<dyn Comm>>,
    chores: &Chores<'_>,
    done: &mut dyn FnMut(Done<'_>) -> Result<(), TrainError>,
) -> Result<Ended, TrainError> {
    let decayed = |param| job.decays(compiled, param);
    let rank = Rank { comm, device, recipe: job.recipe, decayed: &decayed, seed: job.seed };
    let mut engine = Engine::new(compiled, rank)?;
    if let Some(how) = engine.how_ranks_meet() {
        done(Done::Met(how))?;
    }
    let names: Vec<String> = compiled.graph.params.iter().map(|param| param.spec.name.clone()).collect();
    let mut told = Ok(());
    let mut tell = |loaded, total| {
        if told.is_ok() {
            told = done(Done::Loading { done: loaded, total });
        }
    };
    if let Some(checkpoint) = chores.from {
        restore(checkpoint, &mut engine, &job.table, &names, &mut tell)?;
    } else {
        let weights = Weights::open(&job.folder, &job.model, &job.table, job.seed)?;
        weights.load(&job.table, &mut engine, &names, &mut tell)?;
    }
    told?;
    if chores.trace || chores.timed {
        engine.record_trace();
    }
    let first = chores.from.map_or(0, |checkpoint| checkpoint.manifest().step);
    let mut saver = Saver::new(chores.saves, &names);
    let mut steps = Steps::new(job, &mut engine, chores)?;
    let (mut last, mut stopped, mut held, mut wish) = (None, false, Wish::GoOn, Wish::GoOn);
    let runs_ahead = chores.ahead && !chores.timed;
    done(Done::Loaded)?;
    for step in first..job.steps {
        let is_evaluated = job.evaluation.as_ref().is_some_and(|evaluation| {
            (step + 1).is_multiple_of(evaluation.every.max(1)) || step + 1 == job.steps
        });
        let is_saved = chores.saves.is_some_and(|saves| saves.is_due(step + 1, job.steps));
        let is_followed =
            runs_ahead && held == Wish::GoOn && !is_evaluated && !is_saved && step + 1 < job.steps;
        let line = steps.run(&mut engine, step, is_followed)?;
        if chores.timed {
            let (data, lengths) = (steps.data, std::mem::take(&mut steps.lengths));
            let times = engine.take_times(chores.trace)?;
            done(Done::Times(StepTimes { line: &line, data, lengths: &lengths, times: &times }))?;
        }
        done(Done::Step(&line))?;
        if steps.record.head.halted != 0 {
            saver.finish(&engine)?;
            return Err(not_finite(compiled, &steps.batches, &line, &steps.record));
        }
        if let Some(evaluation) = job.evaluation.as_ref().filter(|_| is_evaluated) {
            let found = evaluate(job, evaluation, &mut engine, &mut steps.buffer, line.step)?;
            let times = if chores.timed { engine.take_times(chores.trace)? } else { Vec::new() };
            done(Done::Evaluation(&found, &times))?;
        }
        let begun = Instant::now();
        let mut there;
        (wish, there) = saver.meet(&engine, line.step, held.max((chores.wish)()))?;
        // What is wished for waits for a step that is under way.
        held = if is_followed { std::mem::replace(&mut wish, Wish::GoOn) } else { Wish::GoOn };
        let saves_now = wish > Wish::GoOn || is_saved;
        if saves_now {
            // One at a time.
            there = saver.finish(&engine)?.or(there);
        }
        if let Some(step) = there {
            done(Done::Saved(step, begun.elapsed()))?;
        }
        if saves_now {
            let begun = Instant::now();
            done(Done::Saving(line.step))?;
            if let Some(step) = saver.save(&mut engine, &line)? {
                done(Done::Saved(step, begun.elapsed()))?;
            }
        }
        saver.take_notes().iter().try_for_each(|note| done(Done::Note(note)))?;
        last = Some(line);
        if wish >= Wish::Stop {
            stopped = line.step < job.steps;
            break;
        }
    }
    let begun = Instant::now();
    if let Some(step) = saver.finish(&engine)? {
        done(Done::Saved(step, begun.elapsed()))?;
    }
    saver.take_notes().iter().try_for_each(|note| done(Done::Note(note)))?;
    if let Some(folder) = chores.model.as_ref().filter(|_| !stopped) {
        let step = last.map_or(first, |line: StepLine| line.step);
        let source = ExportSource { step, checkpoint: None };
        let from = chores.from.filter(|from| from.manifest().step == step).map(ExportSource::of);
        let written = saver.written(step).filter(|_| engine.rank() == 0);
        let source = written.as_ref().map(ExportSource::of).or(from).unwrap_or(source);
        export(job, &mut engine, &names, folder, &source)?;
    }
    Ok(Ended { last, trace: engine.take_trace()?, stopped, wish })
}

/// What a rank keeps from step to step.
struct Steps<'a> {
    job: &'a Job,
    batches: Batches<'a>,
    /// The micro-batch that is being fed.
    buffer: MicroBatch,
    record: StepRecord,
    /// How long the last step's micro-batches took to put together.
    data: Duration,
    /// Lengths of this rank's sequences in the last step, where times are wanted.
    lengths: Vec<u64>,
    timed: bool,
    /// Updates that were applied: the place in the schedule.
    applied: u64,
    /// Steps that were enqueued, and when the newest record was seen.
    enqueued: u64,
    seen: Instant,
    /// How often resident memory is looked at, and the most that was seen.
    look: u64,
    resident: u64,
    planned: u64,
}

impl<'a> Steps<'a> {
    fn new(job: &'a Job, engine: &mut Engine<'_>, chores: &Chores<'_>) -> Result<Self, RunError> {
        let most_rows = job.row_sizes.last().copied().unwrap_or(0) as usize;
        let batches = job.batches();
        let evaluated = job.evaluation.as_ref().map_or(0, |evaluation| evaluation.samples.most_in_unit());
        let sequences = batches.most_sequences().max(evaluated * job.shape.micro_batch);
        Ok(Self {
            job,
            batches,
            buffer: MicroBatch::with_capacity(most_rows, sequences as usize),
            record: engine.record()?,
            data: Duration::ZERO,
            lengths: Vec::new(),
            timed: chores.timed,
            applied: engine.control()?.applied,
            enqueued: 0,
            seen: Instant::now(),
            look: chores.look.max(1),
            resident: resident_bytes(),
            planned: engine.compiled().memory.arena(Tier::Device),
        })
    }

    /// Enqueues a step.
    fn enqueue(&mut self, engine: &mut Engine<'_>, step: u64) -> Result<(), TrainError> {
        // Where the step before is not done yet, it may be applied or not: the device knows.
        let known = self.applied;
        let rates: [f64; RATES] = std::array::from_fn(|ahead| self.job.schedule.rate(known + ahead as u64));
        let mut batches = StepBatches::new(self.batches, step, engine.rank(), &mut self.buffer);
        if self.timed {
            batches.keep_lengths(&mut self.lengths);
        }
        engine.step_from(&mut batches, self.batches.trained_tokens(step), known, &rates)?;
        self.data = batches.time();
        self.enqueued = step + 1;
        Ok(())
    }

    /// Runs a step and says what it came to; where it is `followed`, the next one is enqueued before that is known.
    fn run(&mut self, engine: &mut Engine<'_>, step: u64, followed: bool) -> Result<StepLine, TrainError> {
        let begun = if self.enqueued > step { self.seen } else { Instant::now() };
        if self.enqueued <= step {
            self.enqueue(engine, step)?;
        }
        if followed {
            self.enqueue(engine, step + 1)?;
        }
        engine.read_record_of(engine.steps() - u64::from(followed), &mut self.record)?;
        self.seen = Instant::now();
        let before = std::mem::replace(&mut self.applied, self.record.head.applied);
        if step.is_multiple_of(self.look) {
            self.resident = self.resident.max(resident_bytes());
        }
        Ok(StepLine {
            step: step + 1,
            loss: self.record.head.loss,
            grad_norm: self.record.head.norm,
            lr: self.record.head.rate,
            tokens: self.batches.tokens(step),
            step_ms: (self.seen - begun).as_secs_f64() * 1e3,
            loss_scale: self.record.head.loss_scale,
            skipped: self.applied == before,
            device_bytes_peak: self.planned,
            host_bytes_peak: self.resident,
            samples_seen: (step + 1) * self.job.shape.train_batch(),
        })
    }
}

fn not_finite(
    compiled: &Compiled,
    batches: &Batches<'_>,
    line: &StepLine,
    record: &StepRecord,
) -> TrainError {
    let flat = usize::try_from(record.head.nonfinite_flat).ok().map(|flat| compiled.flat_name(flat));
    let what = match (record.head.nonfinite_rank, flat) {
        (rank @ 0.., Some(unit)) if line.loss.is_finite() => {
            format!("the gradient of {unit} on rank {rank} is")
        }
        (rank @ 0.., _) => format!("the loss of rank {rank} is"),
        (_, Some(unit)) => format!("the gradient of {unit} is"),
        (_, None) => "the sum of all gradients is".to_owned(),
    };
    if record.head.at_min_scale != 0 {
        return TrainError::AtMinScale { step: line.step, what, scale: line.loss_scale };
    }
    let samples = samples_of(batches, line.step - 1, u64::try_from(record.head.nonfinite_rank).ok());
    TrainError::NotFinite { step: line.step, what, loss: line.loss, samples }
}

/// The samples of a step, of one rank or of all, in words.
fn samples_of(batches: &Batches<'_>, step: u64, rank: Option<u64>) -> String {
    const SHOWN: usize = 32;
    let shape = batches.shape();
    let ranks = rank.map_or(0..shape.ranks, |rank| rank..rank + 1);
    let found = ranks
        .flat_map(|rank| (0..shape.accumulation).map(move |micro| (rank, micro)))
        .flat_map(|(rank, micro)| batches.places(step, micro, rank).map(|place| place.sample));
    // The first of them, and one more to know that there are more.
    let mut samples = BTreeSet::new();
    for sample in found {
        samples.insert(sample);
        if samples.len() > SHOWN + 1 {
            samples.pop_last();
        }
    }
    let shown: Vec<String> = samples.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if samples.len() > SHOWN { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}
