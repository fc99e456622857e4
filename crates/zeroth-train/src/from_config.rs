//! What a resolved config says to the trainer: the optimizer's numbers and the schedule.

use zeroth_config::resolve::Resolved;
use zeroth_kernel::Recipe;

use crate::{
    HuggingFace, HuggingFaceShape, LrRangeTest, Momentum, OneCycle, Schedule, ScheduleError, Warmup,
    WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupShape, warmup_steps,
};

fn number(config: &Resolved, path: &str) -> Option<f64> {
    config.get(path).and_then(|setting| setting.value.as_f64())
}

/// The optimizer's numbers and the loss scale. `tolerated` steps may be skipped for gradients that are not finite.
pub fn recipe(config: &Resolved, tolerated: u64) -> Recipe {
    let betas = config.get("optimizer.params.betas").and_then(|setting| setting.value.as_array().cloned());
    let beta = |place: usize, default: f64| {
        betas.as_ref().and_then(|betas| betas.get(place)?.as_f64()).unwrap_or(default)
    };
    let param =
        |name: &str, default: f64| number(config, &format!("optimizer.params.{name}")).unwrap_or(default);
    let is_on = |path: &str| u32::from(config.is_on(path));
    let uncorrected =
        config.get("optimizer.params.bias_correction").is_some_and(|setting| setting.value == false);
    let defaults = Recipe::default();
    let mut recipe = Recipe {
        beta1: beta(0, 0.9),
        beta2: beta(1, 0.95),
        eps: param("eps", 1e-8),
        weight_decay: [param("weight_decay", 0.0), 0.0],
        max_norm: number(config, "gradient_clipping").unwrap_or(0.0),
        momentum: param("momentum", 0.0),
        dampening: param("dampening", 0.0),
        nesterov: is_on("optimizer.params.nesterov"),
        lr_decay: param("lr_decay", 0.0),
        initial_accumulator: param("initial_accumulator_value", 0.0),
        bias_correction: u32::from(!uncorrected),
        tolerated,
        ..defaults
    };
    if config.is_on("fp16.enabled") {
        let fixed = number(config, "fp16.loss_scale").unwrap_or(0.0);
        let power = number(config, "fp16.initial_scale_power").unwrap_or(16.0);
        (recipe.dynamic, recipe.loss_scale) = if fixed > 0.0 { (0, fixed) } else { (1, power.exp2()) };
        recipe.scale_window = config.whole("fp16.loss_scale_window").unwrap_or(defaults.scale_window);
        recipe.hysteresis = config.whole("fp16.hysteresis").unwrap_or(defaults.hysteresis);
        recipe.consecutive_hysteresis = is_on("fp16.consecutive_hysteresis");
        recipe.min_scale = number(config, "fp16.min_loss_scale").unwrap_or(defaults.min_scale);
    }
    recipe
}

/// Whether norms and biases are decayed too: DeepSpeed's way.
pub fn decays_all(config: &Resolved) -> bool {
    config.text("zeroth.decay") == Some("all")
}

/// The schedule of a run of so many steps: the file's, or Hugging Face's by its flags.
pub fn schedule(config: &Resolved, total_steps: u64) -> Result<Schedule, ScheduleError> {
    let learning_rate = number(config, "optimizer.params.lr").unwrap_or(0.0);
    let param = |name: &str| number(config, &format!("scheduler.params.{name}"));
    let whole = |name: &str| param(name).map(|value| value as u64);
    let is_on = |name: &str| config.is_on(&format!("scheduler.params.{name}"));
    let warmup = || Warmup {
        steps: whole("warmup_num_steps").unwrap_or(1000),
        shape: match config.text("scheduler.params.warmup_type") {
            Some("linear") => WarmupShape::Linear,
            _ => WarmupShape::Log,
        },
    };
    let rise = || WarmupLr {
        min: param("warmup_min_lr").unwrap_or(0.0),
        max: param("warmup_max_lr").unwrap_or(learning_rate),
        warmup: warmup(),
    };
    let total = || whole("total_num_steps").unwrap_or(total_steps);
    let schedule = match config.text("scheduler.type") {
        Some("WarmupLR") => Schedule::WarmupLr(rise()),
        Some("WarmupDecayLR") => {
            Schedule::WarmupDecayLr(WarmupDecayLr { rise: rise(), total_steps: total() })
        }
        Some("WarmupCosineLR") => Schedule::WarmupCosineLr(WarmupCosineLr {
            learning_rate,
            warmup_min_ratio: param("warmup_min_ratio").unwrap_or(0.0),
            cos_min_ratio: param("cos_min_ratio").unwrap_or(0.0001),
            warmup: warmup(),
            total_steps: total(),
        }),
        Some("OneCycle") => {
            let rising_steps = whole("cycle_first_step_size").unwrap_or(2000);
            Schedule::OneCycle(OneCycle {
                min: param("cycle_min_lr").unwrap_or(0.0),
                max: param("cycle_max_lr").unwrap_or(learning_rate),
                decay_rate: param("decay_lr_rate").unwrap_or(0.0),
                rising_steps,
                falling_steps: whole("cycle_second_step_size").unwrap_or(rising_steps),
                rising_stairs: whole("cycle_first_stair_count").unwrap_or(0),
                falling_stairs: whole("cycle_second_stair_count")
                    .or_else(|| whole("cycle_first_stair_count"))
                    .unwrap_or(0),
                decay_steps: whole("decay_step_size").unwrap_or(0),
                momentum: is_on("cycle_momentum").then(|| Momentum {
                    min: param("cycle_min_mom").unwrap_or(0.8),
                    max: param("cycle_max_mom").unwrap_or(0.9),
                    decay_rate: param("decay_mom_rate").unwrap_or(0.0),
                }),
            })
        }
        Some("LRRangeTest") => Schedule::LrRangeTest(LrRangeTest {
            min: param("lr_range_test_min_lr").unwrap_or(1e-3),
            step_size: whole("lr_range_test_step_size").unwrap_or(2000),
            step_rate: param("lr_range_test_step_rate").unwrap_or(1.0),
            staircase: is_on("lr_range_test_staircase"),
        }),
        _ => Schedule::HuggingFace(HuggingFace {
            shape: HuggingFaceShape::named(config.text("zeroth.lr_scheduler_type").unwrap_or("cosine"))
                .unwrap_or(HuggingFaceShape::Cosine),
            learning_rate,
            warmup_steps: warmup_steps(number(config, "zeroth.warmup_steps").unwrap_or(0.0), total_steps),
            total_steps,
        }),
    };
    schedule.check()?;
    Ok(schedule)
}
