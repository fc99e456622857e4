//! The training loop of one rank.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use zeroth_comm::{Comm, OpName};
use zeroth_engine::{Engine, RankSetup, RunError, StepRecord};
use zeroth_graph::{LossPart, ParamId};
use zeroth_kernel::{Device, RATES, Tier};
use zeroth_program::Compiled;

use super::best::BestTracker;
use super::control::ControlRequest;
use super::error::TrainError;
use super::evaluate::evaluate;
use super::export_best::exists;
use super::load::load;
use super::options::{OnTrainEvent, TrainEvent, TrainHooks, TrainOptions, TrainOutcome};
use super::step_batches::StepBatches;
use super::trained_model::TrainedModel;
use crate::checkpoint::{BestEntry, Checkpoint};
use crate::data::{Batches, TokenBatch};
use crate::distill::TeacherRecords;
use crate::job::{Evaluation, Interval, Job};
use crate::report::timing::StepProfile;
use crate::report::{EvalMetrics, LossParts, RouterLoad, RouterWatch, StepMetrics, resident_bytes};
use crate::resume::CheckpointSaver;
use crate::weights::param_names;

/// The operation in which ranks leave the job.
const LEAVE: &str = "leave";

/// Trains one rank: loads its shard of the initial weights or of a checkpoint, runs the remaining steps, and exports the
/// model. Collective over all ranks.
pub fn train(
    job: &Job,
    compiled: &Compiled,
    device: Box<dyn Device>,
    comm: Option<Box<dyn Comm>>,
    options: &TrainOptions<'_>,
    hooks: TrainHooks<'_>,
) -> Result<TrainOutcome, TrainError> {
    let TrainHooks { on_event, control } = hooks;
    let decays = job.decays(compiled);
    let decayed = |param: ParamId| decays[param.index()];
    let rank = RankSetup { comm, device, recipe: job.recipe, decayed: &decayed, seed: job.seed };
    let mut engine = Engine::new(compiled, rank)?;
    if let Some(how) = engine.transport_note() {
        on_event(TrainEvent::TransportChosen(how))?;
    }
    let names = param_names(&engine);
    let frozen = load(job, &mut engine, &names, options.resume_from, on_event)?;
    if options.trace || options.profile {
        engine.record_trace();
    }
    let resumed = options.resume_from.map(Checkpoint::manifest);
    let first = resumed.map_or(0, |manifest| manifest.step);
    let run = job.run_steps();
    let mut best = resumed_best(job, &engine, options, on_event)?;
    // Nothing is left to train where early stopping ended the run.
    let mut ended_early = first < job.steps && best.as_ref().is_some_and(BestTracker::is_exhausted);
    let end = if ended_early { first } else { job.steps };
    let mut saver = CheckpointSaver::new(options.checkpoints, &names, frozen);
    let mut steps = StepRunner::new(job, &mut engine, options)?;
    let (mut last, mut stopped) = (None, false);
    let (mut deferred, mut request) = (ControlRequest::Continue, ControlRequest::Continue);
    let is_traced = options.trace || options.profile;
    let run_ahead = options.run_ahead && !options.profile;
    let mut routers = RouterWatch::new(compiled);
    on_event(TrainEvent::Loaded)?;
    for step in first..end {
        let is_evaluated =
            job.evaluation.as_ref().is_some_and(|evaluation| evaluation.interval.is_due(step + 1, run));
        let mut is_saved =
            options.checkpoints.is_some_and(|checkpoints| checkpoints.interval.is_due(step + 1, run));
        // The step after it would be recorded too.
        let timeline = (request == ControlRequest::Trace).then(|| engine.begin_timeline());
        let is_followed = run_ahead
            && timeline.is_none()
            && deferred == ControlRequest::Continue
            && !is_evaluated
            && !is_saved
            && step + 1 < job.steps;
        let line = steps.run(&mut engine, step, is_followed)?;
        if let Some(position) = timeline {
            let lines = engine.end_timeline(position, is_traced)?;
            on_event(TrainEvent::Timeline { step: line.step, lines: &lines })?;
        }
        if options.profile {
            steps.report_profile(&mut engine, &line, options.trace, on_event)?;
        }
        on_event(TrainEvent::Step(&line))?;
        if steps.record.head.halted != 0 {
            saver.finish(&engine)?;
            let router = routers.nonfinite(&steps.record.counts);
            return Err(not_finite(job, compiled, &line, &steps.record, router));
        }
        for note in routers.observe(line.step, &steps.record.counts) {
            on_event(TrainEvent::Note(&note))?;
        }
        if let Some(evaluation) = job.evaluation.as_ref().filter(|_| is_evaluated) {
            let found = steps.evaluate(&mut engine, evaluation, line.step, options, on_event)?;
            if let Some(best) = &mut best {
                let is_best = best.observe(&found);
                // A run that ends early saves its last step, as any other.
                ended_early = line.step < job.steps && best.is_exhausted();
                is_saved |= options.checkpoints.is_some_and(|checkpoints| {
                    (is_best && checkpoints.on_best)
                        || (ended_early && checkpoints.interval != Interval::Never)
                });
            }
        }
        let begun = Instant::now();
        let mut committed;
        (request, committed) = saver.sync_ranks(&engine, line.step, deferred.max(control()))?;
        if timeline.is_some() {
            on_event(TrainEvent::TimelineComplete(line.step))?;
        }
        // A request waits for a step that is already enqueued.
        deferred = if is_followed { std::mem::take(&mut request) } else { ControlRequest::Continue };
        let saves_now = request >= ControlRequest::Save || is_saved;
        if saves_now {
            // One checkpoint at a time.
            committed = saver.finish(&engine)?.or(committed);
        }
        if let Some(step) = committed {
            on_event(TrainEvent::CheckpointSaved { step, stalled: begun.elapsed() })?;
        }
        if saves_now {
            // A record that is not continued is not forgotten, either.
            let kept = resumed.and_then(|manifest| manifest.best.as_ref());
            let best = best.as_mut().map(|best| best.saved_at(line.step)).or(kept);
            save(&mut saver, &mut engine, &line, best, on_event)?;
        }
        saver.take_notes().iter().try_for_each(|note| on_event(TrainEvent::Note(note)))?;
        last = Some(line);
        if let Some(best) = best.as_ref().filter(|_| ended_early) {
            on_event(TrainEvent::Note(&format!("stopped early at step {}: {}", line.step, best.reason())))?;
            break;
        }
        if request.stops() {
            stopped = line.step < job.steps;
            break;
        }
    }
    finish_saves(&mut saver, &engine, on_event)?;
    if let Some(folder) = options.export_to.as_ref().filter(|_| !stopped) {
        let step = last.map_or(first, |line: StepMetrics| line.step);
        let model = TrainedModel { job, options, names: &names, first, step, ended_early };
        model.export(&mut engine, &saver, best.as_ref(), folder, on_event)?;
    }
    let trace = engine.take_trace()?;
    if let Some(comm) = engine.comm() {
        let step = last.map_or(first, |line: StepMetrics| line.step);
        let left = comm.leave(OpName::new(step, LEAVE, 0));
        left.map_err(|source| RunError::Comm { step, op: LEAVE.to_owned(), source })?;
    }
    Ok(TrainOutcome { last, trace, stopped, request })
}

