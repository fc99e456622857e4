//! What a step's outcome decides: the gradient norm, the clip factor, whether the step counts, Adam's numbers.
//!
//! It is computed on the device by one small kernel, so that the host need not wait for it: the host uploads a
//! [`StepInput`] before a step and reads a [`Record`] some time after. The structs here are the layout in device memory,
//! the same for every device.

use bytemuck::{Pod, Zeroable};

use crate::cpu::{AdamW, ExactSum};

/// Learning rates that a step's input carries: the host may run ahead of what it knows about applied steps by this many.
pub const RATES: usize = 64;

/// Groups of parameters that the optimizer tells apart: decayed ones are group 0, the others group 1.
pub const GROUPS: usize = 2;

/// What a config says once.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Recipe {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of the weights, for each group.
    pub weight_decay: [f64; GROUPS],
    /// The largest gradient norm; 0: gradients are not clipped.
    pub max_norm: f64,
    /// Steps with a gradient that is not finite that may be skipped; after one more nothing is applied until the host
    /// says so.
    pub tolerated: u64,
}

/// What the host says before each step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct StepInput {
    /// 1 / trained tokens of the step, over all ranks and micro-batches.
    pub loss_weight: f64,
    /// The number of applied steps that `rates[0]` belongs to.
    pub first_rate: u64,
    /// Learning rates of the step after `first_rate` applied ones, and of the next ones.
    pub rates: [f64; RATES],
}

/// AdamW's numbers of one step for one group, each computed in f64 and rounded once.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct AdamNumbers {
    /// beta1.
    pub beta1: f32,
    /// 1 - beta1.
    pub beta1_rest: f32,
    /// beta2.
    pub beta2: f32,
    /// 1 - beta2.
    pub beta2_rest: f32,
    /// Added to the root.
    pub eps: f32,
    /// 1 - learning rate · weight decay.
    pub kept: f32,
    /// Learning rate / (1 - beta1^t).
    pub rate: f32,
    /// The root of 1 - beta2^t.
    pub root_correction: f32,
    /// 1 / loss scale: gradients are multiplied by this first.
    pub unscale: f32,
    /// Then by this.
    pub clip: f32,
}

/// What stays on the device from step to step, and what the last `control` decided.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Control {
    /// Steps whose update was applied.
    pub applied: u64,
    /// Steps that were skipped.
    pub skipped: u64,
    /// What losses are multiplied with in backward.
    pub loss_scale: f64,
    /// Not 0: no update is applied until the host clears it.
    pub halted: u32,
    /// Not 0: the update of this step is applied.
    pub apply: u32,
    /// The optimizer's numbers of this step.
    pub numbers: [AdamNumbers; GROUPS],
}

/// What a rank tells the others before `control`; its flats' exact sums of squares follow it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Report {
    /// The sum of the losses of its trained tokens.
    pub loss: f64,
}

/// What the host reads after a step; a norm for every flat follows it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Record {
    /// The mean loss over the step's trained tokens.
    pub loss: f64,
    /// The norm of all gradients, before clipping; NaN where one is not finite.
    pub norm: f64,
    /// The learning rate used.
    pub rate: f64,
    /// What losses were multiplied with.
    pub loss_scale: f64,
    /// Steps applied so far.
    pub applied: u64,
    /// Steps skipped so far.
    pub skipped: u64,
    /// The first flat whose gradient is not finite, or -1.
    pub broken_flat: i64,
    /// The first rank whose loss is not finite, or -1.
    pub broken_rank: i64,
    /// Not 0: this step's update was applied.
    pub apply: u32,
    /// Not 0: later ones are not applied.
    pub halted: u32,
}

impl Control {
    /// The state before the first step.
    pub fn new(loss_scale: f64) -> Self {
        Self { loss_scale, ..Self::zeroed() }
    }
}

impl AdamNumbers {
    fn new(recipe: &Recipe, group: usize, t: u64, rate: f64, unscale: f32, clip: f32) -> Self {
        let Recipe { beta1, beta2, eps, .. } = *recipe;
        AdamW { beta1, beta2, eps, weight_decay: recipe.weight_decay[group] }.step(t, rate, unscale, clip)
    }
}

/// Decides a step. `reports` gives each rank's report and sums, in rank order; `norms` receives the norm of each flat.
pub(crate) fn decide<'a>(
    recipe: &Recipe,
    input: &StepInput,
    reports: &(impl Iterator<Item = (&'a Report, &'a [ExactSum])> + Clone),
    control: &mut Control,
    norms: &mut [f64],
) -> Record {
    let scale = control.loss_scale;
    let (mut loss, mut broken_rank) = (0.0, -1);
    for (rank, (report, _)) in reports.clone().enumerate() {
        if broken_rank < 0 && !report.loss.is_finite() {
            broken_rank = rank as i64;
        }
        loss += report.loss;
    }
    let (mut all, mut broken_flat) = (ExactSum::default(), -1);
    for (flat, norm) in norms.iter_mut().enumerate() {
        let mut of_flat = ExactSum::default();
        reports.clone().for_each(|(_, sums)| of_flat.merge(&sums[flat]));
        all.merge(&of_flat);
        *norm = of_flat.total().map_or(f64::NAN, |total| total.sqrt() / scale);
        if broken_flat < 0 && norm.is_nan() {
            broken_flat = flat as i64;
        }
    }
    let norm = all.total().map_or(f64::NAN, |total| total.sqrt() / scale);
    // A later rate than the window holds is its last: the host keeps the window ahead.
    let place = control.applied.saturating_sub(input.first_rate).min(RATES as u64 - 1);
    let rate = input.rates[place as usize];
    let finite = norm.is_finite() && broken_rank < 0;
    if !finite {
        control.skipped += 1;
        control.halted |= u32::from(control.skipped > recipe.tolerated);
    }
    control.apply = u32::from(finite && control.halted == 0);
    if control.apply != 0 {
        control.applied += 1;
        // PyTorch's clip_grad_norm_: the norm is enlarged a little and the factor never above 1.
        let clip = if recipe.max_norm > 0.0 { (recipe.max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
        for (group, numbers) in control.numbers.iter_mut().enumerate() {
            let unscale = (1.0 / scale) as f32;
            *numbers = AdamNumbers::new(recipe, group, control.applied, rate, unscale, clip as f32);
        }
    }
    Record {
        loss: loss * input.loss_weight,
        norm,
        rate,
        loss_scale: scale,
        applied: control.applied,
        skipped: control.skipped,
        broken_flat,
        broken_rank,
        apply: control.apply,
        halted: control.halted,
    }
}
