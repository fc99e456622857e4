//! Runs one rank: its device, its hooks, and its exit code.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use zeroth::base::publish;
use zeroth::comm::local::join_from_environment;
use zeroth::comm::{Comm, JobControl, JoinOptions, Timing, alone};
use zeroth::engine::RunError;
use zeroth::job::{LauncherHandoff, ResolvedJob};
use zeroth::kernel::{Device, Tier};
use zeroth::program::Compiled;
use zeroth::train::{
    ControlRequest, ExportError, LoraWeightsError, TrainError, TrainEvent, TrainHooks, TrainOptions,
    TrainOutcome, train,
};

use super::live::{LiveRank, LiveStatus};
use super::prepared_run::PreparedRun;
use super::reporter::ProgressReporter;
use super::{agreement, checkpoints, resolve_job, summary};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output;
use crate::signals::{SaveSignals, SignalRole, Signals};
use crate::startup_signals::InterruptedWork;
use crate::stop_signal::StopSignal;

/// Runs a single rank: launcher and rank in one process.
pub(super) fn only(
    arguments: &TrainArgs,
    run: &PreparedRun,
    signals: &Signals,
    status: &LiveStatus,
) -> anyhow::Result<Exit> {
    let PreparedRun { resolved_job, compiled, folder, .. } = run;
    let open = || ProgressReporter::new(resolved_job, compiled, arguments)?.with_log(&folder.log(0)?);
    let reporter = signals.startup().map_or_else(open, |before| before.write(open))?;
    let control = alone();
    status.observe(&*control);
    match steps(arguments, resolved_job, compiled, None, Some(reporter), signals, &*control)? {
        Ok(outcome) => {
            if let (Some(path), Some(trace)) = (&arguments.trace, &outcome.trace) {
                summary::trace(path, &[trace.to_json_lines()?])?;
            }
            Ok(exit_of(&outcome))
        }
        Err(error) => Ok(failed(&error)),
    }
}

/// Runs one of several ranks, started by zeroth's launcher.
pub(super) fn of_a_launcher(arguments: &TrainArgs) -> anyhow::Result<Exit> {
    let signals = Signals::install(SignalRole::Launched, InterruptedWork::Training, SaveSignals::NONE)?;
    // Started from /proc/self/exe, a rank would appear as "exe" in process lists.
    let _ = fs::write("/proc/self/comm", "zeroth");
    let mut resolved_job = resolve_job::resolve_job(arguments, None, LauncherHandoff::from_environment()?)?;
    // The launcher has checked and shown everything; a rank only prints errors.
    let compiled = match resolved_job.fit()? {
        Ok(compiled) => compiled,
        Err(misfit) => {
            output::error(&misfit.to_string());
            return Ok(Exit::DoesNotFit);
        }
    };
    let comm = join_from_environment(&options(&resolved_job))?
        .context("the launcher's environment variables are missing")?;
    agreement::check(comm.rank(), &agreement::of(arguments, &resolved_job), &resolved_job.handoff.agreement)?;
    joined(arguments, &resolved_job, &compiled, comm, &signals, Agreed::No)
}

/// Options for joining the other ranks.
pub(super) fn options(resolved_job: &ResolvedJob) -> JoinOptions {
    let threads = resolved_job.threads.min(resolved_job.target.threads());
    let stall = Duration::from_secs(resolved_job.resolved.values.zeroth.stall_seconds);
    let timing = Timing { lost: stall, ..Timing::default() };
    let options = JoinOptions::default().threads(threads).timing(timing);
    // On several hosts a segment holds one group, or ranks that are groups themselves.
    let is_one_host = resolved_job.started.local_world == resolved_job.started.world;
    let options = match resolved_job.job.settings.group.filter(|_| is_one_host) {
        Some(group) => options.group(group as usize),
        None => options,
    };
    options.on_slow(|slow| output::note(&slow.to_string()))
}

/// Whether ranks have exchanged whether they can take part, and what they differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Agreed {
    Yes,
    No,
}

