//! What a step's outcome decides: the gradient norm, the clip factor, whether the step counts, the loss scale, the
//! optimizer's numbers.
//!
//! It is computed on the device by one small kernel, so that the host need not wait for it: the host uploads a
//! [`StepInput`] before a step and reads a [`Record`] some time after. The structs here are the layout in device memory,
//! the same for every device.

mod decide;
mod numbers;

use bytemuck::{Pod, Zeroable};

pub use decide::{RankReport, decide};
pub use numbers::StepNumbers;

/// Learning rates that a step's input carries: the host may run ahead of what it knows about applied steps by this many.
pub const RATES: usize = 64;

/// Groups of parameters that the optimizer tells apart: decayed ones are group 0, the others group 1.
pub const GROUPS: usize = 2;

/// What a config says once. An optimizer reads what it knows and no more.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Recipe {
    /// How much of the first moment stays (Adam, AdamW, Lion).
    pub beta1: f64,
    /// How much of the second moment stays (Adam, AdamW); for Lion, of its one moment.
    pub beta2: f64,
    /// Added to the root of the second moment (Adam, AdamW, Adagrad).
    pub eps: f64,
    /// Decay of the weights, for each group.
    pub weight_decay: [f64; GROUPS],
    /// The largest gradient norm; 0: gradients are not clipped.
    pub max_norm: f64,
    /// How much of the velocity stays (SGD); 0: there is none.
    pub momentum: f64,
    /// How much of the newest gradient the velocity does not take (SGD).
    pub dampening: f64,
    /// How fast the learning rate falls (Adagrad): it is divided by 1 + this · steps before.
    pub lr_decay: f64,
    /// What the sum of squares starts with (Adagrad).
    pub initial_accumulator: f64,
    /// What losses are multiplied with in backward: always, or at the start where it moves.
    pub loss_scale: f64,
    /// A moving loss scale does not fall below this; an overflow there halts.
    pub min_scale: f64,
    /// A moving loss scale doubles after this many clean steps.
    pub scale_window: u64,
    /// A moving loss scale halves at this many overflows, not before.
    pub hysteresis: u64,
    /// Steps with a gradient that is not finite that may be skipped; after one more nothing is applied until the host
    /// says so. Overflows of a moving loss scale do not count.
    pub tolerated: u64,
    /// Not 0: the loss scale moves.
    pub dynamic: u32,
    /// Not 0: a clean step gives all of `hysteresis` back; else only a doubling does.
    pub consecutive_hysteresis: u32,
    /// Not 0: looks ahead along the velocity (SGD).
    pub nesterov: u32,
    /// Not 0: moments are corrected for starting at zero (Adam, AdamW).
    pub bias_correction: u32,
}

impl Default for Recipe {
    /// The defaults of PyTorch's Adam, nothing clipped, nothing scaled, nothing tolerated; what moves a loss scale is
    /// DeepSpeed's default, and off.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: [0.0; GROUPS],
            max_norm: 0.0,
            momentum: 0.0,
            dampening: 0.0,
            lr_decay: 0.0,
            initial_accumulator: 0.0,
            loss_scale: 1.0,
            min_scale: 1.0,
            scale_window: 1000,
            hysteresis: 2,
            tolerated: 0,
            dynamic: 0,
            consecutive_hysteresis: 0,
            nesterov: 0,
            bias_correction: 1,
        }
    }
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

/// What stays on the device from step to step, and what the last `control` decided.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Control {
    /// Steps whose update was applied.
    pub applied: u64,
    /// Steps that were skipped.
    pub skipped: u64,
    /// What losses are multiplied with in the next backward.
    pub loss_scale: f64,
    /// Steps that a moving loss scale has seen.
    pub iteration: u64,
    /// The last of them that overflowed, or -1.
    pub last_overflow: i64,
    /// A moving loss scale halves at the overflow that finds 1 here.
    pub hysteresis_left: u32,
    /// Not 0: no update is applied until the host clears it.
    pub halted: u32,
    /// Not 0: halted because the loss scale can fall no further.
    pub at_min_scale: u32,
    /// Not 0: the update of this step is applied.
    pub apply: u32,
    /// The optimizer's numbers of this step.
    pub numbers: [StepNumbers; GROUPS],
}

/// What a rank tells the others before `control`. Its flats' exact sums of squares follow it, and then a u64 a flat: not 0
/// where its own gradient of that flat was not finite.
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
    /// What losses were multiplied with in this step.
    pub loss_scale: f64,
    /// Steps applied so far.
    pub applied: u64,
    /// Steps skipped so far.
    pub skipped: u64,
    /// The first flat whose gradient is not finite, or -1: with `nonfinite_rank` where a rank's own gradient was not, without
    /// where only the sum over ranks is not.
    pub nonfinite_flat: i64,
    /// The rank whose gradient of `nonfinite_flat` is not finite; without one, the first rank whose loss is not; or -1.
    pub nonfinite_rank: i64,
    /// Not 0: this step's update was applied.
    pub apply: u32,
    /// Not 0: later ones are not applied.
    pub halted: u32,
    /// Not 0: halted because an overflow met the smallest loss scale.
    pub at_min_scale: u32,
    /// Not 0: a gradient or a loss of this step was not finite.
    pub found_inf: u32,
}

impl Control {
    /// The state before the first step, with a loss scale that stays.
    pub fn new(loss_scale: f64) -> Self {
        Self { loss_scale, last_overflow: -1, ..Self::zeroed() }
    }

    /// The state before the first step of a recipe.
    pub fn start(recipe: &Recipe) -> Self {
        Self {
            hysteresis_left: u32::try_from(recipe.hysteresis).unwrap_or(u32::MAX),
            ..Self::new(recipe.loss_scale)
        }
    }
}
