//! The schedules of `transformers.get_scheduler`: a factor of the learning rate per scheduler step. Hugging Face's
//! Trainer runs the first optimizer step with the factor of step 0.

use std::f64::consts::PI;

use zeroth_config::schema::CurveType;

use super::{ScheduleError, a_rate};

/// The shape after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HuggingFaceShape {
    /// Constant, without warm-up.
    Constant,
    /// Warm-up, then constant.
    ConstantWithWarmup,
    /// Linear decay to 0.
    Linear,
    /// Cosine from the learning rate to a share of it.
    Cosine {
        /// Waves of the cosine. Hugging Face's default is 0.5, a single descent.
        cycles: f64,
        /// The share of the learning rate at the foot of the cosine; 0 for `cosine`.
        min_rate: f64,
    },
    /// Cosine to a share of the learning rate, one step ahead of [`Self::Cosine`], after a warm-up that starts above 0.
    CosineWarmup {
        /// As in [`Self::Cosine`].
        cycles: f64,
        /// As in [`Self::Cosine`].
        min_rate: f64,
        /// The share of the learning rate at the start of the warm-up; `None` is 1 / warm-up steps.
        warmup_rate: Option<f64>,
    },
    /// Cosine decay to 0, restarted `cycles` times.
    CosineWithRestarts {
        /// Hugging Face's default is 1.
        cycles: f64,
    },
    /// Polynomial decay to `end`.
    Polynomial {
        /// Hugging Face's default is 1.
        power: f64,
        /// The final rate. Hugging Face's default is 1e-7.
        end: f64,
    },
    /// Inverse square root decay.
    InverseSqrt {
        /// Time scale in steps; `None` uses the warm-up's length, or 10,000 without warm-up.
        timescale: Option<u64>,
    },
    /// Warm-up, constant, decay.
    WarmupStableDecay(WarmupStableDecay),
}

/// The parameters of `warmup_stable_decay`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct WarmupStableDecay {
    /// `num_stable_steps`; `None` is what warm-up and decay leave of the run.
    pub stable_steps: Option<u64>,
    /// `num_decay_steps`.
    pub decay_steps: u64,
    pub warmup_type: CurveType,
    pub decay_type: CurveType,
    /// `min_lr_ratio`: the share of the learning rate at both ends.
    pub min_ratio: f64,
    /// `num_cycles`, of a cosine decay.
    pub cycles: f64,
}

impl WarmupStableDecay {
    fn factor(&self, applied: u64, warmup: u64, total: u64) -> f64 {
        let above_min = |share: f64| (share * (1.0 - self.min_ratio) + self.min_ratio).max(0.0);
        if applied < warmup {
            let progress = applied as f64 / warmup as f64;
            return above_min(match self.warmup_type {
                CurveType::Linear => progress,
                CurveType::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
                CurveType::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
            });
        }
        // Negative where warm-up and decay are longer than the run: the decay then starts in its middle.
        let stable = self.stable_steps.map_or_else(
            || i128::from(total) - i128::from(warmup) - i128::from(self.decay_steps),
            i128::from,
        );
        let decayed = i128::from(applied) - i128::from(warmup) - stable;
        if decayed < 0 {
            return 1.0;
        }
        if decayed >= i128::from(self.decay_steps) {
            return self.min_ratio;
        }
        let progress = decayed as f64 / self.decay_steps as f64;
        above_min(match self.decay_type {
            CurveType::Linear => 1.0 - progress,
            CurveType::Cosine => 0.5 * (1.0 + (PI * self.cycles * 2.0 * progress).cos()),
            CurveType::OneMinusSqrt => 1.0 - progress.sqrt(),
        })
    }
}

/// A Hugging Face schedule with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HuggingFace {
    /// `--lr-scheduler-type`.
    pub shape: HuggingFaceShape,
    /// `--learning-rate`.
    pub learning_rate: f64,
    /// `--warmup-steps` as a step count ([`warmup_steps`]).
    pub warmup_steps: u64,
    /// Total steps of the run.
    pub total_steps: u64,
}

/// `--warmup-steps` as a step count: values below 1 are a fraction of all steps, rounded up.
pub fn warmup_steps(requested: f64, total_steps: u64) -> u64 {
    if requested < 1.0 { (total_steps as f64 * requested).ceil() as u64 } else { requested as u64 }
}

