//! One rank's loop over the steps of a job.

use std::path::PathBuf;
use std::time::Instant;

use zeroth_comm::Comm;
use zeroth_device::{Device, RATES, Tier};
use zeroth_model::WeightsError;
use zeroth_step::run::{Compiled, Engine, MicroBatch as View, Rank, RunError, StepRecord, Trace};

use crate::evaluate::evaluate;
use crate::export::{ExportError, export};
use crate::resident::resident_bytes;
use crate::weights::Weights;
use crate::{EvaluationLine, Job, MetricsError, MicroBatch, StepLine};

/// What a rank is to do besides its steps.
#[derive(Debug, Default)]
pub struct Chores {
    /// Where the trained model goes; none: nowhere.
    pub model: Option<PathBuf>,
    /// Whether every instruction is timed.
    pub trace: bool,
    /// How often resident memory is looked at, in steps.
    pub look: u64,
}

/// What a rank tells as it goes.
#[derive(Debug, Clone, Copy)]
pub enum Done<'a> {
    /// A step.
    Step(&'a StepLine),
    /// An evaluation.
    Evaluation(&'a EvaluationLine),
}

/// How a rank ended.
#[derive(Debug)]
pub struct Ended {
    /// The last step's line.
    pub last: Option<StepLine>,
    /// What was timed.
    pub trace: Option<Trace>,
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
    /// The model could not be written.
    #[error(transparent)]
    Export(Box<ExportError>),
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
         {}. A lower learning rate or a look at the data of this step may help; --max-skipped-steps N lets N such \
         steps pass", step - 1
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// Whose loss or gradient, in words.
        what: String,
        /// The loss of the step.
        loss: f64,
    },
}

impl From<RunError> for TrainError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl From<ExportError> for TrainError {
    fn from(error: ExportError) -> Self {
        Self::Export(Box::new(error))
    }
}

/// Trains: loads this rank's part of the weights, runs all steps, writes the model. `done` is called after each step.
pub fn train(
    job: &Job,
    compiled: &Compiled,
    device: Box<dyn Device>,
    comm: Option<Box<dyn Comm>>,
    chores: &Chores,
    done: &mut dyn FnMut(Done<'_>) -> Result<(), TrainError>,
) -> Result<Ended, TrainError> {
    let decayed = |param| job.decays(compiled, param);
    let rank = Rank { comm, device, recipe: job.recipe, decayed: &decayed, seed: job.seed };
    let mut engine = Engine::new(compiled, rank)?;
    let names: Vec<String> = compiled.graph.params.iter().map(|param| param.spec.name.clone()).collect();
    Weights::open(&job.folder, &job.table, job.seed)?.load(&job.table, &mut engine, &names)?;
    if chores.trace {
        engine.record_trace();
    }
    let batches = job.batches();
    let most_rows = job.row_sizes.last().copied().unwrap_or(0) as usize;
    let buffer = || MicroBatch::with_capacity(most_rows, job.shape.micro_batch as usize);
    let mut buffers: Vec<MicroBatch> = (0..job.shape.accumulation).map(|_| buffer()).collect();
    let mut record = engine.record()?;
    let (mut applied, mut resident, mut last) = (0, resident_bytes(), None);
    for step in 0..job.steps {
        let begun = Instant::now();
        for (micro, buffer) in buffers.iter_mut().enumerate() {
            batches.fill(step, micro as u64, engine.rank(), buffer);
        }
        let rates: [f64; RATES] = std::array::from_fn(|ahead| job.schedule.rate(applied + ahead as u64));
        let views: Vec<View<'_>> = buffers.iter().map(MicroBatch::view).collect();
        engine.step(&views, batches.trained_tokens(step), applied, &rates)?;
        engine.read_record(&mut record)?;
        let before = applied;
        applied = record.head.applied;
        if step % chores.look.max(1) == 0 {
            resident = resident.max(resident_bytes());
        }
        let line = StepLine {
            step: step + 1,
            loss: record.head.loss,
            grad_norm: record.head.norm,
            lr: record.head.rate,
            tokens: batches.tokens(step),
            step_ms: begun.elapsed().as_secs_f64() * 1e3,
            loss_scale: record.head.loss_scale,
            skipped: applied == before,
            device_bytes_peak: compiled.memory.arena(Tier::Device),
            host_bytes_peak: resident,
            samples_seen: (step + 1) * job.shape.train_batch(),
        };
        done(Done::Step(&line))?;
        if record.head.halted != 0 {
            return Err(not_finite(compiled, &line, &record));
        }
        if let Some(evaluation) = &job.evaluation
            && (line.step.is_multiple_of(evaluation.every.max(1)) || line.step == job.steps)
        {
            let found = evaluate(job, evaluation, &mut engine, &mut buffers[0], line.step)?;
            done(Done::Evaluation(&found))?;
        }
        last = Some(line);
    }
    if let Some(folder) = &chores.model {
        export(job, &mut engine, &names, folder)?;
    }
    Ok(Ended { last, trace: engine.take_trace() })
}

fn not_finite(compiled: &Compiled, line: &StepLine, record: &StepRecord) -> TrainError {
    let flat = usize::try_from(record.head.broken_flat).ok().map(|flat| compiled.flat_name(flat));
    let what = match (record.head.broken_rank, flat) {
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
    TrainError::NotFinite { step: line.step, what, loss: line.loss }
}

impl MicroBatch {
    /// What an engine takes.
    pub fn view(&self) -> View<'_> {
        let Self { ids, labels, positions, starts, keys } = self;
        View { ids, labels, positions, starts, keys }
    }
}
