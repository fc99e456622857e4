//! `--lr-scheduler-type` with `--lr-scheduler-kwargs`: the defaults and the checks of `transformers.get_scheduler`.

use zeroth_base::nearest;
use zeroth_config::schema::{CurveType, HF_SCHEDULES, LrSchedulerKwargs};

use super::ScheduleError;
use super::hugging_face::{HuggingFaceShape, WarmupStableDecay};

/// The waves of a cosine that descends once.
const ONE_DESCENT: f64 = 0.5;

/// The parameters that a schedule takes.
fn parameters(name: &str) -> &'static [&'static str] {
    match name {
        "cosine" | "cosine_with_restarts" => &["num_cycles"],
        "cosine_with_min_lr" => &["min_lr", "min_lr_rate", "num_cycles"],
        "cosine_warmup_with_min_lr" => &["min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"],
        "polynomial" => &["power", "lr_end"],
        "inverse_sqrt" => &["timescale"],
        "warmup_stable_decay" => &[
            "num_decay_steps",
            "num_stable_steps",
            "warmup_type",
            "decay_type",
            "min_lr_ratio",
            "num_cycles",
        ],
        _ => &[],
    }
}

impl HuggingFaceShape {
    /// The shape for a `--lr-scheduler-type`. `given` are the names of the parameters that were given; absent ones have
    /// Hugging Face's defaults.
    pub fn new(
        name: &str,
        kwargs: &LrSchedulerKwargs,
        given: &[&str],
        learning_rate: f64,
    ) -> Result<Self, ScheduleError> {
        let Some(schedule) = HF_SCHEDULES.iter().copied().find(|known| *known == name) else {
            let near = nearest(name, HF_SCHEDULES.iter().copied());
            return Err(ScheduleError::Unknown { name: name.to_owned(), near });
        };
        let known = parameters(schedule);
        if let Some(other) = given.iter().find(|given| !known.contains(given)) {
            return Err(ScheduleError::NoSuchParameter { schedule, parameter: (*other).to_owned(), known });
        }
        let cycles = kwargs.num_cycles;
        let min_rate = || match (kwargs.min_lr, kwargs.min_lr_rate) {
            (Some(_), Some(_)) => Err(ScheduleError::TwoMinima { schedule }),
            (Some(_), None) if learning_rate == 0.0 => Err(ScheduleError::NotPositive {
                schedule,
                parameter: "--learning-rate",
                found: learning_rate,
            }),
            (Some(rate), None) if rate > learning_rate => {
                Err(ScheduleError::RisingCosine { from: learning_rate, end: rate })
            }
            (Some(rate), None) => Ok(rate / learning_rate),
            (None, Some(share)) => Ok(share),
            (None, None) => Err(ScheduleError::MissingParameter {
                schedule,
                parameter: "min_lr or min_lr_rate",
                example: "{\"min_lr\": 1e-6}",
            }),
        };
        Ok(match schedule {
            "constant" => Self::Constant,
            "constant_with_warmup" => Self::ConstantWithWarmup,
            "linear" => Self::Linear,
            "cosine" => Self::Cosine { cycles: cycles.unwrap_or(ONE_DESCENT), min_rate: 0.0 },
            "cosine_with_min_lr" => {
                Self::Cosine { cycles: cycles.unwrap_or(ONE_DESCENT), min_rate: min_rate()? }
            }
            "cosine_warmup_with_min_lr" => Self::CosineWarmup {
                cycles: cycles.unwrap_or(ONE_DESCENT),
                min_rate: min_rate()?,
                warmup_rate: kwargs.warmup_lr_rate,
            },
            "cosine_with_restarts" => Self::CosineWithRestarts { cycles: cycles.unwrap_or(1.0) },
            "polynomial" => {
                Self::Polynomial { power: kwargs.power.unwrap_or(1.0), end: kwargs.lr_end.unwrap_or(1e-7) }
            }
            "inverse_sqrt" => Self::InverseSqrt { timescale: kwargs.timescale },
            _ => Self::WarmupStableDecay(WarmupStableDecay {
                stable_steps: kwargs.num_stable_steps,
                decay_steps: kwargs.num_decay_steps.ok_or(ScheduleError::MissingParameter {
                    schedule,
                    parameter: "num_decay_steps",
                    example: "{\"num_decay_steps\": 100}",
                })?,
                warmup_type: kwargs.warmup_type.unwrap_or(CurveType::Linear),
                decay_type: kwargs.decay_type.unwrap_or(CurveType::Cosine),
                min_ratio: kwargs.min_lr_ratio.unwrap_or(0.0),
                cycles: cycles.unwrap_or(ONE_DESCENT),
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: LrSchedulerKwargs = LrSchedulerKwargs {
        min_lr: None,
        min_lr_rate: None,
        num_cycles: None,
        power: None,
        lr_end: None,
        timescale: None,
        warmup_lr_rate: None,
        num_decay_steps: None,
        num_stable_steps: None,
        warmup_type: None,
        decay_type: None,
        min_lr_ratio: None,
    };

    fn refusal(name: &str, kwargs: &LrSchedulerKwargs, given: &[&str], learning_rate: f64) -> String {
        HuggingFaceShape::new(name, kwargs, given, learning_rate).unwrap_err().to_string()
    }

    #[test]
    fn every_name_is_known_and_others_are_refused_with_a_suggestion() {
        let kwargs = LrSchedulerKwargs { min_lr_rate: Some(0.1), num_decay_steps: Some(3), ..NONE };
        for name in HF_SCHEDULES {
            assert!(HuggingFaceShape::new(name, &kwargs, &[], 1e-3).is_ok(), "{name}");
        }
        let error = refusal("cosin", &NONE, &[], 1e-3);
        assert!(error.starts_with("unknown schedule `cosin` (did you mean `cosine`?)"), "{error}");
        assert!(error.ends_with("inverse_sqrt, warmup_stable_decay"), "{error}");
    }

    #[test]
    fn parameters_that_do_not_belong_or_are_missing_are_refused() {
        let error = refusal("linear", &NONE, &["power"], 1e-3);
        assert_eq!(error, "linear has no parameter `power`; it takes none");
        let error = refusal("cosine_with_min_lr", &NONE, &["power"], 1e-3);
        assert!(error.ends_with("it takes min_lr, min_lr_rate, num_cycles"), "{error}");
        let error = refusal("cosine_with_min_lr", &NONE, &[], 1e-3);
        assert!(error.contains("needs min_lr or min_lr_rate"), "{error}");
        let both = LrSchedulerKwargs { min_lr: Some(1e-5), min_lr_rate: Some(0.1), ..NONE };
        let error = refusal("cosine_with_min_lr", &both, &["min_lr", "min_lr_rate"], 1e-3);
        assert!(error.contains("min_lr and min_lr_rate"), "{error}");
        let absolute = LrSchedulerKwargs { min_lr: Some(1e-5), ..NONE };
        assert!(refusal("cosine_with_min_lr", &absolute, &["min_lr"], 0.0).contains("--learning-rate"));
        assert!(refusal("cosine_with_min_lr", &absolute, &["min_lr"], 1e-6).contains("above min_lr"));
        assert!(refusal("warmup_stable_decay", &NONE, &[], 1e-3).contains("needs num_decay_steps"));
    }
}