/// Runs a rank that has joined the others.
pub(super) fn joined(
    arguments: &TrainArgs,
    resolved_job: &ResolvedJob,
    compiled: &Compiled,
    comm: Box<dyn Comm>,
    signals: &Signals,
    agreed: Agreed,
) -> anyhow::Result<Exit> {
    let number = comm.rank();
    if let Some(before) = signals.startup() {
        before.join(comm.control());
    }
    let open = || ProgressReporter::new(resolved_job, compiled, arguments);
    let reporter = match (number, signals.startup()) {
        (0, Some(before)) => Some(before.write(open)?),
        (0, None) => Some(open()?),
        _ => None,
    };
    if agreed == Agreed::No
        && let Some(exit) =
            agreement::exchange(&*comm, Ok(&resolved_job.facts.of_rank(local_rank(resolved_job, number))))?
    {
        return Ok(exit);
    }
    let control = comm.control();
    match steps(arguments, resolved_job, compiled, Some(comm), reporter, signals, &*control)? {
        Ok(outcome) => {
            if let Some(trace) = outcome.trace.as_ref().filter(|_| arguments.trace.is_some()) {
                publish(&summary::trace_part(&arguments.output, number), trace.to_json_lines()?.as_bytes())?;
            }
            Ok(exit_of(&outcome))
        }
        // All ranks have the same error: only rank 0 prints it.
        Err(TrainError::NotFinite { .. } | TrainError::AtMinScale { .. }) if number != 0 => Ok(Exit::Failed),
        Err(error) if is_refusal(&error) && number != 0 => Ok(Exit::Wrong),
        // Rank 0 writes the model and prints why it failed.
        Err(TrainError::Export(error)) if matches!(*error, ExportError::OtherRank) => Ok(Exit::Failed),
        Err(error) => Ok(failed(&error)),
    }
}

/// Trains, and reports progress.
fn steps(
    arguments: &TrainArgs,
    resolved_job: &ResolvedJob,
    compiled: &Compiled,
    comm: Option<Box<dyn Comm>>,
    mut reporter: Option<ProgressReporter<'_>>,
    signals: &Signals,
    control: &dyn JobControl,
) -> anyhow::Result<Result<TrainOutcome, TrainError>> {
    let number = comm.as_ref().map_or(0, |comm| comm.rank());
    let [save_now, trace_now] = ["save-now", "trace-now"].map(|name| arguments.output.join(name));
    let requests = Requests {
        signals,
        control,
        seen: Cell::new(0),
        number,
        told: Cell::new(false),
        save_now,
        trace_now,
    };
    let local_rank = local_rank(resolved_job, number);
    let device = device(resolved_job, compiled, local_rank)?;
    let ranks = resolved_job.ranks as usize;
    let mut live = LiveRank::new(control, &arguments.output, number, ranks);
    let checkpoints = checkpoints::options(arguments, resolved_job);
    let options = TrainOptions {
        export_to: resolved_job.writes_model.then(|| arguments.output.join("model")),
        trace: arguments.trace.is_some(),
        profile: reporter.as_ref().is_some_and(ProgressReporter::needs_profile),
        run_ahead: !resolved_job.target.is_host(),
        rss_interval: resolved_job.strategies.rss_interval(),
        checkpoints: Some(&checkpoints),
        resume_from: resolved_job.checkpoint.as_ref(),
    };
    let mut on_event = |event: TrainEvent<'_>| {
        if let TrainEvent::Loaded = event {
            signals.begin_steps(control);
        }
        if let TrainEvent::CheckpointStarting(_) = event {
            // Cluster managers signal every rank: one save answers all of them.
            requests.answer_saves();
        }
        live.handle(&event);
        if let Some(reporter) = &mut reporter {
            reporter.handle(event);
        }
        Ok(())
    };
    let pending = || requests.pending();
    let hooks = TrainHooks { on_event: &mut on_event, control: &pending };
    Ok(train(&resolved_job.job, compiled, device, comm, &options, hooks))
}

/// Where requests from outside come from.
struct Requests<'a> {
    signals: &'a Signals,
    /// Of the launcher.
    control: &'a dyn JobControl,
    /// The launcher's saves that are answered.
    seen: Cell<u32>,
    number: usize,
    /// Whether the note on the limit of CPU time was printed.
    told: Cell<bool>,
    save_now: PathBuf,
    trace_now: PathBuf,
}

