//! DeepSpeed's schedules, `scheduler.type` in its config.
//!
//! They count from -1: a new schedule is at -1 and advances with each applied step, so the step after k applied ones
//! runs at n = k - 1.

use std::f64::consts::PI;

use zeroth_config::schema::WarmupType;

use super::{ScheduleError, a_rate};

/// The warm-up that three schedules share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warmup {
    /// `warmup_num_steps`; like DeepSpeed, 1 counts as 2. 0 disables the warm-up, which DeepSpeed cannot.
    pub steps: u64,
    /// `warmup_type`.
    pub shape: WarmupType,
}

/// The phase of a schedule.
enum CyclePhase {
    /// Before the first step: the minimum rate, whatever the shape.
    Before,
    /// Progress of the warm-up, 0 to 1.
    Rising(f64),
    /// After the warm-up, at step n.
    After(u64),
}

impl Warmup {
    fn length(self) -> u64 {
        if self.steps == 0 { 0 } else { self.steps.max(2) }
    }

    fn phase(self, applied: u64) -> CyclePhase {
        let length = self.length();
        match applied.checked_sub(1) {
            None if length == 0 => CyclePhase::After(0),
            None => CyclePhase::Before,
            Some(n) if n >= length => CyclePhase::After(n),
            Some(n) => CyclePhase::Rising(match self.shape {
                WarmupType::Log => 1.0 / (length as f64).ln() * ((n + 1) as f64).ln(),
                WarmupType::Linear => n as f64 / length as f64,
            }),
        }
    }
}

/// WarmupLR: warm-up, then constant.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct WarmupLr {
    pub min: f64,
    pub max: f64,
    /// The warm-up.
    pub warmup: Warmup,
}

impl WarmupLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        a_rate("WarmupLR", "warmup_min_lr", self.min)?;
        a_rate("WarmupLR", "warmup_max_lr", self.max)
    }

    pub(super) fn rate(&self, applied: u64) -> f64 {
        self.between(match self.warmup.phase(applied) {
            CyclePhase::Before => return self.min,
            CyclePhase::Rising(share) => share,
            CyclePhase::After(_) => 1.0,
        })
    }

    fn between(&self, share: f64) -> f64 {
        self.min + (self.max - self.min) * share
    }
}

/// WarmupDecayLR: warm-up, then linear decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupDecayLr {
    /// The warm-up, with its minimum and maximum rate.
    pub rise: WarmupLr,
    /// `total_num_steps`.
    pub total_steps: u64,
}

impl WarmupDecayLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        self.rise.check()
    }

    pub(super) fn rate(&self, applied: u64) -> f64 {
        let CyclePhase::After(n) = self.rise.warmup.phase(applied) else { return self.rise.rate(applied) };
        let falling = self.total_steps.saturating_sub(self.rise.warmup.length()).max(1);
        self.rise.between(self.total_steps.saturating_sub(n) as f64 / falling as f64)
    }
}

/// WarmupCosineLR: warm-up, then cosine decay, as ratios of the optimizer's learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct WarmupCosineLr {
    /// The optimizer's learning rate.
    pub learning_rate: f64,
    pub warmup_min_ratio: f64,
    pub cos_min_ratio: f64,
    /// The warm-up.
    pub warmup: Warmup,
    /// `total_num_steps`.
    pub total_steps: u64,
}

impl WarmupCosineLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        a_rate("WarmupCosineLR", "the learning rate", self.learning_rate)?;
        a_rate("WarmupCosineLR", "warmup_min_ratio", self.warmup_min_ratio)?;
        a_rate("WarmupCosineLR", "cos_min_ratio", self.cos_min_ratio)
    }

    pub(super) fn rate(&self, applied: u64) -> f64 {
        let ratio = match self.warmup.phase(applied) {
            CyclePhase::Before => 0.0,
            CyclePhase::Rising(share) => self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio),
            CyclePhase::After(_) => {
                let length = self.warmup.length();
                let falling = self.total_steps.saturating_sub(length).max(1);
                // n - length + 1, without underflow when there is no warm-up.
                let progress = ((applied - length) as f64 / falling as f64).min(1.0);
                let half = f64::midpoint(1.0, (PI * progress).cos());
                (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * half).max(0.0)
            }
        };
        self.learning_rate * ratio
    }
}

/// How OneCycle cycles Adam's first beta, inversely to the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// `cycle_min_mom`.
    pub min: f64,
    /// `cycle_max_mom`.
    pub max: f64,
    /// `decay_mom_rate`.
    pub decay_rate: f64,
}

/// OneCycle: one rise and one fall, then decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycle {
    /// `cycle_min_lr`.
    pub min: f64,
    /// `cycle_max_lr`.
    pub max: f64,
    /// `decay_lr_rate`.
    pub decay_rate: f64,
    /// `cycle_first_step_size`.
    pub rising_steps: u64,
    /// `cycle_second_step_size`.
    pub falling_steps: u64,
    /// `cycle_first_stair_count`; 0 rises continuously.
    pub rising_stairs: u64,
    /// `cycle_second_stair_count`; 0 falls continuously.
    pub falling_stairs: u64,
    /// `decay_step_size`; 0 keeps the rate constant.
    pub decay_steps: u64,
    /// `cycle_momentum` and its parameters.
    pub momentum: Option<Momentum>,
}