impl HuggingFace {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        a_rate("the schedule", "--learning-rate", self.learning_rate)?;
        match self.shape {
            // Hugging Face refuses it too.
            HuggingFaceShape::Polynomial { end, .. } if self.learning_rate <= end => {
                Err(ScheduleError::RisingPolynomial { from: self.learning_rate, end })
            }
            HuggingFaceShape::InverseSqrt { timescale: Some(0) } => Err(ScheduleError::NotPositive {
                schedule: "inverse_sqrt",
                parameter: "timescale",
                found: 0.0,
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn rate(&self, applied: u64) -> f64 {
        self.learning_rate * self.factor(applied)
    }

    fn factor(&self, applied: u64) -> f64 {
        let (warmup, total) = (self.warmup_steps, self.total_steps);
        if applied < warmup {
            return match self.shape {
                HuggingFaceShape::Constant => 1.0,
                HuggingFaceShape::WarmupStableDecay(shape) => shape.factor(applied, warmup, total),
                HuggingFaceShape::CosineWarmup { warmup_rate: None, .. } => {
                    (applied as f64 + 1.0) / warmup as f64
                }
                HuggingFaceShape::CosineWarmup { warmup_rate: Some(from), .. } => {
                    from + (1.0 - from) * applied as f64 / (warmup - 1).max(1) as f64
                }
                _ => applied as f64 / warmup as f64,
            };
        }
        // A warm-up as long as the run leaves one decay step.
        let progress = (applied - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
        match self.shape {
            HuggingFaceShape::Constant | HuggingFaceShape::ConstantWithWarmup => 1.0,
            HuggingFaceShape::Linear => {
                total.saturating_sub(applied) as f64 / total.saturating_sub(warmup).max(1) as f64
            }
            HuggingFaceShape::Cosine { cycles, min_rate } => cosine(cycles, progress, min_rate),
            HuggingFaceShape::CosineWarmup { cycles, min_rate, .. } => {
                let ahead = (applied - warmup) as f64 + 1.0;
                cosine(cycles, ahead / total.saturating_sub(warmup).max(1) as f64, min_rate)
            }
            HuggingFaceShape::WarmupStableDecay(shape) => shape.factor(applied, warmup, total),
            HuggingFaceShape::CosineWithRestarts { .. } if progress >= 1.0 => 0.0,
            HuggingFaceShape::CosineWithRestarts { cycles } => {
                (0.5 * (1.0 + (PI * ((cycles * progress) % 1.0)).cos())).max(0.0)
            }
            // Also covers the last step, where Hugging Face would divide by zero decay steps.
            HuggingFaceShape::Polynomial { end, .. } if applied >= total => end / self.learning_rate,
            HuggingFaceShape::Polynomial { power, end } => {
                let left = 1.0 - progress;
                ((self.learning_rate - end) * left.powf(power) + end) / self.learning_rate
            }
            HuggingFaceShape::InverseSqrt { timescale } => {
                let timescale = timescale.unwrap_or(if warmup == 0 { 10_000 } else { warmup }) as f64;
                1.0 / (((applied - warmup) as f64 + timescale) / timescale).sqrt()
            }
        }
    }
}

/// `cycles` waves of a cosine from 1 to `min_rate`.
fn cosine(cycles: f64, progress: f64, min_rate: f64) -> f64 {
    let factor = 0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos());
    (factor * (1.0 - min_rate) + min_rate).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractional_warmup_is_rounded_up() {
        assert_eq!(
            [0.0, 0.03, 0.5, 1.0, 20.0].map(|requested| warmup_steps(requested, 101)),
            [0, 4, 51, 1, 20]
        );
    }

    #[test]
    fn a_rising_polynomial_is_refused() {
        let shape = HuggingFaceShape::Polynomial { power: 1.0, end: 1e-7 };
        let schedule = HuggingFace { shape, learning_rate: 1e-8, warmup_steps: 0, total_steps: 10 };
        assert_eq!(schedule.check(), Err(ScheduleError::RisingPolynomial { from: 1e-8, end: 1e-7 }));
        assert_eq!(HuggingFace { learning_rate: 1e-5, ..schedule }.check(), Ok(()));
        assert!(HuggingFace { learning_rate: f64::NAN, ..schedule }.check().is_err());
    }
}
