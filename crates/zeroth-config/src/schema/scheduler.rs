//! `scheduler`: its types and the parameters of each.

use super::conditions;
use super::key::{AutoRule, Derivation, Key, KeyType, ReadBy};

words! {
    /// DeepSpeed's learning-rate schedules.
    SchedulerType {
        /// A warm-up, then constant.
        WarmupLr = "WarmupLR",
        /// A warm-up, then linear decay to 0.
        WarmupDecayLr = "WarmupDecayLR",
        /// A warm-up, then cosine decay.
        WarmupCosineLr = "WarmupCosineLR",
        /// One cycle up and down, then decay.
        OneCycle = "OneCycle",
        /// A rate that only rises, to find the largest usable one.
        LrRangeTest = "LRRangeTest",
    }
}

words! {
    /// The shape of a warm-up.
    WarmupType {
        /// Logarithmic in the step; DeepSpeed's default.
        Log = "log",
        /// Linear in the step.
        Linear = "linear",
    }
}

/// Names of DeepSpeed's schedules.
pub const SCHEDULERS: &[&str] = SchedulerType::WORDS;

/// Schedules of torch.optim.lr_scheduler that DeepSpeed takes by name and zeroth does not have.
pub const FOREIGN_SCHEDULERS: &[&str] = &[
    "LambdaLR",
    "MultiplicativeLR",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "ChainedScheduler",
    "SequentialLR",
    "ReduceLROnPlateau",
    "CyclicLR",
    "OneCycleLR",
];

const WARMUPS: &[&str] = &["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"];
const WARMUPS_TO_LR: &[&str] = &["WarmupLR", "WarmupDecayLR"];
const DECAYS: &[&str] = &["WarmupDecayLR", "WarmupCosineLR"];
const CYCLE: &[&str] = &["OneCycle"];
const RANGE: &[&str] = &["LRRangeTest"];

/// A parameter of a schedule: all are read by the same part.
const fn param(key: Key, types: &'static [&'static str]) -> Key {
    key.read_by(ReadBy::Schedule).of(types)
}

