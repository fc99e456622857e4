//! What rank 0 does as steps get done: metrics to the run folder, progress to standard error.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use zeroth::train::progress::{Progress, line};
use zeroth::train::{Done, MetricsFile, StepLine, TrainError};

use super::ask::Asked;
use crate::cli::DeviceArg;
use crate::output;

/// Begins a line from a rank that takes the place of the last one on the launcher's terminal.
pub(super) const PASSING: char = '\u{1}';
/// Tells a rank that its launcher has a terminal.
pub(super) const TERMINAL: &str = "ZEROTH_TERMINAL";

/// Where a line of progress for each step goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Terminal {
    None,
    Own,
    Launchers,
}

pub(super) struct Follower {
    metrics: MetricsFile,
    total_steps: u64,
    every: u64,
    steps_per_print: Option<u64>,
    terminal: Terminal,
    log: Option<File>,
    shares_memory: bool,
    /// Since the last line: steps, tokens, time.
    since: (u32, u64, Duration),
}

impl Follower {
    pub(super) fn new(asked: &Asked, folder: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            metrics: MetricsFile::create(&folder.join("metrics.jsonl"))?,
            total_steps: asked.job.steps,
            every: asked.logging_steps,
            steps_per_print: asked.steps_per_print,
            terminal: match std::env::var_os(TERMINAL) {
                Some(told) if told == "1" => Terminal::Launchers,
                _ if std::io::stderr().is_terminal() => Terminal::Own,
                _ => Terminal::None,
            },
            log: None,
            shares_memory: asked.device == DeviceArg::Cpu,
            since: (0, 0, Duration::ZERO),
        })
    }

    /// Lines go to this file too: what a launcher does for the ranks it starts.
    pub(super) fn with_log(mut self, path: &Path) -> anyhow::Result<Self> {
        self.log = Some(File::create(path)?);
        Ok(self)
    }

    fn say(&mut self, text: &str) {
        output::note(text);
        if let Some(log) = &mut self.log {
            let _ = writeln!(log, "{text}");
        }
    }

    pub(super) fn take(&mut self, done: Done<'_>) -> Result<(), TrainError> {
        match done {
            Done::Step(step) => {
                self.metrics.step(step)?;
                self.progress(step);
            }
            Done::Evaluation(found) => {
                self.metrics.evaluation(found)?;
                self.end();
                self.say(&format!(
                    "step {} · eval loss {:.4} · perplexity {:.2}",
                    found.step, found.eval_loss, found.eval_perplexity
                ));
            }
        }
        Ok(())
    }

    fn progress(&mut self, step: &StepLine) {
        self.since.0 += 1;
        self.since.1 += step.tokens;
        self.since.2 += Duration::from_secs_f64(step.step_ms / 1e3);
        let asked_for = |every: u64| every > 0 && step.step.is_multiple_of(every);
        let due = asked_for(self.every)
            || self.steps_per_print.is_some_and(asked_for)
            || step.step == 1
            || step.step == self.total_steps;
        if !due && self.terminal == Terminal::None {
            return;
        }
        let (steps, tokens, time) = self.since;
        let text = line(&Progress {
            step: step.step,
            total_steps: self.total_steps,
            loss: step.loss,
            grad_norm: step.grad_norm,
            lr: step.lr,
            tokens_per_second: tokens as f64 / time.as_secs_f64(),
            device_bytes: if self.shares_memory { 0 } else { step.device_bytes_peak },
            host_bytes: step.host_bytes_peak,
            step_time: time / steps.max(1),
        });
        let with_bar = format!("{} {text}", bar(step.step, self.total_steps));
        match self.terminal {
            Terminal::Own => output::over(&with_bar),
            Terminal::Launchers => output::note(&format!("{PASSING}{with_bar}")),
            Terminal::None => self.say(&text),
        }
        if due {
            self.since = (0, 0, Duration::ZERO);
        }
    }

    /// Leaves the line that progress stands on.
    pub(super) fn end(&mut self) {
        if self.terminal != Terminal::None {
            output::note("");
        }
    }
}

fn bar(step: u64, total: u64) -> String {
    const WIDTH: u64 = 20;
    let full = (WIDTH * step / total.max(1)).min(WIDTH) as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(WIDTH as usize - full))
}