/// The record of the best evaluation so far, if a flag asks for one.
fn resumed_best(
    job: &Job,
    engine: &Engine<'_>,
    options: &TrainOptions<'_>,
    on_event: OnTrainEvent<'_>,
) -> Result<Option<BestTracker>, TrainError> {
    let mut best = job.best_tracker(options.resume_from.map(Checkpoint::manifest));
    if let Some(why) = best.as_ref().and_then(BestTracker::restarted) {
        on_event(TrainEvent::Note(why))?;
    }
    if let Some((best, saved)) = best.as_mut().and_then(|best| best.to_export().map(|saved| (best, saved)))
        && !exists(engine, saved.step, options)?
    {
        best.forget_saved();
        on_event(TrainEvent::Note(&format!(
            "the best checkpoint so far, step {}, no longer exists: the best is chosen from the evaluations that follow",
            saved.step
        )))?;
    }
    Ok(best)
}

/// Writes a checkpoint.
fn save(
    saver: &mut CheckpointSaver<'_>,
    engine: &mut Engine<'_>,
    line: &StepMetrics,
    best: Option<&BestEntry>,
    on_event: OnTrainEvent<'_>,
) -> Result<(), TrainError> {
    let begun = Instant::now();
    on_event(TrainEvent::CheckpointStarting(line.step))?;
    match saver.save(engine, line, best)? {
        Some(step) => on_event(TrainEvent::CheckpointSaved { step, stalled: begun.elapsed() }),
        None => Ok(()),
    }
}

