//! Step control on the device: gradient norm, clip factor, whether the update is applied, loss scale, optimizer scalars.
//!
//! One small kernel computes them, so that the host does not wait: it uploads a [`StepInput`] before a step and reads a
//! [`Record`] later. The structs here are the layout in device memory, the same on every device.

mod decide;
mod numbers;

use bytemuck::{Pod, Zeroable};

use crate::{ExactSum, Moment, Optimizer};
pub use decide::{RankReport, decide};
pub use numbers::StepNumbers;

/// Learning rates in a step's input: the host may run ahead of its knowledge of applied steps by this many.
pub const RATES: usize = 64;

/// The most parts that a step's loss may have.
pub const LOSSES: usize = 4;

/// Parameter groups: 0 has weight decay, 1 has not.
pub const GROUPS: usize = 2;

/// Hyperparameters of optimizer, clipping and loss scaling, constant over a run.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Recipe {
    /// Decay of the first moment (Adam, AdamW, AdEMAMix, Lion).
    pub beta1: f64,
    /// Decay of the second moment (Adam, AdamW, AdEMAMix), or of Lion's moment.
    pub beta2: f64,
    /// Added to the root of the second moment (Adam, AdamW, AdEMAMix, Adagrad).
    pub eps: f64,
    /// Weight decay of each parameter group.
    pub weight_decay: [f64; GROUPS],
    /// The gradient norm to clip to; 0 disables clipping.
    pub max_norm: f64,
    /// Momentum (SGD); 0 disables it.
    pub momentum: f64,
    /// Dampening of the momentum (SGD).
    pub dampening: f64,
    /// Learning-rate decay (Adagrad): the rate is divided by 1 + `lr_decay` · previous steps.
    pub lr_decay: f64,
    /// Initial sum of squares (Adagrad).
    pub initial_accumulator: f64,
    /// Decay of the slow average (AdEMAMix).
    pub beta3: f64,
    /// Weight of the slow average (AdEMAMix).
    pub alpha: f64,
    /// The loss scale, or the initial one where it is dynamic.
    pub loss_scale: f64,
    /// The least dynamic loss scale; an overflow at it halts training.
    pub min_scale: f64,
    /// Steps over which `alpha` rises from 0 (AdEMAMix); 0: none.
    pub t_alpha: u64,
    /// Steps over which the decay of the slow average rises from `beta1` to `beta3` (AdEMAMix); 0: none.
    pub t_beta3: u64,
    /// A dynamic loss scale doubles after this many steps without overflow.
    pub scale_window: u64,
    /// Overflows before a dynamic loss scale halves.
    pub hysteresis: u64,
    /// Steps with infinite or NaN gradients that may be skipped; one more halts until the host resumes. Overflows of a dynamic
    /// loss scale do not count.
    pub tolerated: u64,
    /// Not 0: the loss scale is dynamic.
    pub dynamic: u32,
    /// Not 0: a step without overflow resets `hysteresis`; else only a doubling does.
    pub consecutive_hysteresis: u32,
    /// Not 0: Nesterov momentum (SGD).
    pub nesterov: u32,
    /// Not 0: bias correction of the moments (Adam, AdamW, AdEMAMix).
    pub bias_correction: u32,
}

impl Default for Recipe {
    /// PyTorch's defaults of Adam and the paper's of AdEMAMix, without clipping or loss scaling; the dynamic loss scale has
    /// DeepSpeed's defaults and is off.
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
            beta3: 0.9999,
            alpha: 5.0,
            loss_scale: 1.0,
            min_scale: 1.0,
            t_alpha: 0,
            t_beta3: 0,
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

/// The host's input to a step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct StepInput {
    /// What turns the sum of each part of the loss, over all ranks and micro-batches, into the mean that the record shows:
    /// 1 / (tokens with a label).
    pub loss_means: [f64; LOSSES],
    /// The factor of each part's sum in the loss that is trained: its mean's, times the weight of the part.
    pub loss_weights: [f64; LOSSES],
    /// The number of applied steps at which `rates[0]` is used.
    pub first_rate: u64,
    /// Learning rates of this and the following applied steps.
    pub rates: [f64; RATES],
}

