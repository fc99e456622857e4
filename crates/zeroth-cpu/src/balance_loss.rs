//! The load-balancing loss of a mixture of experts, as transformers computes it jointly over layers: experts · Σ f · P, f the
//! share of slots and P the mean probability of each expert.

use super::check_len;
use super::launch::cpu_kernel;
use zeroth_kernel::BalanceDims;
use zeroth_kernel::Control;

/// The trained tokens, and by what sums over layers and rows are divided; `None` where no row is routed.
fn counts(dims: BalanceDims, starts: &[u32], labels: &[i32]) -> Option<(f64, f64)> {
    check_len("labels", labels.len(), dims.rows);
    let routed = dims.rows.min(starts.last().map_or(0, |end| *end as usize));
    let trained = labels.iter().filter(|label| **label >= 0).count();
    (routed > 0).then_some((trained as f64, (dims.layers * routed) as f64))
}

/// The loss times the number of trained tokens. `balance` is `[2, experts]`: see [`super::BalanceSlices`].
pub fn balance_loss(dims: BalanceDims, starts: &[u32], balance: &[f32], labels: &[i32]) -> f64 {
    check_len("balance", balance.len(), 2 * dims.experts);
    let Some((trained, total)) = counts(dims, starts, labels) else { return 0.0 };
    let (slots, sums) = balance.split_at(dims.experts);
    let share = |(slots, sum): (&f32, &f32)| f64::from(*slots) / total * (f64::from(*sum) / total);
    trained * dims.experts as f64 * slots.iter().zip(sums).map(share).sum::<f64>()
}

/// [`balance_loss`], and its gradient times `scale` in `slopes` `[2, experts]`: zeros for the slots, which have none, then that
/// of each summed probability.
pub fn balance_loss_backward(
    dims: BalanceDims,
    starts: &[u32],
    balance: &[f32],
    labels: &[i32],
    scale: f64,
    slopes: &mut [f32],
) -> f64 {
    check_len("slopes", slopes.len(), 2 * dims.experts);
    let loss = balance_loss(dims, starts, balance, labels);
    slopes.fill(0.0);
    if let Some((trained, total)) = counts(dims, starts, labels) {
        for (slope, slots) in slopes[dims.experts..].iter_mut().zip(balance) {
            let share = f64::from(*slots) / total;
            *slope = (trained * dims.experts as f64 * share / total * scale) as f32;
        }
    }
    loss
}

cpu_kernel!(BalanceLoss { dims, starts, balance, labels, loss }, |_| 0, |cx| {
    let (starts, labels) = (cx.starts(starts)?, cx.read(labels)?);
    let sum = balance_loss(dims, starts, cx.read(balance)?, labels);
    *cx.write_one::<f64>(loss)? += sum;
});

cpu_kernel!(
    BalanceLossBackward { dims, starts, balance, labels, loss, loss_weight, control, slopes },
    |_| 0,
    |cx| {
        let weight = cx.read_one::<f64>(loss_weight)?;
        let scale = weight * cx.read_one::<Control>(control)?.loss_scale;
        let (starts, balance, labels) = (cx.starts(starts)?, cx.read(balance)?, cx.read(labels)?);
        let sum = balance_loss_backward(dims, starts, balance, labels, scale, cx.write(slopes)?);
        *cx.write_one::<f64>(loss)? += sum;
    }
);