/// Waits for the checkpoint that is being written.
fn finish_saves(
    saver: &mut CheckpointSaver<'_>,
    engine: &Engine<'_>,
    on_event: OnTrainEvent<'_>,
) -> Result<(), TrainError> {
    let begun = Instant::now();
    if let Some(step) = saver.finish(engine)? {
        on_event(TrainEvent::CheckpointSaved { step, stalled: begun.elapsed() })?;
    }
    saver.take_notes().iter().try_for_each(|note| on_event(TrainEvent::Note(note)))
}

/// Runs the steps of one rank.
struct StepRunner<'a> {
    job: &'a Job,
    batches: Batches<'a>,
    /// The micro-batch being fed.
    buffer: TokenBatch,
    /// What a cache has of the teacher.
    teacher: TeacherRecords,
    record: StepRecord,
    /// Time spent assembling the last step's micro-batches.
    data: Duration,
    /// Lengths of this rank's sequences in the last step, of each stream, if profiling.
    lengths: [Vec<u64>; 2],
    profile: bool,
    /// Updates applied: the position in the learning-rate schedule.
    applied: u64,
    /// Steps enqueued, and when the newest record was read back.
    enqueued: u64,
    seen: Instant,
    /// Steps between measurements of resident memory, and its peak.
    rss_interval: u64,
    resident: u64,
    planned: u64,
}

impl<'a> StepRunner<'a> {
    /// Reports the instruction times of the last step.
    fn report_profile(
        &mut self,
        engine: &mut Engine<'_>,
        metrics: &StepMetrics,
        is_traced: bool,
        on_event: OnTrainEvent<'_>,
    ) -> Result<(), TrainError> {
        let lengths = std::mem::take(&mut self.lengths);
        let times = engine.take_times(is_traced)?;
        on_event(TrainEvent::StepProfile(StepProfile {
            metrics,
            data: self.data,
            lengths: &lengths,
            times: &times,
        }))
    }

    /// Evaluates after a step.
    fn evaluate(
        &mut self,
        engine: &mut Engine<'_>,
        evaluation: &Evaluation,
        step: u64,
        options: &TrainOptions<'_>,
        on_event: OnTrainEvent<'_>,
    ) -> Result<EvalMetrics, TrainError> {
        on_event(TrainEvent::EvalStarting)?;
        let found = evaluate(self.job, evaluation, engine, &mut self.buffer, step)?;
        let times = if options.profile { engine.take_times(options.trace)? } else { Vec::new() };
        on_event(TrainEvent::Eval(&found, &times))?;
        Ok(found)
    }

    fn new(job: &'a Job, engine: &mut Engine<'_>, options: &TrainOptions<'_>) -> Result<Self, RunError> {
        let rows = job.row_sizes.iter().last().unwrap_or_default();
        let most_rows = [0, 1].map(|stream| rows.get(stream).map_or(0, |rows| *rows as usize));
        let batches = job.batches();
        let evaluated = job.evaluation.as_ref().map_or(0, |evaluation| {
            evaluation.samples.most_in_item() * evaluation.shape(job.shape).micro_batch
        });
        let sequences = batches.most_sequences().max(evaluated);
        Ok(Self {
            job,
            batches,
            buffer: TokenBatch::with_streams(most_rows, sequences as usize),
            teacher: TeacherRecords::default(),
            record: engine.record()?,
            data: Duration::ZERO,
            lengths: Default::default(),
            profile: options.profile,
            applied: engine.control()?.applied,
            enqueued: 0,
            seen: Instant::now(),
            rss_interval: options.rss_interval.max(1),
            resident: resident_bytes(),
            planned: engine.compiled().memory.arena(Tier::Device),
        })
    }

