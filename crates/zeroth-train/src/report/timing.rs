//! What the times of instructions are wanted for: `wall_clock_breakdown` and `flops_profiler`.

use std::time::Duration;

use zeroth_base::publish;
use zeroth_config::resolve::Resolved;
use zeroth_engine::Timed;
use zeroth_program::Compiled;

use super::breakdown::{Breakdown, Part};
use super::profile::{ProfileSettings, profile};
use crate::{MetricsError, StepLine};

/// What a rank found out about the time of one step.
#[derive(Debug, Clone, Copy)]
pub struct StepTimes<'a> {
    /// The step.
    pub line: &'a StepLine,
    /// Time of putting its micro-batches together.
    pub data: Duration,
    /// Lengths of this rank's sequences.
    pub lengths: &'a [u64],
    /// Times of its instructions.
    pub times: &'a [Timed],
}

/// Gathers times, and makes what the config asks for of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    breakdown: Option<Breakdown>,
    profile: Option<ProfileSettings>,
}

impl Timing {
    /// What a config asks for.
    pub fn from_config(resolved: &Resolved) -> Self {
        Self {
            breakdown: resolved.values.top_level.wall_clock_breakdown.then(Breakdown::default),
            profile: ProfileSettings::from_config(resolved),
        }
    }

    /// Whether instructions must be timed at all.
    pub const fn is_wanted(&self) -> bool {
        self.breakdown.is_some() || self.profile.is_some()
    }

    /// Takes a step's times. Gives the profile to print, where this is the step to profile and no file is to hold it.
    pub fn step(&mut self, compiled: &Compiled, step: StepTimes<'_>) -> Result<Option<String>, MetricsError> {
        let StepTimes { line, data, lengths, times } = step;
        if let Some(breakdown) = &mut self.breakdown {
            breakdown.add(&compiled.program, times);
            breakdown.spend(Part::Data, data);
            breakdown.step(line.step_ms);
        }
        let Some(settings) = self.profile.as_ref().filter(|settings| settings.step == line.step) else {
            return Ok(None);
        };
        let text = profile(compiled, settings, times, lengths, line.step_ms);
        let Some(path) = &settings.file else { return Ok(Some(text)) };
        publish(path, text.as_bytes())?;
        Ok(Some(format!("flops profile of step {} in {}", line.step, path.display())))
    }

    /// Takes the times of an evaluation's instructions.
    pub fn evaluation(&mut self, compiled: &Compiled, times: &[Timed]) {
        if let Some(breakdown) = &mut self.breakdown {
            breakdown.add(&compiled.program, times);
        }
    }

    /// Takes the time of a save.
    pub fn save(&mut self, time: Duration) {
        if let Some(breakdown) = &mut self.breakdown {
            breakdown.spend(Part::Save, time);
        }
    }

    /// The breakdown of the steps since the last call, where one is asked for: with every line of progress.
    pub fn line(&mut self) -> Option<String> {
        self.breakdown.as_mut().and_then(|breakdown| std::mem::take(breakdown).line())
    }
}
