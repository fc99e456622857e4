//! `zeroth.lr_scheduler_kwargs`: the parameters of Hugging Face's schedules, by --lr-scheduler-kwargs.

use super::conditions;
use super::key::{Key, KeyType, ReadBy};

words! {
    /// The shape of the warm-up and of the decay of `warmup_stable_decay`.
    CurveType {
        /// A straight line.
        Linear = "linear",
        /// Half a cosine.
        Cosine = "cosine",
        /// One minus a square root.
        OneMinusSqrt = "1-sqrt",
    }
}

/// A parameter: all are read by the same part, and only without a scheduler section.
const fn param(key: Key) -> Key {
    key.read_by(ReadBy::Schedule).idle_if(conditions::file_has_a_scheduler)
}

section! {
    /// Values of `zeroth.lr_scheduler_kwargs`.
    KEYS: LrSchedulerKwargs {
        Key::section("zeroth.lr_scheduler_kwargs")
            .does("Parameters of zeroth.lr_scheduler_type; --lr-scheduler-kwargs says the same.")
            .set("leave it out, or {\"min_lr\": 1e-6} for cosine_with_min_lr")
            .read_by(ReadBy::Schedule),
        param(Key::float("zeroth.lr_scheduler_kwargs.min_lr", 0.0).in_fp32())
            .does("The learning rate at the end of cosine_with_min_lr and cosine_warmup_with_min_lr.")
            .set("a tenth of the learning rate")
            => min_lr: Option<f64>,
        param(Key::float("zeroth.lr_scheduler_kwargs.min_lr_rate", 0.0).at_most(1.0))
            .does("The same as a share of the learning rate.")
            .set("0.1")
            => min_lr_rate: Option<f64>,
        param(Key::float("zeroth.lr_scheduler_kwargs.num_cycles", 0.0).in_fp32())
            .does("Waves of the cosine schedules (absent: half a one), or restarts of cosine_with_restarts (absent: 1).")
            .set("leave it out")
            => num_cycles: Option<f64>,
        param(Key::float("zeroth.lr_scheduler_kwargs.power", 0.0).in_fp32())
            .does("The exponent of polynomial; absent it is 1.")
            .set("1")
            => power: Option<f64>,
        param(Key::float("zeroth.lr_scheduler_kwargs.lr_end", 0.0).in_fp32())
            .does("The learning rate at the end of polynomial; absent it is 1e-7.")
            .set("1e-7")
            => lr_end: Option<f64>,
        param(Key::int("zeroth.lr_scheduler_kwargs.timescale", 1))
            .in_("steps")
            .does("The time scale of inverse_sqrt; absent it is the warm-up, or 10,000 steps without one.")
            .set("leave it out")
            => timescale: Option<u64>,
        param(Key::float("zeroth.lr_scheduler_kwargs.warmup_lr_rate", 0.0).at_most(1.0))
            .does("The share of the learning rate at which cosine_warmup_with_min_lr starts; absent it is 1 / warm-up steps.")
            .set("leave it out")
            => warmup_lr_rate: Option<f64>,
        param(Key::int("zeroth.lr_scheduler_kwargs.num_decay_steps", 0))
            .in_("steps")
            .does("How long warmup_stable_decay decays.")
            .set("a tenth of the run")
            => num_decay_steps: Option<u64>,
        param(Key::int("zeroth.lr_scheduler_kwargs.num_stable_steps", 0))
            .in_("steps")
            .does("How long warmup_stable_decay stays constant; absent it is what warm-up and decay leave of the run.")
            .set("leave it out")
            => num_stable_steps: Option<u64>,
        param(Key::new("zeroth.lr_scheduler_kwargs.warmup_type", KeyType::OneOf(CurveType::WORDS)))
            .does("The shape of the warm-up of warmup_stable_decay; absent it is linear.")
            .set("linear")
            => warmup_type: Option<CurveType>,
        param(Key::new("zeroth.lr_scheduler_kwargs.decay_type", KeyType::OneOf(CurveType::WORDS)))
            .does("The shape of the decay of warmup_stable_decay; absent it is cosine.")
            .set("cosine; 1-sqrt is what the paper on it recommends")
            => decay_type: Option<CurveType>,
        param(Key::float("zeroth.lr_scheduler_kwargs.min_lr_ratio", 0.0).at_most(1.0))
            .does("The share of the learning rate at the start and the end of warmup_stable_decay; absent it is 0.")
            .set("0 or 0.1")
            => min_lr_ratio: Option<f64>,
    }
}
