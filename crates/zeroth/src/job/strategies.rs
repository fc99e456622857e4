//! When a run evaluates, saves and logs.

use zeroth_train::{BestPolicy, Interval, share_of};

/// Default steps between evaluations, and between checkpoints.
pub const DEFAULT_STEPS: u64 = 500;
/// Default steps between progress lines, and between measurements of memory.
pub const LOGGING_STEPS: u64 = 5;

/// A number of steps, or a share of all steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StepCount {
    /// Steps.
    Count(u64),
    /// A share, between 0 and 1.
    Share(f64),
}

impl StepCount {
    /// The steps, of a run of `total`.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Count(steps) => steps,
            Self::Share(share) => share_of(share, total),
        }
    }
}

impl std::fmt::Display for StepCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Count(steps) => steps.fmt(f),
            Self::Share(share) => share.fmt(f),
        }
    }
}

/// When something recurs, in a run of which the number of steps is not known yet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Every {
    /// Not at all.
    Never,
    /// After every N steps; 0 is never.
    Steps(StepCount),
    /// After each epoch.
    Epoch,
}

impl Every {
    fn of(self, total: u64) -> Interval {
        match self {
            Self::Never => Interval::Never,
            Self::Steps(steps) => Interval::steps(steps.of(total)),
            Self::Epoch => Interval::Epoch,
        }
    }
}

/// When a run shall evaluate, save and log.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StrategyRequest {
    /// When to evaluate, where there is evaluation data.
    pub evaluation: Every,
    /// When to save.
    pub saving: Every,
    /// Whether evaluations that are the best so far are saved.
    pub saves_best: bool,
    /// When to log progress.
    pub logging: Every,
    /// How evaluations are compared, if they are.
    pub best: Option<BestPolicy>,
}

impl Default for StrategyRequest {
    fn default() -> Self {
        let steps = |count| Every::Steps(StepCount::Count(count));
        Self {
            evaluation: steps(DEFAULT_STEPS),
            saving: steps(DEFAULT_STEPS),
            saves_best: false,
            logging: steps(LOGGING_STEPS),
            best: None,
        }
    }
}

/// When a run evaluates, saves and logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strategies {
    /// When it evaluates.
    pub evaluation: Interval,
    /// When it saves.
    pub saving: Interval,
    /// Whether evaluations that are the best so far are saved.
    pub saves_best: bool,
    /// When it logs progress.
    pub logging: Interval,
}

impl Strategies {
    /// The strategies of a run of `steps` steps.
    pub fn new(request: &StrategyRequest, steps: u64) -> Self {
        Self {
            evaluation: request.evaluation.of(steps),
            saving: request.saving.of(steps),
            saves_best: request.saves_best,
            logging: request.logging.of(steps),
        }
    }

    /// Steps between measurements of resident memory.
    pub fn rss_interval(&self) -> u64 {
        match self.logging {
            Interval::Steps(steps) => steps.get(),
            Interval::Never | Interval::Epoch => LOGGING_STEPS,
        }
    }
}
