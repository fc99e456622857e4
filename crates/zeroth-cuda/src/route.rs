//! Routing of tokens to experts, and the loss that balances them.

use std::mem::offset_of;

use super::attention::starts_of;
use super::driver::Address;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, THREADS, WARP};
use zeroth_kernel::{Balance, BalanceDims, Control, DeviceError, RouteDims, Span};

/// Threads of the kernel that scans the segments (`SCAN_THREADS` in route.cu).
const SCAN_THREADS: u32 = 1024;
/// Fewest slots of a segment of the sort, and most segments (`BATCHES` in route.cu).
const SEGMENT: usize = 256;
const MAX_SEGMENTS: usize = 512;
/// Fewest rows of a partial sum of probabilities, and most partial sums.
const CHUNK: usize = 32;
const MAX_CHUNKS: usize = 512;
/// Most experts: the sort has a counter of each, and one of padding, in 48 KiB of shared memory.
const MAX_EXPERTS: usize = 12_287;

/// Parts of at least `least` items, a multiple of it, and at most `most` of them: items per part, and parts.
fn partition(items: usize, least: usize, most: usize) -> (usize, usize) {
    let part = items.div_ceil(most).next_multiple_of(least).max(least);
    (part, items.div_ceil(part))
}

/// Bytes of scratch: counters of the sort, statistics of the softmax of each row, and partial sums of probabilities.
pub(super) fn scratch(dims: RouteDims, balance: bool) -> [u64; 3] {
    let (_, segments) = partition(dims.slots(), SEGMENT, MAX_SEGMENTS);
    let (_, chunks) = partition(dims.rows, CHUNK, MAX_CHUNKS);
    let counts = 4 * (segments * (dims.experts + 1)) as u64;
    if balance { [counts, 8 * dims.rows as u64, 4 * (chunks * dims.experts) as u64] } else { [counts, 0, 0] }
}

fn optional_starts(cx: &LaunchContext, starts: Option<Span>) -> Result<[u64; 2], DeviceError> {
    starts.map_or(Ok([0; 2]), |starts| starts_of(cx, starts))
}

fn check(cx: &LaunchContext, dims: RouteDims) -> Result<(), DeviceError> {
    let RouteDims { experts, k, .. } = dims;
    if k == 0 || k > experts || experts > MAX_EXPERTS {
        let problem = format!("{k} of {experts} experts; a GPU routes to 1 or more of at most {MAX_EXPERTS}");
        return Err(cx.invalid(problem));
    }
    if dims.slots() > i32::MAX as usize {
        return Err(cx.invalid(format!("{} rows of {k} experts; slots are numbered in i32", dims.rows)));
    }
    Ok(())
}

/// The results of a route: experts, weights, order, places and offsets.
pub(super) fn forward(
    cx: &mut LaunchContext,
    dims: RouteDims,
    starts: Option<Span>,
    logits: Span,
    [experts, weights, order, places, offsets]: [Span; 5],
    balance: Option<Balance>,
) -> Result<(), DeviceError> {
    check(cx, dims)?;
    let RouteDims { rows, experts: count, k, normalized, row_stride } = dims;
    let (slots, bins) = (dims.slots(), count + 1);
    let [starts, capacity] = optional_starts(cx, starts)?;
    let logits = cx.typed("logits", logits, rows * row_stride)?;
    let (experts, weights) = (cx.words("experts", experts, slots)?, cx.words("weights", weights, slots)?);
    let (order, places) = (cx.words("order", order, slots)?, cx.words("places", places, slots)?);
    let offsets = cx.words("offsets", offsets, bins)?;
    let [counts_bytes, statistics_bytes, partials_bytes] = scratch(dims, balance.is_some());
    let counts = cx.scratch.take(counts_bytes)?;
    let statistics = if balance.is_some() { cx.scratch.take(statistics_bytes)? } else { 0 };
    let arguments = [
        starts,
        capacity,
        logits,
        rows as u64,
        count as u64,
        k as u64,
        u64::from(normalized),
        row_stride as u64,
        experts,
        weights,
        statistics,
    ];
    cx.run_rowwise(EntryPoint::Route, rows, &arguments)?;
    let (segment, segments) = partition(slots, SEGMENT, MAX_SEGMENTS);
    let (shared, grid) = (4 * bins as u32, [segments, 1, 1]);
    let of = |entry| cx.modules.get(entry, &[]);
    let [slots, bins, segment] = [slots, bins, segment].map(|number| number as u64);
    cx.launch(of(EntryPoint::RouteCount), grid, WARP, shared, &[experts, slots, bins, segment, counts])?;
    let arguments = [counts, segments as u64, bins, offsets];
    cx.launch(of(EntryPoint::RouteScan), [1; 3], SCAN_THREADS, shared, &arguments)?;
    let arguments = [experts, slots, bins, segment, counts, offsets, order, places];
    cx.launch(of(EntryPoint::RoutePlace), grid, WARP, shared, &arguments)?;
    let Some(balance) = balance else { return Ok(()) };
    let before = balance.before.map(|before| cx.words("balance", before, 2 * count)).transpose()?;
    let after = cx.words("balance", balance.after, 2 * count)?;
    let partials = cx.scratch.take(partials_bytes)?;
    let (chunk, chunks) = partition(rows, CHUNK, MAX_CHUNKS);
    let (rows, row_stride, count) = (rows as u64, row_stride as u64, count as u64);
    let arguments = [starts, capacity, logits, statistics, rows, count, row_stride, chunk as u64, partials];
    cx.run(EntryPoint::RouteProbabilities, &[cx.dtype], [chunks, 1, 1], THREADS / 2, &arguments)?;
    let arguments = [partials, chunks as u64, offsets, count, before.unwrap_or(0), after];
    cx.run_elementwise(EntryPoint::RouteBalance, &[], dims.experts, &arguments)
}

