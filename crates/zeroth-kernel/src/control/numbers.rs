//! The optimizers' scalars of one step.

use bytemuck::{Pod, Zeroable};

use super::Recipe;

/// The scalars of one step for one parameter group, computed in f64 and rounded once.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct StepNumbers {
    /// beta1.
    pub beta1: f32,
    /// 1 - beta1.
    pub beta1_rest: f32,
    /// beta2.
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
