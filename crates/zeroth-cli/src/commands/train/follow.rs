//! What rank 0 does as steps get done: metrics to the run folder and to monitors, progress to standard error.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use zeroth::machine::bench::Identity;
use zeroth::machine::{Gpus, probe};
use zeroth::program::Compiled;
use zeroth::program::Target;
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::progress::{Progress, bar, line};
use zeroth::train::report::Position;
use zeroth::train::report::figures::{Peak, Rate, Work};
use zeroth::train::report::timing::Timing;
use zeroth::train::{Done, Job, Report, ReportPlan, Reporters, StepLine, TrainError};

use super::ask::Asked;
use super::resume::is_inside;
use crate::cli::{DeviceArg, TrainArgs};
use crate::commands::bench::profile;
use crate::output;
use crate::plain::plain;
use crate::terminal::{Meter, Terminal};

/// What was done since the last line.
#[derive(Default)]
struct Since {
    steps: u32,
    tokens: u64,
    time: Duration,
    /// Floating-point operations.
    work: f64,
}

pub(super) struct Follower<'a> {
    job: &'a Job,
    compiled: &'a Compiled,
    reporters: Reporters,
    timing: Timing,
    work: Option<Work>,
    /// Of all devices together.
    peak: Option<f64>,
    total_steps: u64,
    every: u64,
    steps_per_print: Option<u64>,
    terminal: Terminal,
    loading: Option<Meter>,
    log: Option<File>,
    shares_memory: bool,
    since: Since,
    /// Whether a step was followed: the first one, also of a run that goes on, has a line.
    has_begun: bool,
}

impl<'a> Follower<'a> {
    pub(super) fn new(
        asked: &'a Asked,
        compiled: &'a Compiled,
        arguments: &TrainArgs,
    ) -> anyhow::Result<Self> {
        let folder = arguments.output.as_path();
        let plan = ReportPlan::new(&asked.resolved, &report_to(arguments)?, folder);
        // A run that goes on in its own folder keeps what it has told so far; in another, it begins at the next step.
        let goes_on = asked.checkpoint.as_ref().filter(|found| is_inside(found.folder(), folder));
        let after = goes_on.map(Checkpoint::manifest);
        let after = after.map(|manifest| Position { step: manifest.step, samples: manifest.samples_seen });
        Ok(Self {
            job: &asked.job,
            compiled,
            reporters: Reporters::open(&plan, folder, after)?,
            timing: Timing::from_config(&asked.resolved),
            work: Work::of(&asked.job.model, &asked.job.table),
            peak: peak(asked, compiled.target),
            total_steps: asked.job.steps,
            every: asked.logging_steps,
            steps_per_print: asked.steps_per_print,
            terminal: Terminal::find(),
            loading: None,
            log: None,
            shares_memory: asked.device == DeviceArg::Cpu,
            since: Since::default(),
            has_begun: false,
        })
    }

    /// Whether the times of instructions are wanted.
    pub(super) fn wants_times(&self) -> bool {
        self.timing.is_wanted()
    }

    /// Lines go to this file too: what a launcher does for the ranks it starts.
    pub(super) fn with_log(mut self, path: &Path) -> anyhow::Result<Self> {
        self.log = Some(File::options().create(true).append(true).open(path)?);
        Ok(self)
    }

    fn say(&mut self, text: &str) {
        output::note(text);
        if let Some(log) = &mut self.log {
            let _ = writeln!(log, "{}", plain(text));
        }
    }

