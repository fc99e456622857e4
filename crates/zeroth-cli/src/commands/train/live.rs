//! What a run shows of itself while it runs: status.json, events.jsonl, timelines on request, and the terminal view of
//! `--monitor`. Nothing here can fail a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use zeroth::base::publish;
use zeroth::comm::launch::LaunchReport;
use zeroth::comm::{JobControl, RankObserver, RankPhase};
use zeroth::kernel::Tier;
use zeroth::machine::{DeviceKind, Gpus, probe};
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::{EventLog, RunEvent, RunFacts, RunState, StatusWriter, TrainEvent, WriteGate};

use super::prepared_run::PreparedRun;
use super::summary;
use crate::exit::Exit;
use crate::signals::Signals;

/// The status of a run, written by its launcher.
pub(super) struct LiveStatus(StatusWriter);

impl LiveStatus {
    pub(super) fn start(run: &PreparedRun, signals: &Signals) -> Self {
        let PreparedRun { resolved_job, compiled, folder, .. } = run;
        let gpus = match resolved_job.device {
            DeviceKind::Cpu => Vec::new(),
            DeviceKind::Cuda => match probe().gpus {
                Gpus::Found { devices, .. } => devices,
                _ => Vec::new(),
            },
        };
        let mut plan = json!({});
        for tier in Tier::ALL {
            plan[tier.name()] = json!(compiled.memory.by_category(tier));
        }
        plan["overhead"] = resolved_job.overhead(compiled).total.into();
        let facts = RunFacts {
            ranks: resolved_job.ranks,
            steps: resolved_job.job.steps,
            resumed_after: resolved_job.checkpoint.as_ref().map(|checkpoint| checkpoint.manifest().step),
            model: resolved_job.name.clone(),
            device: resolved_job.device.name(),
            plan,
            gpus,
        };
        // A signal before the first step removes the files of the run: then nothing more is written.
        let gate: WriteGate = match signals.startup().map(Arc::clone) {
            Some(before) => Box::new(move |write| before.write(write)),
            None => Box::new(|write| write()),
        };
        Self(StatusWriter::start(folder.root(), facts, gate))
    }

    /// Observes the ranks of the job that this process has a part in.
    pub(super) fn observe(&self, control: &dyn JobControl) {
        self.0.observe(control.observer());
    }

    /// Observes the ranks that a launcher starts.
    pub(super) fn observe_with(&self) -> impl Fn(Box<dyn RankObserver>) + Send + Sync + 'static {
        self.0.observe_with()
    }

    /// Reports the rank that ended the job.
    pub(super) fn ranks_lost(&self, report: &LaunchReport) {
        let Some(rank) = report.lost.as_ref().map(|lost| lost.rank).or(report.first) else { return };
        let Some(end) = report.ranks.get(rank) else { return };
        // One that was stopped is killed by the launcher in the end: its peers know better.
        let stopped = report.lost.as_ref().filter(|_| end.by_launcher);
        let place = end.last.as_ref().map(|last| format!(", {last}")).unwrap_or_default();
        let reason = stopped.map_or_else(|| format!("{}{place}", end.how), ToString::to_string);
        self.0.rank_lost(rank as u64, reason);
    }

    /// Reports a restart from a checkpoint, or from the start.
    pub(super) fn restarted(&self, from: Option<&Checkpoint>) {
        self.0.restarted(from.map_or(0, |checkpoint| checkpoint.manifest().step));
    }

    pub(super) fn finish(self, exit: Exit) {
        self.0.finish(match exit {
            Exit::Done => RunState::Done,
            exit if exit.is_stop() => RunState::Stopped,
            _ => RunState::Failed,
        });
    }
}

/// What one rank publishes: its phase and step, events on rank 0, and timelines.
pub(super) struct LiveRank<'a> {
    control: &'a dyn JobControl,
    output: PathBuf,
    rank: usize,
    ranks: usize,
    /// Opened at the first event: before the first step a signal may remove the folder.
    events: Option<EventLog>,
    /// Whether this rank has written its part of the timeline.
    has_part: bool,
}

impl<'a> LiveRank<'a> {
    pub(super) fn new(control: &'a dyn JobControl, output: &Path, rank: usize, ranks: usize) -> Self {
        Self { control, output: output.to_owned(), rank, ranks, events: None, has_part: false }
    }

    pub(super) fn handle(&mut self, event: &TrainEvent<'_>) {
        match event {
            TrainEvent::TransportChosen(_) | TrainEvent::StepProfile(_) | TrainEvent::Note(_) => {}
            TrainEvent::Loading { .. } => self.control.publish_progress(RankPhase::Loading, None),
            TrainEvent::Loaded => self.control.publish_progress(RankPhase::Training, None),
            TrainEvent::Step(step) => {
                self.control.publish_progress(RankPhase::Training, Some(step.step));
                if step.skipped {
                    self.event(&RunEvent::Skip { step: step.step });
                }
            }
            TrainEvent::EvalStarting => self.control.publish_progress(RankPhase::Evaluating, None),
            TrainEvent::Eval(found, _) => {
                self.control.publish_progress(RankPhase::Training, None);
                self.event(&RunEvent::Eval { step: found.step, eval_loss: found.eval_loss });
            }
            TrainEvent::CheckpointStarting(_) | TrainEvent::Exporting => {
                self.control.publish_progress(RankPhase::Saving, None);
            }
            TrainEvent::CheckpointSaved { step, stalled } => {
                self.control.publish_progress(RankPhase::Training, None);
                let stalled_ms = stalled.as_secs_f64() * 1e3;
                self.event(&RunEvent::Save { step: *step, stalled_ms });
            }
            TrainEvent::Timeline { lines, .. } => {
                let part = summary::trace_part(&self.output, self.rank);
                let made = part.parent().map(fs::create_dir_all).transpose();
                self.has_part = made.is_ok() && publish(&part, lines.as_bytes()).is_ok();
            }
            TrainEvent::TimelineComplete(step) => self.join_timeline(*step),
        }
    }

    fn event(&mut self, event: &RunEvent) {
        if self.rank == 0 {
            self.events
                .get_or_insert_with(|| EventLog::open(&self.output.join("events.jsonl")))
                .append(event);
        }
    }

    /// Joins the parts of all ranks. A part that could not be written leaves no timeline.
    fn join_timeline(&mut self, step: u64) {
        if self.rank != 0 || !std::mem::take(&mut self.has_part) {
            return;
        }
        let paths: Vec<PathBuf> =
            (0..self.ranks).map(|rank| summary::trace_part(&self.output, rank)).collect();
        let parts: Result<Vec<String>, _> = paths.iter().map(fs::read_to_string).collect();
        let file = format!("logs/step-{step}.trace.json");
        let written = parts.is_ok_and(|parts| {
            publish(&self.output.join(&file), summary::trace_text(&parts).as_bytes()).is_ok()
        });
        for path in paths {
            let _ = fs::remove_file(path);
        }
        if written {
            self.event(&RunEvent::Trace { step, file });
        }
    }
}
