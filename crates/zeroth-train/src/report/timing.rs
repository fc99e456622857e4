//! Instruction timing for `wall_clock_breakdown` and `flops_profiler`.

use std::time::Duration;

use zeroth_base::publish;
use zeroth_config::resolve::Resolved;
use zeroth_engine::InstructionTime;
use zeroth_program::Compiled;

use super::breakdown::{Breakdown, StepPhase};
use super::metrics::{MetricsError, StepMetrics};
use super::profile::{ProfileSettings, profile};

/// Timing of one step on one rank.
#[derive(Debug, Clone, Copy)]
pub struct StepProfile<'a> {
    /// The step's metrics.
    pub metrics: &'a StepMetrics,
    /// Time spent assembling micro-batches.
    pub data: Duration,
    /// Lengths of this rank's sequences, of each stream.
    pub lengths: &'a [Vec<u64>; 2],
    /// Times of its instructions.
    pub times: &'a [InstructionTime],
}

/// Accumulates times and produces the configured reports.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTiming {
    breakdown: Option<Breakdown>,
    profile: Option<ProfileSettings>,
}

impl StepTiming {
    /// Reads the settings of both reports.
    pub fn from_config(resolved: &Resolved) -> Self {
        Self {
            breakdown: resolved.values.top_level.wall_clock_breakdown.then(Breakdown::default),
            profile: ProfileSettings::from_config(resolved),
        }
    }

    /// Whether instructions must be timed.
    pub const fn is_enabled(&self) -> bool {
        self.breakdown.is_some() || self.profile.is_some()
    }

    /// Adds a step. Returns the profile to print if this is the step to profile and no file is configured.
    pub fn step(
        &mut self,
        compiled: &Compiled,
        step: StepProfile<'_>,
    ) -> Result<Option<String>, MetricsError> {
        let StepProfile { metrics, data, lengths, times } = step;
        if let Some(breakdown) = &mut self.breakdown {
            breakdown.add(&compiled.program, times);
            breakdown.add_time(StepPhase::Data, data);
            breakdown.step(metrics.step_ms);
        }
        let Some(settings) = self.profile.as_ref().filter(|settings| settings.step == metrics.step) else {
            return Ok(None);
        };
        let text = profile(compiled, settings, times, lengths, metrics.step_ms);
        let Some(path) = &settings.file else { return Ok(Some(text)) };
        publish(path, text.as_bytes())?;
        Ok(Some(format!("flops profile of step {} in {}", metrics.step, path.display())))
    }

    /// Adds the times of an evaluation.
    pub fn evaluation(&mut self, compiled: &Compiled, times: &[InstructionTime]) {
        if let Some(breakdown) = &mut self.breakdown {
            breakdown.add(&compiled.program, times);
        }
    }

    /// Adds the time of a save.
    pub fn save(&mut self, time: Duration) {
        if let Some(breakdown) = &mut self.breakdown {
            breakdown.add_time(StepPhase::Save, time);
        }
    }

    /// The breakdown since the last call, if enabled; printed with every progress line.
    pub fn line(&mut self) -> Option<String> {
        self.breakdown.as_mut().and_then(|breakdown| std::mem::take(breakdown).line())
    }
}
