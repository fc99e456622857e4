//! Handles training events on rank 0: metrics to the run folder and monitors, progress to stderr.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use zeroth::job::{ResolvedJob, is_inside};
use zeroth::kernel::Target;
use zeroth::machine::bench::Identity;
use zeroth::machine::{DeviceKind, Gpus, probe};
use zeroth::program::Compiled;
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::progress::{Progress, bar, line};
use zeroth::train::report::ResumePosition;
use zeroth::train::report::flops::{ComputeRate, ModelFlops, Peak};
use zeroth::train::report::pair_flops::PairFlops;
use zeroth::train::report::timing::StepTiming;
use zeroth::train::{Distillation, Interval, Job, ReportPlan, Reporters, StepMetrics, TrainEvent};

use super::resolve_job::report_to;
use crate::cli::TrainArgs;
use crate::commands::machine_profile;
use crate::output;
use crate::sanitize::sanitize;
use crate::terminal::{Meter, Terminal};

/// Totals since the last progress line.
#[derive(Default)]
struct Since {
    steps: u32,
    tokens: u64,
    time: Duration,
    flops: f64,
}

/// Reports the progress of a run.
pub(super) struct ProgressReporter<'a> {
    job: &'a Job,
    compiled: &'a Compiled,
    reporters: Reporters,
    timing: StepTiming,
    model_flops: Option<Flops>,
    /// Peak FLOP/s of all devices together.
    peak: Option<f64>,
    total_steps: u64,
    /// When a line is due.
    logging: Interval,
    steps_per_print: Option<u64>,
    terminal: Terminal,
    loading: Option<Meter>,
    log: Option<File>,
    shares_memory: bool,
    since: Since,
    /// Whether a step was reported: if steps are counted, the first one has a line, also after resuming.
    has_begun: bool,
}

impl<'a> ProgressReporter<'a> {
    pub(super) fn new(
        resolved_job: &'a ResolvedJob,
        compiled: &'a Compiled,
        arguments: &TrainArgs,
    ) -> anyhow::Result<Self> {
        let folder = arguments.output.as_path();
        let plan = report_plan(arguments, resolved_job)?;
        // A run resumed in its own folder keeps its metrics; in another, they start at the next step.
        let resumed = resolved_job.checkpoint.as_ref().filter(|found| is_inside(found.folder(), folder));
        let after = resumed.map(Checkpoint::manifest);
        let after =
            after.map(|manifest| ResumePosition { step: manifest.step, samples: manifest.samples_seen });
        Ok(Self {
            job: &resolved_job.job,
            compiled,
            reporters: Reporters::open(&plan, folder, after)?,
            timing: StepTiming::from_config(&resolved_job.resolved),
            model_flops: flops(&resolved_job.job),
            peak: peak(resolved_job, compiled.target),
            total_steps: resolved_job.job.steps,
            logging: resolved_job.strategies.logging,
            steps_per_print: resolved_job.steps_per_print,
            terminal: Terminal::find(),
            loading: None,
            log: None,
            shares_memory: resolved_job.device == DeviceKind::Cpu,
            since: Since::default(),
            has_begun: false,
        })
    }

    /// Whether instructions must be timed.
    pub(super) fn needs_profile(&self) -> bool {
        self.timing.is_enabled()
    }

    /// Also writes lines to a log file, as a launcher does for its ranks.
    pub(super) fn with_log(mut self, path: &Path) -> anyhow::Result<Self> {
        self.log = Some(File::options().create(true).append(true).open(path)?);
        Ok(self)
    }

    fn print(&mut self, text: &str) {
        output::note(text);
        if let Some(log) = &mut self.log {
            let _ = writeln!(log, "{}", sanitize(text));
        }
    }

    pub(super) fn handle(&mut self, event: TrainEvent<'_>) {
        match event {
            TrainEvent::TransportChosen(how) => self.print(&format!("ranks exchange bytes {how}")),
            TrainEvent::Loading { loaded, total } => {
                let meter = self.loading.get_or_insert_with(|| Meter::new("loading weights"));
                meter.tell(loaded, total, || None);
            }
            TrainEvent::Loaded => self.loading = None,
            TrainEvent::Step(step) => {
                let flops =
                    self.model_flops.as_ref().map_or(0.0, |model| model.step(self.lengths(step.step)));
                let peak = self.peak.filter(|_| flops > 0.0 && step.step_ms > 0.0);
                self.reporters.step(step, peak.map(|peak| flops / (step.step_ms / 1e3) / peak));
                self.tell_problem();
                self.progress(step, flops);
            }
            TrainEvent::StepProfile(profile) => match self.timing.step(self.compiled, profile) {
                Ok(Some(profile)) => self.print(&profile),
                Ok(None) => {}
                Err(error) => self.print(&format!("note: the profile was not written: {error}")),
            },
            TrainEvent::Eval(found, times) => {
                self.timing.evaluation(self.compiled, times);
                self.reporters.evaluation(found);
                self.print(&format!(
                    "step {} · eval loss {:.4} · perplexity {:.2}",
                    found.step, found.eval_loss, found.eval_perplexity
                ));
            }
            TrainEvent::EvalStarting
            | TrainEvent::Exporting
            | TrainEvent::Timeline { .. }
            | TrainEvent::TimelineComplete(_) => {}
            TrainEvent::Note(note) => self.print(&format!("note: {note}")),
            TrainEvent::CheckpointStarting(_) => {
                self.reporters.sync();
                self.tell_problem();
            }
            TrainEvent::CheckpointSaved { step, stalled } => {
                self.timing.save(stalled);
                self.print(&format!("step {step} · saved"));
            }
        }
    }