/// The gradients that a route passes on, either of which may be absent.
pub(super) struct RouteGradients {
    pub(super) dweights: Option<Span>,
    pub(super) slopes: Option<Span>,
}

pub(super) fn backward(
    cx: &LaunchContext,
    dims: RouteDims,
    starts: Option<Span>,
    [logits, experts, weights]: [Span; 3],
    gradients: &RouteGradients,
    dlogits: Span,
) -> Result<(), DeviceError> {
    check(cx, dims)?;
    let RouteDims { rows, experts: count, k, normalized, row_stride } = dims;
    let slots = dims.slots();
    let [starts, capacity] = optional_starts(cx, starts)?;
    let words =
        |name, span: Option<Span>, elements| span.map_or(Ok(0), |span| cx.words(name, span, elements));
    let slopes = match words("slopes", gradients.slopes, 2 * count)? {
        0 => 0,
        // The second row.
        at => at + 4 * count as Address,
    };
    let arguments = [
        starts,
        capacity,
        cx.typed("logits", logits, rows * row_stride)?,
        cx.words("experts", experts, slots)?,
        cx.words("weights", weights, slots)?,
        words("dweights", gradients.dweights, slots)?,
        slopes,
        rows as u64,
        count as u64,
        k as u64,
        u64::from(normalized),
        row_stride as u64,
        cx.typed("dlogits", dlogits, rows * row_stride)?,
    ];
    cx.run_rowwise(EntryPoint::RouteBackward, rows, &arguments)
}

/// Where the gradient of the balance loss goes, and its factors.
pub(super) struct BalanceGradient {
    pub(super) loss_weight: Span,
    pub(super) control: Span,
    pub(super) slopes: Span,
}

/// The loss that balances experts and, with `gradient`, that.
pub(super) fn balance_loss(
    cx: &LaunchContext,
    dims: BalanceDims,
    [starts, balance, labels, loss]: [Span; 4],
    gradient: Option<BalanceGradient>,
) -> Result<(), DeviceError> {
    let BalanceDims { rows, experts, layers } = dims;
    let [starts, capacity] = starts_of(cx, starts)?;
    let [mut loss_weight, mut loss_scale, mut slopes] = [0; 3];
    if let Some(gradient) = gradient {
        loss_weight = cx.structure::<f64>("loss_weight", gradient.loss_weight)?;
        loss_scale =
            cx.structure::<Control>("control", gradient.control)? + offset_of!(Control, loss_scale) as u64;
        slopes = cx.words("slopes", gradient.slopes, 2 * experts)?;
    }
    let arguments = [
        starts,
        capacity,
        cx.words("balance", balance, 2 * experts)?,
        cx.words("labels", labels, rows)?,
        rows as u64,
        experts as u64,
        layers as u64,
        cx.structure::<f64>("loss", loss)?,
        loss_weight,
        loss_scale,
        slopes,
    ];
    cx.run(EntryPoint::BalanceLoss, &[], [1; 3], THREADS, &arguments)
}

cuda_kernel!(
    Route { dims, starts, logits, experts, weights, order, places, offsets, balance },
    |_| scratch(dims, balance.is_some()),
    |cx| forward(cx, dims, starts, logits, [experts, weights, order, places, offsets], balance)
);

cuda_kernel!(
    RouteBackward { dims, starts, logits, experts, weights, dweights, slopes, dlogits },
    |_| NO_SCRATCH,
    |cx| {
        let gradients = RouteGradients { dweights, slopes };
        backward(cx, dims, starts, [logits, experts, weights], &gradients, dlogits)
    }
);

cuda_kernel!(BalanceLoss { dims, starts, balance, labels, loss }, |_| NO_SCRATCH, |cx| balance_loss(
    cx,
    dims,
    [starts, balance, labels, loss],
    None
));

cuda_kernel!(
    BalanceLossBackward { dims, starts, balance, labels, loss, loss_weight, control, slopes },
    |_| NO_SCRATCH,
    |cx| {
        let gradient = BalanceGradient { loss_weight, control, slopes };
        balance_loss(cx, dims, [starts, balance, labels, loss], Some(gradient))
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_cover_all_items() {
        for items in [1, 255, 256, 257, 131_072, 131_073, 1 << 20] {
            let (part, parts) = partition(items, SEGMENT, MAX_SEGMENTS);
            assert!(part * parts >= items && part * (parts - 1) < items && parts <= MAX_SEGMENTS, "{items}");
            assert!(part.is_multiple_of(WARP as usize));
        }
        assert_eq!(partition(0, SEGMENT, MAX_SEGMENTS), (SEGMENT, 0));
    }
}
