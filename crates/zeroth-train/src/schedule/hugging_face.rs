//! The schedules of `transformers.get_scheduler`: a factor of the learning rate per scheduler step. Hugging Face's
//! Trainer runs the first optimizer step with the factor of step 0.

use std::f64::consts::PI;

use zeroth_base::nearest;

use super::{ScheduleError, a_rate};

/// Names accepted by [`HuggingFaceShape::named`].
pub(super) const NAMES: &[&str] = &[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
];

/// The shape after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HuggingFaceShape {
    /// Constant, without warm-up.
    Constant,
    /// Warm-up, then constant.
    ConstantWithWarmup,
    /// Linear decay to 0.
    Linear,
    /// Cosine decay to 0.
    Cosine,
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
}

impl HuggingFaceShape {
    /// The shape for a `--lr-scheduler-type`, with Hugging Face's defaults.
    pub fn named(name: &str) -> Result<Self, ScheduleError> {
        Ok(match name {
            "constant" => Self::Constant,
            "constant_with_warmup" => Self::ConstantWithWarmup,
            "linear" => Self::Linear,
            "cosine" => Self::Cosine,
            "cosine_with_restarts" => Self::CosineWithRestarts { cycles: 1.0 },
            "polynomial" => Self::Polynomial { power: 1.0, end: 1e-7 },
            "inverse_sqrt" => Self::InverseSqrt { timescale: None },
            _ => {
                let near = nearest(name, NAMES.iter().copied());
                return Err(ScheduleError::Unknown { name: name.to_owned(), near });
            }
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
        if self.shape == HuggingFaceShape::Constant {
            return 1.0;
        }
        if applied < warmup {
            return applied as f64 / warmup as f64;
        }
        // A warm-up as long as the run leaves one decay step.
        let progress = (applied - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
        match self.shape {
            HuggingFaceShape::Constant | HuggingFaceShape::ConstantWithWarmup => 1.0,
            HuggingFaceShape::Linear => {
                total.saturating_sub(applied) as f64 / total.saturating_sub(warmup).max(1) as f64
            }
            HuggingFaceShape::Cosine => (0.5 * (1.0 + (PI * 0.5 * 2.0 * progress).cos())).max(0.0),
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
    fn unknown_names_are_refused_with_a_suggestion() {
        let error = HuggingFaceShape::named("cosin").unwrap_err().to_string();
        assert!(error.starts_with("unknown schedule `cosin` (did you mean `cosine`?)"), "{error}");
        assert!(error.ends_with("polynomial, inverse_sqrt"), "{error}");
        for name in NAMES {
            assert!(HuggingFaceShape::named(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_rising_polynomial_is_refused() {
        let shape = HuggingFaceShape::named("polynomial").unwrap();
        let schedule = HuggingFace { shape, learning_rate: 1e-8, warmup_steps: 0, total_steps: 10 };
        assert_eq!(schedule.check(), Err(ScheduleError::RisingPolynomial { from: 1e-8, end: 1e-7 }));
        assert_eq!(HuggingFace { learning_rate: 1e-5, ..schedule }.check(), Ok(()));
        assert!(HuggingFace { learning_rate: f64::NAN, ..schedule }.check().is_err());
    }
}