section! {
    /// Values of `scheduler` and `scheduler.params`.
    KEYS: Scheduler {
        Key::section("scheduler")
            .does("The learning-rate schedule. Without it: --lr-scheduler-type and --warmup-steps.")
            .set("leave it out, or {\"type\": \"WarmupDecayLR\", \"params\": {…}}")
            .read_by(ReadBy::Schedule),
        Key::new("scheduler.type", KeyType::Text)
            .does("WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest.")
            .set("WarmupDecayLR or WarmupCosineLR; WarmupLR never comes down again")
            .read_by(ReadBy::Schedule)
            .noting(conditions::decay_without_its_end)
            => name: Option<SchedulerType>,
        Key::section("scheduler.params").does("The parameters of the schedule.").read_by(ReadBy::Schedule),
        param(Key::float("scheduler.params.warmup_min_lr", 0.0).in_fp32(), WARMUPS_TO_LR)
            .or_float(0.0)
            .does("The learning rate at the start of the warm-up.")
            .set("\"auto\" (0)")
            .auto(AutoRule::WarmupMinLr)
            => warmup_min_lr: f64,
        param(Key::float("scheduler.params.warmup_max_lr", 0.0).in_fp32(), &["WarmupLR"])
            .or_derived(Derivation::LearningRate, "the optimizer's learning rate")
            .does("The learning rate at the end of the warm-up.")
            .set("\"auto\" (--learning-rate)")
            .auto(AutoRule::WarmupMaxLr)
            => warmup_max_lr: Option<f64>,
        param(Key::float("scheduler.params.warmup_max_lr", 0.0).in_fp32(), &["WarmupDecayLR"])
            .or_float(1e-3)
            .does("The learning rate at the end of the warm-up; absent it is 0.001, not the optimizer's, as in DeepSpeed.")
            .set("\"auto\" (--learning-rate)")
            .auto(AutoRule::WarmupMaxLr),
        param(Key::int("scheduler.params.warmup_num_steps", 0), WARMUPS)
            .or_int(1000)
            .in_("steps")
            .does("How long the warm-up lasts; 0 means none.")
            .set("\"auto\" (--warmup-steps)")
            .auto(AutoRule::WarmupSteps)
            => warmup_num_steps: u64,
        param(Key::new("scheduler.params.warmup_type", KeyType::OneOf(WarmupType::WORDS)), WARMUPS)
            .or_text("log")
            .does("The shape of the warm-up: logarithmic or linear.")
            .set("linear is what most papers mean; log is DeepSpeed's default")
            => warmup_type: WarmupType,
        param(Key::int("scheduler.params.total_num_steps", 1), DECAYS)
            .or_rule("all steps of the run")
            .in_("steps")
            .does("The step at which the decay ends.")
            .set("\"auto\" (the steps of the run)")
            .auto(AutoRule::TotalSteps)
            => total_num_steps: Option<u64>,
        param(Key::float("scheduler.params.warmup_min_ratio", 0.0).in_fp32(), &["WarmupCosineLR"])
            .or_float(0.0)
            .does("The share of the learning rate at the start of the warm-up.")
            .set("0")
            => warmup_min_ratio: f64,
        param(Key::float("scheduler.params.cos_min_ratio", 0.0).in_fp32(), &["WarmupCosineLR"])
            .or_float(1e-4)
            .does("The share of the learning rate at the end of the decay.")
            .set("0.0001, or 0.1 as many papers do")
            => cos_min_ratio: f64,
        param(Key::int("scheduler.params.last_batch_iteration", -1), SCHEDULERS)
            .or_int(-1)
            .in_("steps")
            .does("The step to start from.")
            .set("leave it out; a checkpoint carries it")
            .only(&["-1"], "leave it out: a run starts from its first step"),
        param(Key::float("scheduler.params.cycle_min_lr", 0.0).in_fp32(), CYCLE).does("The learning rate at the foot of the cycle.").set("a tenth of cycle_max_lr") => cycle_min_lr: Option<f64>,
        param(Key::float("scheduler.params.cycle_max_lr", 0.0).in_fp32(), CYCLE).does("The learning rate at the top of the cycle.").set("the largest that trains") => cycle_max_lr: Option<f64>,
        param(Key::float("scheduler.params.decay_lr_rate", 0.0).in_fp32(), CYCLE).or_float(0.0).does("How fast it falls after the cycle.").set("0") => decay_lr_rate: f64,
        param(Key::int("scheduler.params.cycle_first_step_size", 1), CYCLE)
            .or_int(2000)
            .in_("steps")
            .does("How long it rises.")
            .set("a third of the run")
            => cycle_first_step_size: u64,
        param(Key::int("scheduler.params.cycle_second_step_size", 1), CYCLE)
            .or_derived(Derivation::FirstStepSize, "cycle_first_step_size")
            .in_("steps")
            .does("How long it falls.")
            .set("a third of the run")
            => cycle_second_step_size: Option<u64>,
        param(Key::int("scheduler.params.cycle_first_stair_count", 0), CYCLE)
            .or_int(0)
            .in_("stairs")
            .does("Rises in this many stairs; 0 rises evenly.")
            .set("0")
            => cycle_first_stair_count: u64,
        param(Key::int("scheduler.params.cycle_second_stair_count", 0), CYCLE)
            .or_derived(Derivation::FirstStairCount, "cycle_first_stair_count")
            .in_("stairs")
            .does("Falls in this many stairs.")
            .set("0")
            => cycle_second_stair_count: Option<u64>,
        param(Key::int("scheduler.params.decay_step_size", 0), CYCLE)
            .or_int(0)
            .in_("steps")
            .does("Steps between two decays after the cycle; 0 holds the rate.")
            .set("0")
            => decay_step_size: u64,
        param(Key::bool("scheduler.params.cycle_momentum", true), CYCLE)
            .does("Moves the first beta against the learning rate; absent it is true, as in DeepSpeed.")
            .set("false")
            .only(&["false"], "write scheduler.params.cycle_momentum: false, and the first beta stays what it is")
            => cycle_momentum: bool,
        param(Key::float("scheduler.params.cycle_min_mom", 0.0), CYCLE)
            .at_most(1.0)
            .or_float(0.8)
            .does("Least first beta.")
            .set("0.8")
            .unsupported()
            .idle_if(conditions::momentum_is_fixed)
            => cycle_min_mom: f64,
        param(Key::float("scheduler.params.cycle_max_mom", 0.0), CYCLE)
            .at_most(1.0)
            .or_float(0.9)
            .does("Greatest first beta.")
            .set("0.9")
            .unsupported()
            .idle_if(conditions::momentum_is_fixed)
            => cycle_max_mom: f64,
        param(Key::float("scheduler.params.decay_mom_rate", 0.0), CYCLE)
            .or_float(0.0)
            .does("How fast the first beta rises after the cycle.")
            .set("0")
            .unsupported()
            .idle_if(conditions::momentum_is_fixed)
            => decay_mom_rate: f64,
        param(Key::float("scheduler.params.lr_range_test_min_lr", 0.0).in_fp32(), RANGE).or_float(1e-3).does("The learning rate to start from.").set("1e-6") => lr_range_test_min_lr: f64,
        param(Key::int("scheduler.params.lr_range_test_step_size", 1), RANGE)
            .or_int(2000)
            .in_("steps")
            .does("Steps between two rises.")
            .set("20")
            => lr_range_test_step_size: u64,
        param(Key::float("scheduler.params.lr_range_test_step_rate", 0.0).in_fp32(), RANGE).or_float(1.0).does("How much each rise adds.").set("1") => lr_range_test_step_rate: f64,
        param(Key::bool("scheduler.params.lr_range_test_staircase", false), RANGE).does("Rises in stairs.").set("false") => lr_range_test_staircase: bool,
    }
}
