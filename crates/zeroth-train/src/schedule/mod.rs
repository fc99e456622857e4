//! Learning-rate schedules, as functions of the applied steps.
//!
//! A skipped step does not advance the schedule. The first step of a run has 0 applied ones: its rate is 0 with
//! Hugging Face's warm-up, and with DeepSpeed's the first two steps run at the minimum rate. Both match the
//! originals, so loss curves are comparable.

mod deepspeed;
mod hugging_face;
mod hugging_face_kwargs;

pub use deepspeed::{LrRangeTest, Momentum, OneCycle, Warmup, WarmupCosineLr, WarmupDecayLr, WarmupLr};
pub use hugging_face::{HuggingFace, HuggingFaceShape, WarmupStableDecay, warmup_steps};
use zeroth_config::schema::HF_SCHEDULES;

/// An invalid schedule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum ScheduleError {
    #[error(
        "unknown schedule `{name}`{}; --lr-scheduler-type accepts {}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        HF_SCHEDULES.join(", ")
    )]
    Unknown { name: String, near: Option<&'static str> },
    #[error(
        "{schedule} has no parameter `{parameter}`; it takes {}",
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    )]
    NoSuchParameter { schedule: &'static str, parameter: String, known: &'static [&'static str] },
    #[error("{schedule} needs {parameter}: give --lr-scheduler-kwargs '{example}'")]
    MissingParameter { schedule: &'static str, parameter: &'static str, example: &'static str },
    #[error("{schedule}: min_lr and min_lr_rate say the same; give one of them")]
    TwoMinima { schedule: &'static str },
    #[error(
        "the polynomial schedule decays from the learning rate {from} to {end}: give a --learning-rate above {end}"
    )]
    RisingPolynomial { from: f64, end: f64 },
    #[error("the cosine decays from the learning rate {from} to {end}: give a --learning-rate above min_lr")]
    RisingCosine { from: f64, end: f64 },
    #[error("{schedule}: {parameter} is {found}; it must be above 0")]
    NotPositive { schedule: &'static str, parameter: &'static str, found: f64 },
    #[error("{schedule}: {parameter} is {found}; it must be finite and not negative")]
    NotARate {
        schedule: &'static str,
        /// The parameter, as the config or the flag spells it.
        parameter: &'static str,
        found: f64,
    },
}

/// A learning-rate schedule.
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
    /// Checks that all rates are finite and not negative.
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

    /// The learning rate of the step after `applied` applied ones.
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

    /// Adam's betas of that step, for schedules that change them (OneCycle).
    pub fn betas(&self, applied: u64) -> Option<[f64; 2]> {
        match self {
            Self::OneCycle(schedule) => schedule.betas(applied),
            _ => None,
        }
    }
}

/// Checks that a rate is finite and not negative.
fn a_rate(schedule: &'static str, parameter: &'static str, found: f64) -> Result<(), ScheduleError> {
    if found.is_finite() && found >= 0.0 {
        return Ok(());
    }
    Err(ScheduleError::NotARate { schedule, parameter, found })
}