impl Requests<'_> {
    /// The pending request. `save-now` and `trace-now` are removed as soon as they are seen: each requests one checkpoint or
    /// timeline.
    fn pending(&self) -> ControlRequest {
        let is_requested =
            |file: &PathBuf| self.number == 0 && file.exists() && fs::remove_file(file).is_ok();
        if let Some(signal) = self.signals.stop_requested() {
            if signal == StopSignal::CpuTime && !self.told.replace(true) {
                output::note(&format!(
                    "SIGXCPU: rank {} has used the CPU time that `ulimit -t` allows: finishing the step and saving a checkpoint",
                    self.number
                ));
            }
            match signal {
                StopSignal::Interrupt => ControlRequest::Stop,
                StopSignal::HangUp => ControlRequest::HangUp,
                StopSignal::Terminate => ControlRequest::Terminate,
                StopSignal::User1 => ControlRequest::User1,
                StopSignal::User2 => ControlRequest::User2,
                StopSignal::CpuTime => ControlRequest::CpuTime,
            }
        } else if self.control.is_stop_requested() {
            ControlRequest::Stop
        } else if self.signals.is_save_requested() || self.launcher_saves() || is_requested(&self.save_now) {
            ControlRequest::Save
        } else if is_requested(&self.trace_now) {
            ControlRequest::Trace
        } else {
            ControlRequest::Continue
        }
    }

    /// Whether the launcher asks for a save. Rank 0 answers for all, so that there is one.
    fn launcher_saves(&self) -> bool {
        self.number == 0 && self.control.save_requests() != self.seen.get()
    }

    /// A checkpoint is being written: it answers every request for a save so far.
    fn answer_saves(&self) {
        self.signals.forget_saves();
        self.seen.set(self.control.save_requests());
    }
}

/// The number of a rank among those of its host. Those that our launcher starts are all on one.
fn local_rank(resolved_job: &ResolvedJob, rank: usize) -> usize {
    let started = resolved_job.started;
    if started.local_world == started.world { rank } else { started.local_rank as usize }
}

/// The device of a rank, with arenas of the planned sizes. With more ranks than GPUs, ranks share them.
fn device(
    resolved_job: &ResolvedJob,
    compiled: &Compiled,
    local_rank: usize,
) -> anyhow::Result<Box<dyn Device>> {
    let arenas = compiled.memory.arenas();
    let target = resolved_job.device.target(resolved_job.threads);
    let mut device = target.open(local_rank % resolved_job.gpus.max(1) as usize, arenas)?;
    // The budget also covers workspace that is allocated while tuning.
    if let Some(budget) = resolved_job.handoff.budget.limits[Tier::Device] {
        device.limit_autotune_bytes(budget.saturating_sub(arenas[Tier::Device]));
    }
    Ok(device)
}

/// The exit code of a rank that did not fail. All ranks stop together, with the code of the signal that one received.
fn exit_of(outcome: &TrainOutcome) -> Exit {
    match outcome.request {
        ControlRequest::Terminate if outcome.stopped => Exit::after(StopSignal::Terminate),
        ControlRequest::HangUp if outcome.stopped => Exit::after(StopSignal::HangUp),
        ControlRequest::User1 if outcome.stopped => Exit::after(StopSignal::User1),
        ControlRequest::User2 if outcome.stopped => Exit::after(StopSignal::User2),
        ControlRequest::CpuTime if outcome.stopped => Exit::after(StopSignal::CpuTime),
        _ if outcome.stopped => Exit::after(StopSignal::Interrupt),
        _ => Exit::Done,
    }
}

fn failed(error: &TrainError) -> Exit {
    output::error(&error.to_string());
    if let TrainError::Save(_) = error {
        output::note("once that is fixed, --resume auto resumes from the newest checkpoint");
    }
    if is_refusal(error) { Exit::Wrong } else { Exit::Failed }
}

/// Whether what was given is wrong, which is known once all of its weights are loaded.
fn is_refusal(error: &TrainError) -> bool {
    match error {
        TrainError::Resume(_) => true,
        TrainError::Run(error) => matches!(**error, RunError::Lowering(_)),
        TrainError::Lora(error) => matches!(**error, LoraWeightsError::OtherBase(_)),
        _ => false,
    }
}
