//! `wall_clock_breakdown`: where the time of steps goes, from the times of their instructions.
//!
//! Times are the host's. On a CPU, queues run inline, so they add up to the step. A GPU works on after the host has
//! enqueued: there, a part tells how long enqueueing it took, and the wait for the device is in the rest.

use std::time::Duration;

use zeroth_engine::InstructionTime;
use zeroth_program::{Action, Program, SectionKind};

/// What a run spends time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Putting micro-batches together.
    Data,
    /// The model.
    Forward,
    /// What forward did not keep, computed again for backward.
    Recompute,
    /// The gradients.
    Backward,
    /// Bringing parameters together for use.
    Gather,
    /// Rounding, exchanging and adding gradients.
    Reduce,
    /// The norm, the decision, the optimizer, and spreading what it changed.
    Update,
    /// Copies to and from host memory.
    Copies,
    /// Evaluations; not a part of steps.
    Evaluate,
    /// Saving; not a part of steps.
    Save,
}

impl Part {
    /// All parts; the last two lie between steps.
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
    const OF_A_STEP: usize = 8;

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

    /// What an instruction of a section belongs to.
    pub const fn of(section: SectionKind, action: &Action) -> Self {
        if matches!(section, SectionKind::Eval) {
            return Self::Evaluate;
        }
        match action {
            Action::ZeroLoss | Action::Forward(_) | Action::Logits { .. } => Self::Forward,
            Action::Backward(_) | Action::ZeroGrad(_) => Self::Backward,
            Action::Recompute { .. } => Self::Recompute,
            Action::AllGather(_) | Action::Release(_) => Self::Gather,
            Action::KeepGrad(_)
            | Action::CastGrad(_)
            | Action::PackGrad(_)
            | Action::CastAndPackGrad(_)
            | Action::AllToAll(_)
            | Action::SumRanks(..)
            | Action::ReduceScatter(..)
            | Action::AllGatherGrad(_) => Self::Reduce,
            Action::GradSquares(_)
            | Action::AllGatherReports
            | Action::Control
            | Action::Update(_)
            | Action::AllGatherWeights(_)
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

/// Times of some steps, by part.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Breakdown {
    seconds: [f64; Part::ALL.len()],
    steps: u64,
    of_steps: f64,
}

impl Breakdown {
    /// Adds the times of instructions.
    pub fn add(&mut self, program: &Program, times: &[InstructionTime]) {
        for timed in times {
            let section = &program.sections[timed.section];
            let part = Part::of(section.kind, &section.instructions[timed.instruction].action);
            self.seconds[part as usize] += timed.seconds;
        }
    }

    /// Adds time that no instruction took: of data, or of saving.
    pub fn spend(&mut self, part: Part, time: Duration) {
        self.seconds[part as usize] += time.as_secs_f64();
    }

    /// Counts a step of so many milliseconds.
    pub fn step(&mut self, step_ms: f64) {
        self.steps += 1;
        self.of_steps += step_ms / 1e3;
    }

    /// Milliseconds of a part: a step's mean, or for what lies between steps, all of it.
    pub fn milliseconds(&self, part: Part) -> f64 {
        let of = if (part as usize) < Part::OF_A_STEP { self.steps.max(1) as f64 } else { 1.0 };
        1e3 * self.seconds[part as usize] / of
    }

    /// One line, without parts that took no time; nothing where no step was counted.
    pub fn line(&self) -> Option<String> {
        if self.steps == 0 {
            return None;
        }
        let all = 1e3 * self.of_steps / self.steps as f64;
        let (inside, between) = Part::ALL.split_at(Part::OF_A_STEP);
        let taken = |parts: &[Part]| -> Vec<String> {
            let took = parts.iter().map(|part| (part.name(), self.milliseconds(*part)));
            took.filter(|(_, ms)| *ms > 0.0).map(|(name, ms)| format!("{name} {ms:.1}")).collect()
        };
        let known: f64 = inside.iter().map(|part| self.milliseconds(*part)).sum();
        let mut parts = taken(inside);
        // Parts of two queues may overlap, so that nothing is left.
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
    use super::*;

    #[test]
    fn a_line_tells_means_of_steps_and_sums_of_what_lies_between() {
        let mut breakdown = Breakdown::default();
        assert_eq!(breakdown.line(), None);
        for step_ms in [40.0, 60.0] {
            breakdown.spend(Part::Data, Duration::from_micros(500));
            breakdown.spend(Part::Forward, Duration::from_millis(10));
            breakdown.spend(Part::Backward, Duration::from_millis(20));
            breakdown.step(step_ms);
        }
        assert_eq!(
            breakdown.line().unwrap(),
            "time of a step: 50.0 ms · data 0.5 · forward 10.0 · backward 20.0 · rest 19.5"
        );
        breakdown.spend(Part::Save, Duration::from_millis(70));
        breakdown.spend(Part::Save, Duration::from_millis(30));
        let line = breakdown.line().unwrap();
        assert!(line.ends_with("rest 19.5 · between steps: save 100.0"), "{line}");
    }

    #[test]
    fn times_beyond_the_step_leave_no_negative_rest() {
        let mut breakdown = Breakdown::default();
        breakdown.spend(Part::Gather, Duration::from_millis(9));
        breakdown.step(5.0);
        assert_eq!(breakdown.line().unwrap(), "time of a step: 5.0 ms · gather 9.0 · rest 0.0");
    }

    #[test]
    fn all_that_an_evaluation_does_is_evaluation() {
        let gather = Action::AllGather(0);
        assert_eq!(Part::of(SectionKind::Eval, &gather), Part::Evaluate);
        assert_eq!(Part::of(SectionKind::Only, &gather), Part::Gather);
        assert_eq!(Part::of(SectionKind::Update, &Action::AllGatherReports), Part::Update);
    }
}