    /// Enqueues a step.
    fn enqueue(&mut self, engine: &mut Engine<'_>, step: u64) -> Result<(), TrainError> {
        // While the previous step is in flight, only the device knows whether it will be applied.
        let known = self.applied;
        let rates: [f64; RATES] = std::array::from_fn(|ahead| self.job.schedule.rate(known + ahead as u64));
        let mut batches =
            StepBatches::new(self.batches, step, engine.rank(), &mut self.buffer, &mut self.teacher);
        if self.profile {
            batches.keep_lengths(&mut self.lengths);
        }
        engine.step_from(&mut batches, self.batches.trained_tokens(step), known, &rates)?;
        self.data = batches.time();
        self.enqueued = step + 1;
        Ok(())
    }

    /// Runs a step and returns its metrics; if `followed`, enqueues the next one before reading them back.
    fn run(&mut self, engine: &mut Engine<'_>, step: u64, followed: bool) -> Result<StepMetrics, TrainError> {
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
        if step.is_multiple_of(self.rss_interval) {
            self.resident = self.resident.max(resident_bytes());
        }
        Ok(StepMetrics {
            step: step + 1,
            loss: self.record.head.loss,
            loss_parts: loss_parts(&engine.compiled().program.losses, &self.record.losses),
            router: RouterLoad::of(&engine.compiled().program.routers, &self.record.counts),
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

/// The parts of a loss with their names; a loss of one part has none.
fn loss_parts(parts: &[LossPart], values: &[f64]) -> LossParts {
    let named = parts.iter().map(|part| part.name).zip(values.iter().copied());
    let mut named = named.filter(|_| parts.len() > 1);
    std::array::from_fn(|_| named.next())
}

/// `router` is the unit of the first router whose weights were not finite.
fn not_finite(
    job: &Job,
    compiled: &Compiled,
    line: &StepMetrics,
    record: &StepRecord,
    router: Option<&str>,
) -> TrainError {
    let flat = usize::try_from(record.head.nonfinite_flat).ok().map(|flat| compiled.flat_name(flat));
    let what = match (record.head.nonfinite_rank, flat) {
        (rank @ 0.., Some(unit)) if line.loss.is_finite() => {
            format!("the gradient of {unit} on rank {rank}")
        }
        (rank @ 0.., _) => format!("the loss of rank {rank}"),
        (_, Some(unit)) => format!("the gradient of {unit}"),
        (_, None) => "the sum of all gradients".to_owned(),
    };
    let what = match router {
        Some(unit) => format!("the weights of the router of {unit}, and so {what}, are"),
        None => format!("{what} is"),
    };
    if record.head.at_min_scale != 0 {
        return TrainError::AtMinScale { step: line.step, what, scale: line.loss_scale };
    }
    let rank = u64::try_from(record.head.nonfinite_rank).ok();
    let mut samples = samples_of(&job.batches(), line.step - 1, rank);
    if job.samples.is_part() {
        samples.push_str(" (not counting those held out for evaluation)");
    }
    TrainError::NotFinite { step: line.step, what, loss: line.loss, samples }
}

/// Lists the samples of a step, of one rank or of all.
fn samples_of(batches: &Batches<'_>, step: u64, rank: Option<u64>) -> String {
    const SHOWN: usize = 32;
    let shape = batches.shape();
    let ranks = rank.map_or(0..shape.ranks, |rank| rank..rank + 1);
    let found = ranks
        .flat_map(|rank| (0..shape.accumulation).map(move |micro| (rank, micro)))
        .flat_map(|(rank, micro)| batches.places(step, micro, rank).map(|place| place.sample));
    // Keeps one more than shown, to know whether there are more.
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