/// DeepSpeed sets Adam's second beta to this whenever OneCycle cycles the first.
const SECOND_BETA: f64 = 0.99;

impl OneCycle {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        a_rate("OneCycle", "cycle_min_lr", self.min)?;
        a_rate("OneCycle", "cycle_max_lr", self.max)?;
        if self.rising_steps > 0 {
            return Ok(());
        }
        Err(ScheduleError::NotPositive {
            schedule: "OneCycle",
            parameter: "cycle_first_step_size",
            found: self.rising_steps as f64,
        })
    }

    fn length(&self) -> u64 {
        self.rising_steps + self.falling_steps
    }

    pub(super) fn rate(&self, applied: u64) -> f64 {
        // n < length, where applied = n + 1.
        if applied <= self.length() {
            return self.min + (self.max - self.min) * self.height(applied);
        }
        if self.decay_steps == 0 || self.decay_rate == 0.0 {
            return self.min;
        }
        self.min / (1.0 + self.decay_rate * self.decays(applied))
    }

    pub(super) fn betas(&self, applied: u64) -> Option<[f64; 2]> {
        let Momentum { min, max, decay_rate } = self.momentum?;
        let first = if applied == 0 {
            // DeepSpeed sets the minimum at construction; from the next step on it starts from the maximum.
            min
        } else if applied <= self.length() {
            max - (max - min) * self.height(applied)
        } else if self.decay_steps == 0 || decay_rate == 0.0 {
            max
        } else {
            max * (1.0 + decay_rate * self.decays(applied))
        };
        Some([first, SECOND_BETA])
    }

    /// Position in the cycle, 0 to 1.
    fn height(&self, applied: u64) -> f64 {
        let (rising, falling) = (self.rising_steps, self.falling_steps);
        let step = applied % self.length();
        let up = step <= rising;
        let stairs = if up { self.rising_stairs } else { self.falling_stairs };
        // Integer arithmetic as long as possible, so that the top of the cycle does not fall a stair short.
        let (done, of) = if up { (step, rising) } else { (self.length() - step, falling) };
        match stairs {
            0 => done as f64 / of as f64,
            stairs => (done * stairs / of) as f64 / stairs as f64,
        }
    }

    /// Decay intervals since the end of the cycle, as a fraction.
    fn decays(&self, applied: u64) -> f64 {
        (applied - self.length()) as f64 / self.decay_steps as f64
    }
}

/// LRRangeTest: rises without bound, to find the rate at which training diverges.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct LrRangeTest {
    pub min: f64,
    pub step_size: u64,
    pub step_rate: f64,
    pub staircase: bool,
}

impl LrRangeTest {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        a_rate("LRRangeTest", "lr_range_test_min_lr", self.min)?;
        a_rate("LRRangeTest", "lr_range_test_step_rate", self.step_rate)?;
        if self.step_size > 0 {
            return Ok(());
        }
        Err(ScheduleError::NotPositive {
            schedule: "LRRangeTest",
            parameter: "lr_range_test_step_size",
            found: self.step_size as f64,
        })
    }

    pub(super) fn rate(&self, applied: u64) -> f64 {
        let rises = applied as f64 / self.step_size as f64;
        self.min * (1.0 + self.step_rate * if self.staircase { rises.floor() } else { rises })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Warmup = Warmup { steps: 0, shape: WarmupType::Log };

    #[test]
    fn without_warm_up_the_first_step_has_the_full_rate() {
        let rise = WarmupLr { min: 0.0, max: 2.0, warmup: NONE };
        assert_eq!([0, 1, 9].map(|applied| rise.rate(applied)), [2.0; 3]);
        let decay = WarmupDecayLr { rise, total_steps: 4 };
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6].map(|applied| decay.rate(applied)),
            [2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
        );
        let cosine = WarmupCosineLr {
            learning_rate: 2.0,
            warmup_min_ratio: 0.5,
            cos_min_ratio: 0.0,
            warmup: NONE,
            total_steps: 4,
        };
        let halves = [0, 2, 4, 5].map(|applied| cosine.rate(applied));
        assert!(halves.iter().zip([2.0, 1.0, 0.0, 0.0]).all(|(rate, value)| (rate - value).abs() < 1e-15));
    }

    #[test]
    fn zero_lengths_are_refused_by_key() {
        let test = LrRangeTest { min: 1e-3, step_size: 0, step_rate: 1.0, staircase: false };
        assert_eq!(
            test.check().unwrap_err().to_string(),
            "LRRangeTest: lr_range_test_step_size is 0; it must be above 0"
        );
    }
}
