//! The control kernel of the CPU. Every other device computes the same bits.

use crate::ExactSum;

use super::{Control, RATES, Recipe, Record, StepInput, StepNumbers};

/// The report of one rank.
#[derive(Clone, Copy)]
pub struct RankReport<'a> {
    /// The sum of every part of its loss.
    pub losses: &'a [f64],
    /// The sum of squares of every flat buffer.
    pub sums: &'a [ExactSum],
    /// One word per flat buffer: not 0 where the rank's own gradient was infinite or NaN.
    pub flags: &'a [u64],
    /// The counts of its routers.
    pub counts: &'a [u32],
}

/// Decides a step from the reports in rank order; writes the mean of every part of the loss to `losses`, the norm of every flat
/// buffer to `norms` and the sums of the ranks' counts to `counts`.
pub fn decide<'a>(
    recipe: &Recipe,
    input: &StepInput,
    reports: &(impl Iterator<Item = RankReport<'a>> + Clone),
    control: &mut Control,
    losses: &mut [f64],
    norms: &mut [f64],
    counts: &mut [u32],
) -> Record {
    for (place, sum) in counts.iter_mut().enumerate() {
        *sum = reports.clone().fold(0, |sum, report| sum.wrapping_add(report.counts[place]));
    }
    let scale = control.loss_scale;
    let is_lost = |report: &RankReport<'_>| report.losses.iter().any(|loss| !loss.is_finite());
    let lost_rank = reports.clone().position(|report| is_lost(&report));
    let mut loss = None;
    for (part, mean) in losses.iter_mut().enumerate() {
        let sum = reports.clone().fold(0.0, |sum, report| sum + report.losses[part]);
        *mean = sum * input.loss_means[part];
        let weighted = sum * input.loss_weights[part];
        loss = Some(loss.map_or(weighted, |loss: f64| loss + weighted));
    }
    let (mut all, mut nonfinite_sum, mut flagged) = (ExactSum::default(), None, None);
    for (flat, norm) in norms.iter_mut().enumerate() {
        let mut of_flat = ExactSum::default();
        for (rank, report) in reports.clone().enumerate() {
            of_flat.merge(&report.sums[flat]);
            if flagged.is_none() && report.flags[flat] != 0 {
                flagged = Some((flat, rank));
            }
        }
        all.merge(&of_flat);
        *norm = of_flat.total().map_or(f64::NAN, |total| total.sqrt() / scale);
        if nonfinite_sum.is_none() && norm.is_nan() {
            nonfinite_sum = Some(flat);
        }
    }
    let norm = all.total().map_or(f64::NAN, |total| total.sqrt() / scale);
    // The host keeps the window ahead; beyond its end the last rate holds.
    let place = control.applied.saturating_sub(input.first_rate).min(RATES as u64 - 1);
    let rate = input.rates[place as usize];
    let found_inf = flagged.is_some() || lost_rank.is_some() || !norm.is_finite();
    if found_inf {
        control.skipped += 1;
        control.halted |= u32::from(recipe.dynamic == 0 && control.skipped > recipe.tolerated);
    }
    if recipe.dynamic != 0 && control.halted == 0 {
        update_loss_scale(recipe, found_inf, control);
    }
    control.apply = u32::from(!found_inf && control.halted == 0);
    if control.apply != 0 {
        control.applied += 1;
        // PyTorch's clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        let clip = if recipe.max_norm > 0.0 { (recipe.max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
        for (group, numbers) in control.numbers.iter_mut().enumerate() {
            let unscale = (1.0 / scale) as f32;
            *numbers = StepNumbers::new(recipe, group, control.applied, rate, unscale, clip as f32);
        }
    }
    let number = |place: Option<usize>| place.map_or(-1, |place| place as i64);
    let (nonfinite_flat, nonfinite_rank) = match (flagged, lost_rank) {
        (Some((flat, rank)), _) => (flat as i64, rank as i64),
        (None, Some(rank)) => (-1, rank as i64),
        (None, None) => (number(nonfinite_sum), -1),
    };
    Record {
        loss: loss.unwrap_or(0.0),
        norm,
        rate,
        loss_scale: scale,
        applied: control.applied,
        skipped: control.skipped,
        nonfinite_flat,
        nonfinite_rank,
        apply: control.apply,
        halted: control.halted,
        at_min_scale: control.at_min_scale,
        found_inf: u32::from(found_inf),
    }
}

/// DeepSpeed's dynamic loss scaler, step for step. One difference: DeepSpeed unscales gradients with the updated scale, this
/// kernel with the one that backward used.
fn update_loss_scale(recipe: &Recipe, overflow: bool, control: &mut Control) {
    let all = u32::try_from(recipe.hysteresis).unwrap_or(u32::MAX);
    if overflow {
        if all <= 1 || control.hysteresis_left <= 1 {
            if control.loss_scale == recipe.min_scale {
                (control.halted, control.at_min_scale) = (1, 1);
                return;
            }
            control.loss_scale = (control.loss_scale / 2.0).max(recipe.min_scale);
        } else {
            control.hysteresis_left -= 1;
        }
        control.last_overflow = control.iteration as i64;
    } else {
        if recipe.consecutive_hysteresis != 0 {
            control.hysteresis_left = all;
        }
        let clean = control.iteration as i64 - control.last_overflow - 1;
        if clean > 0 && clean % (recipe.scale_window.max(1) as i64) == 0 {
            control.hysteresis_left = all;
            control.loss_scale *= 2.0;
        }
    }
    control.iteration += 1;
}
