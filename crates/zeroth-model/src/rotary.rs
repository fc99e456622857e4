//! Rotary frequencies from a model's `rope` settings, as transformers computes them, in f64.

use std::f64::consts::TAU;

use zeroth_graph::{DynamicScaling, Rotary};

use crate::{Rope, RopeScaling};

/// The angles for heads of `head_dim`. `max_positions` is what the model was made for: only dynamic scaling depends on
/// it, and does nothing where it is not known.
pub(crate) fn rotary(rope: &Rope, head_dim: u64, max_positions: Option<u64>) -> Rotary {
    let dim = head_dim as f64;
    let pairs = (head_dim / 2) as usize;
    let plain = |theta: f64| (0..pairs).map(move |i| theta.powf(-2.0 * i as f64 / dim));
    let (frequencies, scale): (Vec<f64>, f64) = match rope.scaling {
        RopeScaling::Default | RopeScaling::Dynamic { .. } => (plain(rope.theta).collect(), 1.0),
        RopeScaling::Linear { factor } => (plain(rope.theta).map(|f| f / factor).collect(), 1.0),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            let blend = |frequency: f64| {
                // Turns within the original length: many are left alone, few are divided.
                let turns = original_max_positions as f64 * frequency / TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            };
            (plain(rope.theta).map(blend).collect(), 1.0)
        }
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            attention_factor,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            truncate,
        } => {
            // The dimension that turns so often within the original length.
            let turning = |turns: f64| {
                dim * (original_max_positions as f64 / (turns * TAU)).ln() / (2.0 * rope.theta.ln())
            };
            let (low, high) = (turning(beta_fast), turning(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, high) = (low.max(0.0), high.min(dim - 1.0));
            // An empty range would divide by zero.
            let width = if high == low { 0.001 } else { high - low };
            let blend = |(i, frequency): (usize, f64)| {
                let divided = ((i as f64 - low) / width).clamp(0.0, 1.0);
                divided * frequency / factor + (1.0 - divided) * frequency
            };
            let magnitude = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
            let derived = match (mscale, mscale_all_dim) {
                (Some(one), Some(all)) if one != 0.0 && all != 0.0 => magnitude(one) / magnitude(all),
                _ => magnitude(1.0),
            };
            (plain(rope.theta).enumerate().map(blend).collect(), attention_factor.unwrap_or(derived))
        }
    };
    let stretch = match (&rope.scaling, max_positions) {
        (RopeScaling::Dynamic { factor }, Some(max_positions)) => {
            Some(DynamicScaling { theta: rope.theta, factor: *factor, max_positions })
        }
        _ => None,
    };
    Rotary { frequencies, scale, dynamic: stretch }
}