    /// Metrics are not worth a run: a full disk has one note.
    fn tell_problem(&mut self) {
        if let Some(problem) = self.reporters.take_problem() {
            self.print(&format!("note: {problem}"));
        }
    }

    fn progress(&mut self, step: &StepMetrics, flops: f64) {
        self.since.steps += 1;
        self.since.tokens += step.tokens;
        self.since.time += Duration::from_secs_f64(step.step_ms / 1e3);
        self.since.flops += flops;
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        let due = self.logging.is_due(step.step, self.job.run_steps())
            || self.steps_per_print.is_some_and(|every| every > 0 && step.step.is_multiple_of(every))
            || (is_first && matches!(self.logging, Interval::Steps(_)));
        if !due && self.terminal == Terminal::None {
            return;
        }
        let Since { steps, tokens, time, flops } = self.since;
        let now = Progress {
            step: step.step,
            total_steps: self.total_steps,
            loss: step.loss,
            distilled: distilled(step),
            grad_norm: step.grad_norm,
            lr: step.lr,
            tokens_per_second: tokens as f64 / time.as_secs_f64(),
            rate: self
                .model_flops
                .is_some()
                .then(|| ComputeRate { flops: flops / time.as_secs_f64(), peak: self.peak }),
            device_bytes: if self.shares_memory { 0 } else { step.device_bytes_peak },
            host_bytes: step.host_bytes_peak,
            step_time: time / steps.max(1),
        };
        match self.terminal {
            Terminal::None => self.print(&line(&now)),
            terminal => terminal.show(Some(&bar(&now))),
        }
        if due {
            self.since = Since::default();
            if let Some(breakdown) = self.timing.line() {
                self.print(&breakdown);
            }
        }
    }

    /// Lengths of all samples of a step, of tokens and labels; steps count from 1.
    fn lengths(&self, step: u64) -> impl Iterator<Item = [u64; 2]> {
        let (job, shape) = (self.job, self.job.shape);
        let first = shape.position(step - 1, 0, 0);
        let places = job.order.from(first).take(shape.train_batch() as usize);
        let sequences = places.flat_map(|place| job.samples.members(place.sample));
        sequences.map(|sample| [job.samples.sample_length(sample), job.samples.label_count(sample)])
    }
}

/// The reports of a run, and where they go.
pub(super) fn report_plan(arguments: &TrainArgs, resolved_job: &ResolvedJob) -> anyhow::Result<ReportPlan> {
    let mut plan = ReportPlan::new(&resolved_job.resolved, &report_to(arguments)?, &arguments.output);
    if resolved_job.job.objective.distillation().is_some() {
        plan = plan.with_loss_parts(vec!["ce_loss", "kd_loss"]);
    }
    if let Some(folder) = &arguments.trainer.logging_dir {
        plan = plan.in_folder(folder);
    }
    Ok(match &resolved_job.run_name {
        Some(name) => plan.named(name),
        None => plan,
    })
}

/// The FLOPs of a job's steps, those of the teacher's forward included.
fn flops(job: &Job) -> Option<Flops> {
    if let Some(pairs) = PairFlops::of(&job.model, &job.table) {
        return Some(Flops::Pairs(pairs));
    }
    let student = ModelFlops::of(&job.model, &job.table)?;
    match job.objective.distillation().and_then(Distillation::model) {
        Some(teacher) => {
            Some(Flops::Rows(student.with_teacher(ModelFlops::of(&teacher.config, &teacher.table)?)))
        }
        None => Some(Flops::Rows(student)),
    }
}

/// The FLOPs of a step.
enum Flops {
    /// Of a decoder-only model.
    Rows(ModelFlops),
    /// Of an encoder-decoder.
    Pairs(PairFlops),
}

impl Flops {
    /// Those over samples of these lengths.
    fn step(&self, lengths: impl Iterator<Item = [u64; 2]>) -> f64 {
        match self {
            Self::Rows(model) => model.step(lengths.map(|[length, _]| length)),
            Self::Pairs(model) => model.step(lengths),
        }
    }
}

/// Cross-entropy and divergence of a step that is distilled.
fn distilled(step: &StepMetrics) -> Option<[f64; 2]> {
    let part = |name: &str| {
        let mut parts = step.loss_parts.iter().flatten();
        parts.find(|(known, _)| *known == name).map(|(_, part)| *part)
    };
    Some([part("ce_loss")?, part("kd_loss")?])
}

/// Peak FLOP/s of all GPUs in use, from datasheets; on a CPU, as measured by `zeroth bench`, if it was run. Other hosts count
/// as this one.
fn peak(resolved_job: &ResolvedJob, target: &dyn Target) -> Option<f64> {
    let dtype = resolved_job.job.settings.types.compute;
    let local_ranks = resolved_job.started.local_world;
    let hosts = resolved_job.ranks as f64 / local_ranks as f64;
    if target.is_host() {
        if !machine_profile::is_any_kept() {
            return None;
        }
        let machine = Identity::of(&probe());
        let (_, profile) = machine_profile::kept(&machine).ok()??;
        let threads = (local_ranks as usize * target.threads()).min(machine.threads as usize);
        return profile.peak_flops(dtype, threads).map(|peak| peak * hosts);
    }
    let Gpus::Found { devices, .. } = probe().gpus else { return None };
    let used = devices.iter().take(local_ranks as usize);
    let of_host: Option<f64> = used.map(|gpu| Peak::of(&gpu.name, dtype).map(|peak| peak.flops)).sum();
    of_host.map(|peak| peak * hosts)
}
