//! `wall_clock_breakdown`: step time by phase, from the times of instructions.
//!
//! Times are measured on the host. On a CPU, queues run inline, so the phases add up to the step. On a GPU they
//! measure enqueueing; the wait for the device is in `rest`.

use std::time::Duration;

use zeroth_engine::InstructionTime;
use zeroth_program::{Action, Program, SectionKind};

/// A phase of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPhase {
    /// Assembling micro-batches.
    Data,
    /// The forward pass.
    Forward,
    /// Activations recomputed for the backward pass.
    Recompute,
    /// The backward pass.
    Backward,
    /// Parameter all-gathers.
    Gather,
    /// Rounding and reducing gradients.
    Reduce,
    /// Gradient norm, optimizer step, and all-gathers of updated weights.
    Update,
    /// Copies to and from host memory.
    Copies,
    /// Evaluation, between steps.
    Evaluate,
    /// Saving checkpoints, between steps.
    Save,
}

impl StepPhase {
    /// All phases; the last two are between steps.
    pub const ALL: [Self; 10] = [
        Self::Data,
        Self::Forward,
        Self::Recompute,
        Self::Backward,
        Self::Gather,
        Self::Reduce,
        Self::Update,
        Self::Copies,
        Self::Evaluate,
        Self::Save,
    ];
    const PER_STEP: usize = 8;

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Update => "update",
            Self::Copies => "copies",
            Self::Evaluate => "evaluate",
            Self::Save => "save",
        }
    }

    /// The phase of an instruction in a section.
    pub const fn of(section: SectionKind, action: &Action) -> Self {
        if matches!(section, SectionKind::Eval) {
            return Self::Evaluate;
        }
        match action {
            Action::ZeroLoss
            | Action::Forward(_)
            | Action::Logits { .. }
            | Action::TopLogProbs { .. }
            | Action::EvaluateLoss(_)
            | Action::StoreKv(_)
            | Action::CachedAttention(_) => Self::Forward,
            Action::Backward(_) | Action::ZeroGrad(_) => Self::Backward,
            Action::Recompute { .. } => Self::Recompute,
            Action::AllGather(..) | Action::Unpack(_) | Action::Release(_) => Self::Gather,
            Action::KeepGrad(_)
            | Action::CastGrad(_)
            | Action::PackGrad(_)
            | Action::CastAndPackGrad(_)
            | Action::AllToAll(..)
            | Action::SumRanks(..)
            | Action::ReduceScatter(..)
            | Action::AllGatherGrad(..) => Self::Reduce,
            Action::GradSquares(_)
            | Action::AllGatherReports(_)
            | Action::Control
            | Action::Update(_)
            | Action::AllGatherWeights(..)
            | Action::BroadcastWeights { .. } => Self::Update,
            Action::OffloadActivation(_)
            | Action::ReloadActivation(_)
            | Action::OffloadGrad(..)
            | Action::StageShard(_)
            | Action::UploadShard(_)
            | Action::LoadStates(_)
            | Action::StoreStates(_)
            | Action::WriteBack(_) => Self::Copies,
        }
    }
}

/// Accumulated times by phase.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Breakdown {
    seconds: [f64; StepPhase::ALL.len()],
    steps: u64,
    of_steps: f64,
}

impl Breakdown {
    /// Adds the times of instructions.
    pub fn add(&mut self, program: &Program, times: &[InstructionTime]) {
        for timed in times {
            let section = &program.sections[timed.section];
            let part = StepPhase::of(section.kind, &section.instructions[timed.instruction].action);
            self.seconds[part as usize] += timed.seconds;
        }
    }

    /// Adds time spent outside of instructions, on data or saving.
    pub fn add_time(&mut self, part: StepPhase, time: Duration) {
        self.seconds[part as usize] += time.as_secs_f64();
    }

    /// Counts a step.
    pub fn step(&mut self, step_ms: f64) {
        self.steps += 1;
        self.of_steps += step_ms / 1e3;
    }

    /// Milliseconds of a phase: the mean per step, or the total for phases between steps.
    pub fn milliseconds(&self, part: StepPhase) -> f64 {
        let of = if (part as usize) < StepPhase::PER_STEP { self.steps.max(1) as f64 } else { 1.0 };
        1e3 * self.seconds[part as usize] / of
    }

    /// Formats one line without empty phases; `None` if no step was counted.
    pub fn line(&self) -> Option<String> {
        if self.steps == 0 {
            return None;
        }
        let all = 1e3 * self.of_steps / self.steps as f64;
        let (inside, between) = StepPhase::ALL.split_at(StepPhase::PER_STEP);
        let taken = |parts: &[StepPhase]| -> Vec<String> {
            let took = parts.iter().map(|part| (part.name(), self.milliseconds(*part)));
            took.filter(|(_, ms)| *ms > 0.0).map(|(name, ms)| format!("{name} {ms:.1}")).collect()
        };
        let known: f64 = inside.iter().map(|part| self.milliseconds(*part)).sum();
        let mut parts = taken(inside);
        // Phases on concurrent queues may overlap and leave no rest.
        parts.push(format!("rest {:.1}", (all - known).max(0.0)));
        let mut line = format!("time of a step: {all:.1} ms · {}", parts.join(" · "));
        let between = taken(between);
        if !between.is_empty() {
            line += &format!(" · between steps: {}", between.join(" · "));
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use zeroth_base::Axis;

    use super::*;

    #[test]
    fn the_line_has_means_per_step_and_totals_between_steps() {
        let mut breakdown = Breakdown::default();
        assert_eq!(breakdown.line(), None);
        for step_ms in [40.0, 60.0] {
            breakdown.add_time(StepPhase::Data, Duration::from_micros(500));
            breakdown.add_time(StepPhase::Forward, Duration::from_millis(10));
            breakdown.add_time(StepPhase::Backward, Duration::from_millis(20));
            breakdown.step(step_ms);
        }
        assert_eq!(
            breakdown.line().unwrap(),
            "time of a step: 50.0 ms · data 0.5 · forward 10.0 · backward 20.0 · rest 19.5"
        );
        breakdown.add_time(StepPhase::Save, Duration::from_millis(70));
        breakdown.add_time(StepPhase::Save, Duration::from_millis(30));
        let line = breakdown.line().unwrap();
        assert!(line.ends_with("rest 19.5 · between steps: save 100.0"), "{line}");
    }

    #[test]
    fn overlapping_phases_leave_no_negative_rest() {
        let mut breakdown = Breakdown::default();
        breakdown.add_time(StepPhase::Gather, Duration::from_millis(9));
        breakdown.step(5.0);
        assert_eq!(breakdown.line().unwrap(), "time of a step: 5.0 ms · gather 9.0 · rest 0.0");
    }

    #[test]
    fn evaluation_sections_count_as_evaluation() {
        let gather = Action::AllGather(0, Axis::Group);
        assert_eq!(StepPhase::of(SectionKind::Eval, &gather), StepPhase::Evaluate);
        assert_eq!(StepPhase::of(SectionKind::Only, &gather), StepPhase::Gather);
        assert_eq!(
            StepPhase::of(SectionKind::Update, &Action::AllGatherReports(Axis::Group)),
            StepPhase::Update
        );
    }
}
