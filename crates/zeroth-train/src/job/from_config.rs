//! The trainer's part of a resolved config: the optimizer's hyperparameters and the schedule.

use zeroth_config::resolve::Resolved;
use zeroth_config::schema::{DecayedParameters, SchedulerType, Values};
use zeroth_kernel::Recipe;

use crate::schedule::{
    HuggingFace, HuggingFaceShape, LrRangeTest, Momentum, OneCycle, Schedule, ScheduleError, Warmup,
    WarmupCosineLr, WarmupDecayLr, WarmupLr, warmup_steps,
};

/// The optimizer's hyperparameters and the loss scale. `tolerated` steps may be skipped for non-finite gradients.
pub fn recipe(config: &Resolved, tolerated: u64) -> Recipe {
    let Values { top_level, optimizer, fp16, .. } = &config.values;
    let [beta1, beta2] = optimizer.betas;
    let mut recipe = Recipe {
        beta1,
        beta2,
        eps: optimizer.eps,
        weight_decay: [optimizer.weight_decay, 0.0],
        max_norm: top_level.gradient_clipping,
        momentum: optimizer.momentum,
        dampening: optimizer.dampening,
        nesterov: optimizer.nesterov.into(),
        lr_decay: optimizer.lr_decay,
        initial_accumulator: optimizer.initial_accumulator_value,
        beta3: optimizer.betas_of_three[2],
        alpha: optimizer.alpha,
        t_alpha: optimizer.t_alpha.unwrap_or(0),
        t_beta3: optimizer.t_beta3.unwrap_or(0),
        bias_correction: optimizer.bias_correction.into(),
        tolerated,
        ..Recipe::default()
    };
    if fp16.enabled {
        let power = fp16.initial_scale_power as f64;
        let is_fixed = fp16.loss_scale > 0.0;
        (recipe.dynamic, recipe.loss_scale) = if is_fixed { (0, fp16.loss_scale) } else { (1, power.exp2()) };
        recipe.scale_window = fp16.loss_scale_window;
        recipe.hysteresis = fp16.hysteresis;
        recipe.consecutive_hysteresis = fp16.consecutive_hysteresis.into();
        recipe.min_scale = fp16.min_loss_scale;
    }
    recipe
}

/// Whether weight decay applies to norms and biases too, as in DeepSpeed.
pub fn decays_all(config: &Resolved) -> bool {
    config.values.zeroth.decay == DecayedParameters::All
}

/// The learning-rate schedule of a run of `total_steps`: the file's, or Hugging Face's from the flags.
pub fn schedule(config: &Resolved, total_steps: u64) -> Result<Schedule, ScheduleError> {
    let Values { scheduler, zeroth, .. } = &config.values;
    let learning_rate = config.values.optimizer.lr;
    let warmup = Warmup { steps: scheduler.warmup_num_steps, shape: scheduler.warmup_type };
    let rise = WarmupLr {
        min: scheduler.warmup_min_lr,
        max: scheduler.warmup_max_lr.unwrap_or(learning_rate),
        warmup,
    };
    let decay_steps = scheduler.total_num_steps.unwrap_or(total_steps);
    let schedule = match scheduler.name {
        Some(SchedulerType::WarmupLr) => Schedule::WarmupLr(rise),
        Some(SchedulerType::WarmupDecayLr) => {
            Schedule::WarmupDecayLr(WarmupDecayLr { rise, total_steps: decay_steps })
        }
        Some(SchedulerType::WarmupCosineLr) => Schedule::WarmupCosineLr(WarmupCosineLr {
            learning_rate,
            warmup_min_ratio: scheduler.warmup_min_ratio,
            cos_min_ratio: scheduler.cos_min_ratio,
            warmup,
            total_steps: decay_steps,
        }),
        Some(SchedulerType::OneCycle) => Schedule::OneCycle(OneCycle {
            min: scheduler.cycle_min_lr.unwrap_or(0.0),
            max: scheduler.cycle_max_lr.unwrap_or(learning_rate),
            decay_rate: scheduler.decay_lr_rate,
            rising_steps: scheduler.cycle_first_step_size,
            falling_steps: scheduler.cycle_second_step_size.unwrap_or(scheduler.cycle_first_step_size),
            rising_stairs: scheduler.cycle_first_stair_count,
            falling_stairs: scheduler.cycle_second_stair_count.unwrap_or(scheduler.cycle_first_stair_count),
            decay_steps: scheduler.decay_step_size,
            momentum: scheduler.cycle_momentum.then_some(Momentum {
                min: scheduler.cycle_min_mom,
                max: scheduler.cycle_max_mom,
                decay_rate: scheduler.decay_mom_rate,
            }),
        }),
        Some(SchedulerType::LrRangeTest) => Schedule::LrRangeTest(LrRangeTest {
            min: scheduler.lr_range_test_min_lr,
            step_size: scheduler.lr_range_test_step_size,
            step_rate: scheduler.lr_range_test_step_rate,
            staircase: scheduler.lr_range_test_staircase,
        }),
        None => Schedule::HuggingFace(HuggingFace {
            shape: HuggingFaceShape::new(
                &zeroth.lr_scheduler_type,
                &config.values.lr_scheduler_kwargs,
                &schedule_parameters(config),
                learning_rate,
            )?,
            learning_rate,
            warmup_steps: warmup_steps(zeroth.warmup_steps, total_steps),
            total_steps,
        }),
    };
    schedule.check()?;
    Ok(schedule)
}

/// Names of the schedule's parameters that were given.
fn schedule_parameters(config: &Resolved) -> Vec<&'static str> {
    let paths = config.settings().iter().map(|setting| setting.key.path);
    paths.filter_map(|path| path.strip_prefix("zeroth.lr_scheduler_kwargs.")).collect()
}
