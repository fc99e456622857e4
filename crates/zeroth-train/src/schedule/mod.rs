//! The learning rate of a step, as a function of the steps applied so far.
//!
//! A skipped step applies nothing, so it does not move the schedule. The first step of a run has 0 applied ones: with
//! Hugging Face's warm-up its rate is 0, and with DeepSpeed's its first two steps have the least rate. Both are what
//! their users get today, so that curves can be laid over each other.

mod deepspeed;
mod hugging_face;

pub use deepspeed::{
    LrRangeTest, Momentum, OneCycle, Warmup, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupShape,
};
pub use hugging_face::{HuggingFace, HuggingFaceShape, warmup_steps};

/// A schedule that cannot be followed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A name that is none of Hugging Face's that we have.
    #[error(
        "there is no schedule `{name}`{}; --lr-scheduler-type takes {}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        hugging_face::NAMES.join(", ")
    )]
    Unknown {
        /// The name.
        name: String,
        /// A name near to it.
        near: Option<&'static str>,
    },
    /// A polynomial that would rise.
    #[error(
        "the polynomial schedule falls from the learning rate {from} to {end}: give a --learning-rate above {end}"
    )]
    RisingPolynomial {
        /// The learning rate.
        from: f64,
        /// The rate at the end.
        end: f64,
    },
    /// A parameter that must be above zero.
    #[error("{schedule}: {parameter} is {found}; it must be above 0")]
    NotPositive {
        /// The schedule.
        schedule: &'static str,
        /// The parameter, as the config spells it.
        parameter: &'static str,
        /// Its value.
        found: f64,
    },
    /// A rate that is no number.
    #[error("{schedule}: {parameter} is {found}; it must be a finite number that is not negative")]
    NotARate {
        /// The schedule.
        schedule: &'static str,
        /// The parameter, as the config or the flag spells it.
        parameter: &'static str,
        /// Its value.
        found: f64,
    },
}

/// One of the schedules.
#[derive(Debug, Clone, PartialEq)]
pub enum Schedule {
    /// `--lr-scheduler-type`.
    HuggingFace(HuggingFace),
    /// `scheduler.type` WarmupLR.
    WarmupLr(WarmupLr),
    /// `scheduler.type` WarmupDecayLR.
    WarmupDecayLr(WarmupDecayLr),
    /// `scheduler.type` WarmupCosineLR.
    WarmupCosineLr(WarmupCosineLr),
    /// `scheduler.type` OneCycle.
    OneCycle(OneCycle),
    /// `scheduler.type` LRRangeTest.
    LrRangeTest(LrRangeTest),
}

impl Schedule {
    /// Whether every rate of it is a number.
    pub fn check(&self) -> Result<(), ScheduleError> {
        match self {
            Self::HuggingFace(schedule) => schedule.check(),
            Self::WarmupLr(schedule) => schedule.check(),
            Self::WarmupDecayLr(schedule) => schedule.check(),
            Self::WarmupCosineLr(schedule) => schedule.check(),
            Self::OneCycle(schedule) => schedule.check(),
            Self::LrRangeTest(schedule) => schedule.check(),
        }
    }

    /// The rate of the step that follows `applied` applied ones.
    pub fn rate(&self, applied: u64) -> f64 {
        match self {
            Self::HuggingFace(schedule) => schedule.rate(applied),
            Self::WarmupLr(schedule) => schedule.rate(applied),
            Self::WarmupDecayLr(schedule) => schedule.rate(applied),
            Self::WarmupCosineLr(schedule) => schedule.rate(applied),
            Self::OneCycle(schedule) => schedule.rate(applied),
            Self::LrRangeTest(schedule) => schedule.rate(applied),
        }
    }

    /// Adam's betas of that step, where the schedule moves them: OneCycle does.
    pub fn betas(&self, applied: u64) -> Option<[f64; 2]> {
        match self {
            Self::OneCycle(schedule) => schedule.betas(applied),
            _ => None,
        }
    }
}

/// A rate that a schedule is given: finite and not negative.
fn a_rate(schedule: &'static str, parameter: &'static str, found: f64) -> Result<(), ScheduleError> {
    if found.is_finite() && found >= 0.0 {
        return Ok(());
    }
    Err(ScheduleError::NotARate { schedule, parameter, found })
}
