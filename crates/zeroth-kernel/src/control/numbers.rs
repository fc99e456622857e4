//! The optimizers' scalars of one step.

use bytemuck::{Pod, Zeroable};

use super::Recipe;

/// The scalars of one step for one parameter group, computed in f64 and rounded once.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[allow(missing_docs, reason = "the names say it")]
pub struct StepNumbers {
    pub beta1: f32,
    /// 1 - beta1.
    pub beta1_rest: f32,
    pub beta2: f32,
    /// 1 - beta2.
    pub beta2_rest: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Learning rate · weight decay, for decoupled decay. Not stored as 1 - this, which would lose most of its bits in f32.
    pub decay_rate: f32,
    /// Weight decay, for optimizers that add it to the gradient.
    pub decay: f32,
    /// The learning rate.
    pub rate: f32,
    /// Adam's: learning rate / (1 - beta1^t).
    pub adam_rate: f32,
    /// √(1 - beta2^t).
    pub root_correction: f32,
    /// Adagrad's: learning rate / (1 + (t - 1) · lr_decay).
    pub adagrad_rate: f32,
    /// Decay of AdEMAMix's slow average in this step.
    pub beta3: f32,
    /// 1 - this.
    pub beta3_rest: f32,
    /// AdEMAMix's: learning rate · weight of the slow average.
    pub slow_rate: f32,
    /// SGD's momentum; 0: none.
    pub momentum: f32,
    /// Factor of the momentum buffer in this step; 0 in the first.
    pub velocity: f32,
    /// Factor of the gradient that is added to it; 1 in the first.
    pub velocity_rest: f32,
    /// Not 0: Nesterov momentum.
    pub nesterov: u32,
    /// 1 / loss scale: gradients are multiplied by this first.
    pub unscale: f32,
    /// The clip factor: gradients are multiplied by this second.
    pub clip: f32,
}

impl StepNumbers {
    /// The scalars of applied step `t`, from 1.
    ///
    /// A gradient is first multiplied by `unscale` (1 / loss scale), then by `clip`.
    pub fn new(recipe: &Recipe, group: usize, t: u64, rate: f64, unscale: f32, clip: f32) -> Self {
        let Recipe { beta1, beta2, eps, momentum, dampening, lr_decay, .. } = *recipe;
        let decay = recipe.weight_decay[group];
        let correction = |beta| if recipe.bias_correction == 0 { 1.0 } else { 1.0 - power(beta, t) };
        let (velocity, velocity_rest) = if t <= 1 { (0.0, 1.0) } else { (momentum, 1.0 - dampening) };
        let beta3 = scheduled_beta3(recipe, t);
        Self {
            beta1: beta1 as f32,
            beta1_rest: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            beta2_rest: (1.0 - beta2) as f32,
            eps: eps as f32,
            decay_rate: (rate * decay) as f32,
            decay: decay as f32,
            rate: rate as f32,
            adam_rate: (rate / correction(beta1)) as f32,
            root_correction: correction(beta2).sqrt() as f32,
            adagrad_rate: (rate / (1.0 + t.saturating_sub(1) as f64 * lr_decay)) as f32,
            beta3: beta3 as f32,
            beta3_rest: (1.0 - beta3) as f32,
            slow_rate: (rate * scheduled_alpha(recipe, t)) as f32,
            momentum: momentum as f32,
            velocity: velocity as f32,
            velocity_rest: velocity_rest as f32,
            nesterov: recipe.nesterov,
            unscale,
            clip,
        }
    }
}

/// By squaring, so that the bits do not depend on the system's math library.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            result *= base;
        }
        base *= base;
        exponent /= 2;
    }
    result
}

/// AdEMAMix's weight of the slow average in step `t`: it rises linearly from 0 over `t_alpha` steps.
fn scheduled_alpha(recipe: &Recipe, t: u64) -> f64 {
    if t >= recipe.t_alpha { recipe.alpha } else { t as f64 * recipe.alpha / recipe.t_alpha as f64 }
}

/// AdEMAMix's beta3 in step `t`: its half-life rises linearly from that of `beta1` over `t_beta3` steps. 1 / ln(beta) is
/// interpolated, divided by 1 / ln(beta3) so that a `beta1` of 0 needs no case of its own.
fn scheduled_beta3(recipe: &Recipe, t: u64) -> f64 {
    let Recipe { beta1, beta3, t_beta3, .. } = *recipe;
    if t >= t_beta3 || beta3 <= beta1 {
        return beta3;
    }
    let (done, ln_beta3) = (t as f64 / t_beta3 as f64, logarithm(beta3));
    exponential(ln_beta3 / ((1.0 - done) * (ln_beta3 / logarithm(beta1)) + done))
}

/// ln(x) for 0 <= x < 1, by operations that round alike everywhere: square roots bring x near 1, then the series of
/// -2 artanh((1 - x) / (1 + x)).
fn logarithm(mut x: f64) -> f64 {
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    let mut factor = -2.0;
    while x < 0.9 {
        x = x.sqrt();
        factor *= 2.0;
    }
    let z = (1.0 - x) / (1.0 + x);
    let mut sum = 0.0;
    for k in (0..9).rev() {
        sum = sum * (z * z) + 1.0 / f64::from(2 * k + 1);
    }
    factor * (z * sum)
}

/// e^x for x <= 0, by operations that round alike everywhere: halved until it is small, then the series, squared as often.
fn exponential(mut x: f64) -> f64 {
    if x < -700.0 {
        return 0.0;
    }
    let mut halvings = 0;
    while x < -0.0625 {
        x *= 0.5;
        halvings += 1;
    }
    let mut power = 1.0;
    for k in (1..=10).rev() {
        power = 1.0 + x * power / f64::from(k);
    }
    for _ in 0..halvings {
        power *= power;
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_exponential_are_those_of_the_standard_library() {
        for x in [1e-300, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999, 1.0 - f64::EPSILON] {
            assert!((logarithm(x) / x.ln() - 1.0).abs() < 1e-13, "{x}");
        }
        for x in [-690.0, -20.0, -1.0, -0.1, -0.0625, -1e-4, -1e-9, 0.0f64] {
            assert!((exponential(x) / x.exp() - 1.0).abs() < 1e-12, "{x}");
        }
        assert_eq!((logarithm(0.0), exponential(f64::NEG_INFINITY)), (f64::NEG_INFINITY, 0.0));
    }

    #[test]
    fn beta3_and_alpha_follow_the_schedules_of_the_paper() {
        let recipe = Recipe { t_alpha: 50, t_beta3: 200, ..Recipe::default() };
        for t in 1..300 {
            let (done, ln1, ln3) = (t as f64 / 200.0, 0.9f64.ln(), 0.9999f64.ln());
            let expected = (ln1 * ln3 / ((1.0 - done) * ln3 + done * ln1)).exp().min(0.9999);
            assert!((scheduled_beta3(&recipe, t) - expected).abs() < 1e-14, "{t}");
            assert_eq!(scheduled_alpha(&recipe, t), (t as f64 * 5.0 / 50.0).min(5.0));
        }
        // Extremes stay in range.
        for (beta1, beta3) in [(0.0, 0.9999), (0.0, 0.0), (0.9999, 0.9), (0.9, 0.9)] {
            let recipe = Recipe { beta1, beta3, t_beta3: 10, ..Recipe::default() };
            assert!((0..12).all(|t| (0.0..=beta3).contains(&scheduled_beta3(&recipe, t))), "{beta1} {beta3}");
        }
    }
}
