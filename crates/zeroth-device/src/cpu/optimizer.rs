//! AdamW, written op by op: every rounding below is meant, and a device that follows it gets the same bits.

use crate::AdamNumbers;

use super::check_len;
use super::cut::Chunks;
use super::element::Element;
use super::path::each_path;
use super::pool::Pool;

/// Elements that one task updates.
const PIECE: usize = 8192;

/// The settings of AdamW, as a config gives them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of the weights.
    pub weight_decay: f64,
}

impl AdamW {
    /// The numbers of applied step `step`, counted from 1.
    ///
    /// A gradient is first multiplied by `unscale` (1 / loss scale), then by `clip`.
    pub fn step(&self, step: u64, learning_rate: f64, unscale: f32, clip: f32) -> AdamNumbers {
        AdamNumbers {
            beta1: self.beta1 as f32,
            beta1_rest: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            beta2_rest: (1.0 - self.beta2) as f32,
            eps: self.eps as f32,
            kept: (1.0 - learning_rate * self.weight_decay) as f32,
            rate: (learning_rate / (1.0 - power(self.beta1, step))) as f32,
            root_correction: (1.0 - power(self.beta2, step)).sqrt() as f32,
            unscale,
            clip,
        }
    }
}

/// By squaring, so that it does not depend on a library.
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

/// One step over a piece of a flat: f32 master weights and moments in place, and the weights as stored for compute.
///
/// `weights` is `None` where the master weights are the ones computed with (f32 training).
pub fn adamw<G: Element, T: Element>(
    pool: &Pool,
    step: AdamNumbers,
    grads: &[G],
    master: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    weights: Option<&mut [T]>,
) {
    let elements = grads.len();
    check_len("master", master.len(), elements);
    check_len("first", first.len(), elements);
    check_len("second", second.len(), elements);
    let state = (Chunks::new(master, PIECE), Chunks::new(first, PIECE), Chunks::new(second, PIECE));
    let grads = |task: usize, count: usize| &grads[task * PIECE..][..count];
    if let Some(weights) = weights {
        check_len("weights", weights.len(), elements);
        pool.each((state, Chunks::new(weights, PIECE)), |task, ((master, first, second), weights)| {
            update(pool.path(), step, grads(task, master.len()), master, first, second);
            super::convert::convert_piece(pool.path(), master, weights);
        });
    } else {
        pool.each(state, |task, (master, first, second)| {
            update(pool.path(), step, grads(task, master.len()), master, first, second);
        });
    }
}

each_path! {
    fn update<G>(s: AdamNumbers, grads: &[G], master: &mut [f32], first: &mut [f32], second: &mut [f32]) {
        for (((grad, p), m), v) in grads.iter().zip(master).zip(first).zip(second) {
            let g = grad.to_f32() * s.unscale * s.clip;
            *m = s.beta1.mul_add(*m, s.beta1_rest * g);
            *v = s.beta2.mul_add(*v, s.beta2_rest * (g * g));
            let denominator = v.sqrt() / s.root_correction + s.eps;
            *p = (-s.rate).mul_add(*m / denominator, *p * s.kept);
        }
    }
}