/// Control state on the device, and the decisions for the current step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Control {
    /// Applied steps.
    pub applied: u64,
    /// Skipped steps.
    pub skipped: u64,
    /// The loss scale of the next backward.
    pub loss_scale: f64,
    /// Steps seen by the dynamic loss scale.
    pub iteration: u64,
    /// The last step that overflowed, or -1.
    pub last_overflow: i64,
    /// Overflows left before the loss scale halves.
    pub hysteresis_left: u32,
    /// Not 0: no update is applied until the host clears it.
    pub halted: u32,
    /// Not 0: halted by an overflow at the least loss scale.
    pub at_min_scale: u32,
    /// Not 0: the update of this step is applied.
    pub apply: u32,
    /// The optimizer's scalars of this step, per parameter group.
    pub numbers: [StepNumbers; GROUPS],
}

/// The layout of a rank's report to all ranks before the control kernel: the sum of every part of its loss (f64), its exact sum
/// of squares of every flat buffer, one u64 per flat buffer that is not 0 where the rank's own gradient was infinite or NaN, and
/// the counts of its routers (u32): see [`Kernel::CountTokens`](crate::Kernel::CountTokens).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportLayout {
    /// Parts of the loss, at most [`LOSSES`].
    pub losses: usize,
    /// Flat buffers.
    pub flats: usize,
    /// Counts of all routers.
    pub counts: usize,
}

impl ReportLayout {
    /// The first byte of a part of the loss.
    pub const fn loss(self, part: usize) -> usize {
        8 * part
    }

    /// The first byte of a flat buffer's exact sum.
    pub const fn sum(self, flat: usize) -> usize {
        self.loss(self.losses) + flat * size_of::<ExactSum>()
    }

    /// The first byte of a flat buffer's flag.
    pub const fn flag(self, flat: usize) -> usize {
        self.sum(self.flats) + 8 * flat
    }

    /// The first byte of a count.
    pub const fn count(self, count: usize) -> usize {
        self.flag(self.flats) + 4 * count
    }

    /// Bytes of a report, whole words of 8.
    pub const fn bytes(self) -> usize {
        self.count(self.counts).next_multiple_of(8)
    }

    /// The first byte of the counts in the step's record: after a [`Record`], every part of the loss and the norm of every flat
    /// buffer (f64).
    pub const fn recorded_counts(self) -> usize {
        size_of::<Record>() + 8 * (self.losses + self.flats)
    }

    /// Bytes of the step's record, whole words of 8.
    pub const fn record_bytes(self) -> usize {
        (self.recorded_counts() + 4 * self.counts).next_multiple_of(8)
    }
}

/// The outcome of a step, for the host; followed by the mean of every part of the loss, the norm of every flat buffer and the
/// sum over ranks of every count.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Record {
    /// The loss: the sum of its parts, each the mean over the step's tokens with a label times its weight.
    pub loss: f64,
    /// The gradient norm before clipping; NaN where a gradient is infinite or NaN.
    pub norm: f64,
    /// The learning rate used.
    pub rate: f64,
    /// The loss scale of this step.
    pub loss_scale: f64,
    /// Steps applied so far.
    pub applied: u64,
    /// Steps skipped so far.
    pub skipped: u64,
    /// The first flat buffer with an infinite or NaN gradient, or -1. `nonfinite_rank` is -1 where only the sum over ranks
    /// overflowed.
    pub nonfinite_flat: i64,
    /// The rank with the infinite or NaN gradient; else the first with such a loss; or -1.
    pub nonfinite_rank: i64,
    /// Not 0: this step's update was applied.
    pub apply: u32,
    /// Not 0: no later update is applied.
    pub halted: u32,
    /// Not 0: halted by an overflow at the least loss scale.
    pub at_min_scale: u32,
    /// Not 0: a gradient or a loss of this step was infinite or NaN.
    pub found_inf: u32,
}

impl Recipe {
    /// The initial value of an optimizer's moment.
    pub const fn initial(&self, optimizer: Optimizer, moment: Moment) -> f32 {
        match (optimizer, moment) {
            (Optimizer::Adagrad, Moment::Second) => self.initial_accumulator as f32,
            _ => 0.0,
        }
    }
}

impl Control {
    /// The state before the first step, with a constant loss scale.
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