    pub(super) fn take(&mut self, done: Done<'_>) -> Result<(), TrainError> {
        match done {
            Done::Met(how) => self.say(&format!("ranks exchange bytes {how}")),
            Done::Loading { done, total } => {
                let meter = self.loading.get_or_insert_with(|| Meter::new("loading weights"));
                meter.tell(done, total, || None);
            }
            Done::Loaded => self.loading = None,
            Done::Step(step) => {
                self.reporters.step(step)?;
                self.progress(step);
            }
            Done::Times(times) => {
                if let Some(profile) = self.timing.step(self.compiled, times)? {
                    self.say(&profile);
                }
            }
            Done::Evaluation(found, times) => {
                self.timing.evaluation(self.compiled, times);
                self.reporters.evaluation(found)?;
                self.say(&format!(
                    "step {} · eval loss {:.4} · perplexity {:.2}",
                    found.step, found.eval_loss, found.eval_perplexity
                ));
            }
            Done::Note(note) => self.say(&format!("note: {note}")),
            Done::Saving(_) => self.reporters.sync()?,
            Done::Saved(step, took) => {
                self.timing.save(took);
                self.say(&format!("step {step} · saved"));
            }
        }
        Ok(())
    }

    fn progress(&mut self, step: &StepLine) {
        self.since.steps += 1;
        self.since.tokens += step.tokens;
        self.since.time += Duration::from_secs_f64(step.step_ms / 1e3);
        self.since.work += self.work.as_ref().map_or(0.0, |work| work.step(self.lengths(step.step)));
        let asked_for = |every: u64| every > 0 && step.step.is_multiple_of(every);
        let due = asked_for(self.every)
            || self.steps_per_print.is_some_and(asked_for)
            || !std::mem::replace(&mut self.has_begun, true)
            || step.step == self.total_steps;
        if !due && self.terminal == Terminal::None {
            return;
        }
        let Since { steps, tokens, time, work } = self.since;
        let now = Progress {
            step: step.step,
            total_steps: self.total_steps,
            loss: step.loss,
            grad_norm: step.grad_norm,
            lr: step.lr,
            tokens_per_second: tokens as f64 / time.as_secs_f64(),
            rate: self.work.is_some().then(|| Rate { flops: work / time.as_secs_f64(), peak: self.peak }),
            device_bytes: if self.shares_memory { 0 } else { step.device_bytes_peak },
            host_bytes: step.host_bytes_peak,
            step_time: time / steps.max(1),
        };
        match self.terminal {
            Terminal::None => self.say(&line(&now)),
            terminal => terminal.show(Some(&bar(&now))),
        }
        if due {
            self.since = Since::default();
            if let Some(breakdown) = self.timing.line() {
                self.say(&breakdown);
            }
        }
    }

    /// Lengths of all sequences of a step, counted from 1.
    fn lengths(&self, step: u64) -> impl Iterator<Item = u64> {
        let (job, shape) = (self.job, self.job.shape);
        let first = shape.position(step - 1, 0, 0);
        let places = job.order.from(first).take(shape.train_batch() as usize);
        let sequences = places.flat_map(|place| job.samples.members(place.sample));
        sequences.map(|sample| job.samples.sample_length(sample))
    }
}

/// What else `--report-to` asks for.
pub(super) fn report_to(arguments: &TrainArgs) -> anyhow::Result<Vec<Report>> {
    Ok(Report::parse(arguments.report_to.iter().map(String::as_str))?)
}

/// The peak of all cards that ranks run on, where a datasheet tells it; on a processor what `zeroth bench` has measured
/// there, if it has.
fn peak(asked: &Asked, target: Target) -> Option<f64> {
    let dtype = asked.job.settings.types.compute;
    if let Target::Cpu { threads } = target {
        if !profile::is_any_kept() {
            return None;
        }
        let machine = Identity::of(&probe());
        let (_, profile) = profile::kept(&machine).ok()??;
        let threads = (asked.ranks as usize * threads).min(machine.threads as usize);
        return profile.peak_flops(dtype, threads);
    }
    let Gpus::Found { devices, .. } = probe().gpus else { return None };
    let used = devices.iter().take(asked.ranks as usize);
    used.map(|gpu| Peak::of(&gpu.name, dtype).map(|peak| peak.flops)).sum()
}
