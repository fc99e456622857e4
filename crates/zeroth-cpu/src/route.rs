//! The router of a mixture of experts: softmax, the k largest experts of each row, and the slots sorted by expert.
//!
//! A slot is one of the k experts of a row. Rows are partitioned into blocks. A block counts its slots of each expert, so
//! that a stable counting sort needs one prefix sum over blocks, and sums the probabilities of each expert, so that their
//! order does not depend on threads.

use super::isa::each_isa;
use super::launch::{cpu_kernel, floats};
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use super::{check_len, check_scratch, math};
use zeroth_kernel::Balance;
use zeroth_kernel::{Element, RouteDims};

/// Rows per task.
const BLOCK: usize = 64;

/// Statistics of the routing that the load-balancing loss is computed from, `[2, experts]` in f32: slots of each expert, and
/// sums of its probabilities.
pub struct BalanceSlices<'a> {
    /// Those of the layers before; zeros where absent.
    pub before: Option<&'a [f32]>,
    /// With those of this layer.
    pub after: &'a mut [f32],
}

/// What [`route`] writes.
pub struct RoutedSlices<'a> {
    /// Experts of each row, by descending logits, `[rows, k]`; `dims.experts` in padding rows.
    pub experts: &'a mut [i32],
    /// Their weights, `[rows, k]`; 0 in padding rows.
    pub weights: &'a mut [f32],
    /// The slot at each sorted place.
    pub order: &'a mut [i32],
    /// The sorted place of each slot, `[rows, k]`.
    pub places: &'a mut [i32],
    /// First place of each expert, and the number of routed slots.
    pub offsets: &'a mut [i32],
}

/// f32 elements of scratch that [`route`] needs with a pool of `threads`: for each block of rows the slots and the summed
/// probabilities of each expert, for each thread a row of probabilities.
pub fn route_scratch(dims: RouteDims, threads: usize) -> usize {
    let RouteDims { rows, experts, .. } = dims;
    rows.div_ceil(BLOCK) * (2 * experts + 1) + threads * experts
}

/// Rows that are routed: those before the last of `starts`.
fn routed_rows(dims: RouteDims, starts: Option<&[u32]>) -> usize {
    starts.map_or(dims.rows, |starts| dims.rows.min(starts.last().map_or(0, |end| *end as usize)))
}

/// Routes every row of `logits` to its k largest experts. Among equal logits the lower index is first; a NaN is the smallest.
///
/// # Panics
/// If k exceeds the number of experts.
#[allow(clippy::needless_pass_by_value, reason = "the slices inside are the outputs")]
pub fn route<T: Element>(
    pool: &Pool,
    dims: RouteDims,
    starts: Option<&[u32]>,
    logits: &[T],
    routed: RoutedSlices<'_>,
    balance: Option<BalanceSlices<'_>>,
    scratch: &mut [f32],
) {
    let RouteDims { rows, experts, k, row_stride, .. } = dims;
    let (slots, blocks, end) = (rows * k, rows.div_ceil(BLOCK), routed_rows(dims, starts));
    assert!(k <= experts, "{k} experts of each row, of {experts}");
    check_rows("logits", logits.len(), [rows, experts], row_stride);
    check_len("experts", routed.experts.len(), slots);
    check_len("weights", routed.weights.len(), slots);
    check_len("order", routed.order.len(), slots);
    check_len("places", routed.places.len(), slots);
    check_len("offsets", routed.offsets.len(), experts + 1);
    check_scratch(scratch.len(), route_scratch(dims, pool.threads()));
    let (counts, rest) = scratch.split_at_mut(blocks * (experts + 1));
    let (sums, row_buffers) = rest.split_at_mut(blocks * experts);
    // Slots of each expert in each block; the last counts those of padding rows.
    let counts: &mut [u32] = bytemuck::cast_slice_mut(counts);
    let per_block = BLOCK * k;
    let outputs = (
        Chunks::new(&mut *routed.experts, per_block),
        Chunks::new(routed.weights, per_block),
        Chunks::new(&mut *counts, experts + 1),
        Chunks::new(&mut *sums, experts),
    );
    if slots > 0 {
        pool.each_with(outputs, row_buffers, |block, (chosen, weights, counts, sums), buffer| {
            counts.fill(0);
            sums.fill(0.0);
            let buffer = &mut buffer[..experts];
            let lines = chosen.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
            for (row, (chosen, weights)) in (block * BLOCK..).zip(lines) {
                if row < end {
                    let logits = &logits[row * row_stride..][..experts];
                    route_row(pool.isa(), dims.normalized, logits, buffer, chosen, weights);
                    sums.iter_mut().zip(&*buffer).for_each(|(sum, probability)| *sum += probability);
                } else {
                    chosen.fill(experts as i32);
                    weights.fill(0.0);
                }
                for expert in &*chosen {
                    counts[*expert as usize] += 1;
                }
            }
        });
    }
    if let Some(BalanceSlices { before, after }) = balance {
        check_len("balance", after.len(), 2 * experts);
        let (slots_of, sums_of) = after.split_at_mut(experts);
        for expert in 0..experts {
            let found: u32 = counts.chunks_exact(experts + 1).map(|counts| counts[expert]).sum();
            slots_of[expert] = found as f32;
            sums_of[expert] = sums.chunks_exact(experts).map(|sums| sums[expert]).sum();
        }
        if let Some(before) = before {
            check_len("balance before", before.len(), 2 * experts);
            after.iter_mut().zip(before).for_each(|(after, before)| *after += before);
        }
    }
    // Counts become the first place of each expert in each block.
    let mut place = 0;
    for expert in 0..=experts {
        routed.offsets[expert] = place as i32;
        for counts in counts.chunks_exact_mut(experts + 1) {
            place += std::mem::replace(&mut counts[expert], place);
        }
    }
    let chosen = &*routed.experts;
    if slots > 0 {
        let parts = (Chunks::new(&mut *routed.places, per_block), Chunks::new(counts, experts + 1));
        pool.each(parts, |block, (places, next)| {
            for (place, expert) in places.iter_mut().zip(&chosen[block * per_block..]) {
                let next = &mut next[*expert as usize];
                *place = *next as i32;
                *next += 1;
            }
        });
    }
    for (slot, place) in routed.places.iter().enumerate() {
        routed.order[*place as usize] = slot as i32;
    }
}

each_isa! {
    /// Writes the probabilities of a row, its k largest experts and their weights.
    fn route_row<T>(normalized: bool, logits: &[T], probabilities: &mut [f32], chosen: &mut [i32], weights: &mut [f32]) {
        softmax(logits, probabilities);
        choose(logits, chosen);
        for (weight, expert) in weights.iter_mut().zip(&*chosen) {
            *weight = probabilities[*expert as usize];
        }
        if normalized {
            let total: f32 = weights.iter().sum();
            for weight in &mut *weights {
                *weight /= total;
            }
        }
    }
}

/// Softmax in f32. A NaN, an infinite logit, or a row of -∞ makes every probability NaN.
#[inline(always)]
fn softmax<T: Element>(logits: &[T], probabilities: &mut [f32]) {
    for (probability, logit) in probabilities.iter_mut().zip(logits) {
        *probability = logit.to_f32();
    }
    let peak = math::max_of(probabilities);
    for probability in probabilities.iter_mut() {
        *probability = math::exp(*probability - peak);
    }
    let total = math::sum_of(probabilities, |power| power);
    for probability in probabilities {
        *probability /= total;
    }
}

/// The largest logits by insertion: most logits of a row are compared with the last of the chosen only.
#[inline(always)]
fn choose<T: Element>(logits: &[T], chosen: &mut [i32]) {
    let exceeds = |a: f32, b: f32| a > b || b.is_nan() && !a.is_nan();
    let logit = |expert: i32| logits[expert as usize].to_f32();
    let mut count = 0;
    for (expert, own) in logits.iter().enumerate() {
        let own = own.to_f32();
        let mut at = count;
        if count < chosen.len() {
            count += 1;
        } else if let Some(last) = count.checked_sub(1)
            && exceeds(own, logit(chosen[last]))
        {
            at = last;
        } else {
            continue;
        }
        while at > 0 && exceeds(own, logit(chosen[at - 1])) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = expert as i32;
    }
}

/// f32 elements of scratch that [`route_backward`] needs with a pool of `threads`: a row of probabilities for each thread.
pub fn route_backward_scratch(dims: RouteDims, threads: usize) -> usize {
    threads * dims.experts
}

/// dlogits of `dweights`, and of `slopes` `[2, experts]`: its second row holds the gradient of each expert's summed
/// probability. Padding rows get zeros.
///
/// With p = softmax and w the weights, the gradient of logit e is p_e · (g_e - Σ g·p) for gradients g of p. Normalized weights are
/// a softmax of the chosen logits alone, so the same holds with w in place of p.
pub fn route_backward<T: Element>(
    pool: &Pool,
    dims: RouteDims,
    starts: Option<&[u32]>,
    logits: &[T],
    experts: &[i32],
    weights: &[f32],
    dweights: Option<&[f32]>,
    slopes: Option<&[f32]>,
    dlogits: &mut [T],
    scratch: &mut [f32],
) {
    let RouteDims { rows, experts: count, k, row_stride, normalized } = dims;
    let end = routed_rows(dims, starts);
    check_rows("logits", logits.len(), [rows, count], row_stride);
    check_rows("dlogits", dlogits.len(), [rows, count], row_stride);
    check_len("experts", experts.len(), rows * k);
    check_len("weights", weights.len(), rows * k);
    if let Some(dweights) = dweights {
        check_len("dweights", dweights.len(), rows * k);
    }
    if let Some(slopes) = slopes {
        check_len("slopes", slopes.len(), 2 * count);
    }
    check_scratch(scratch.len(), route_backward_scratch(dims, pool.threads()));
    if rows * count == 0 {
        return;
    }
    let slopes = slopes.map(|slopes| &slopes[count..]);
    pool.each_with(Chunks::new(dlogits, BLOCK * row_stride), scratch, |block, dlogits, buffer| {
        let buffer = &mut buffer[..count];
        for (row, dlogits) in (block * BLOCK..).zip(dlogits.chunks_exact_mut(row_stride)) {
            let dlogits = &mut dlogits[..count];
            if row >= end {
                dlogits.fill(T::default());
                continue;
            }
            let slots = row * k..(row + 1) * k;
            let chosen = Chosen {
                experts: &experts[slots.clone()],
                weights: &weights[slots.clone()],
                dweights: dweights.map(|dweights| &dweights[slots]),
            };
            let logits = &logits[row * row_stride..][..count];
            backward_row(pool.isa(), normalized, logits, chosen, slopes, buffer, dlogits);
        }
    });
}

/// The slots of a row.
#[derive(Clone, Copy)]
struct Chosen<'a> {
    experts: &'a [i32],
    weights: &'a [f32],
    dweights: Option<&'a [f32]>,
}

each_isa! {
    fn backward_row<T>(normalized: bool, logits: &[T], chosen: Chosen<'_>, slopes: Option<&[f32]>, buffer: &mut [f32], dlogits: &mut [T]) {
        // Σ dw·w, and what every probability is multiplied by.
        let of_weights = chosen.dweights.map_or(0.0, |dweights| {
            dweights.iter().zip(chosen.weights).map(|(dweight, weight)| dweight * weight).sum::<f32>()
        });
        let all = if normalized { 0.0 } else { of_weights };
        if slopes.is_some() || (!normalized && chosen.dweights.is_some()) {
            softmax(logits, buffer);
            let mean = slopes.map_or(0.0, |slopes| math::sum_of_two([slopes, &*buffer], |slope, p| slope * p));
            match slopes {
                Some(slopes) => {
                    for (p, slope) in buffer.iter_mut().zip(slopes) {
                        *p *= slope - mean - all;
                    }
                }
                None => buffer.iter_mut().for_each(|p| *p *= -all),
            }
        } else {
            buffer.fill(0.0);
        }
        if let Some(dweights) = chosen.dweights {
            let own = if normalized { of_weights } else { 0.0 };
            for ((expert, weight), dweight) in chosen.experts.iter().zip(chosen.weights).zip(dweights) {
                buffer[*expert as usize] += weight * (dweight - own);
            }
        }
        for (dlogit, value) in dlogits.iter_mut().zip(buffer) {
            *dlogit = T::from_f32(*value);
        }
    }
}

cpu_kernel!(
    Route { dims, starts, logits, experts, weights, order, places, offsets, balance },
    |threads| floats(route_scratch(dims, threads)),
    |cx| {
        let starts = starts.map(|starts| cx.starts(starts)).transpose()?;
        let routed = RoutedSlices {
            experts: cx.write(experts)?,
            weights: cx.write(weights)?,
            order: cx.write(order)?,
            places: cx.write(places)?,
            offsets: cx.write(offsets)?,
        };
        let balance = match balance {
            Some(Balance { before, after }) => Some(BalanceSlices {
                before: before.map(|before| cx.read(before)).transpose()?,
                after: cx.write(after)?,
            }),
            None => None,
        };
        route::<T>(cx.pool, dims, starts, cx.read(logits)?, routed, balance, cx.scratch()?);
    }
);

cpu_kernel!(
    RouteBackward { dims, starts, logits, experts, weights, dweights, slopes, dlogits },
    |threads| floats(route_backward_scratch(dims, threads)),
    |cx| {
        let starts = starts.map(|starts| cx.starts(starts)).transpose()?;
        let (logits, experts, weights) = (cx.read::<T>(logits)?, cx.read(experts)?, cx.read(weights)?);
        let dweights = dweights.map(|dweights| cx.read(dweights)).transpose()?;
        let slopes = slopes.map(|slopes| cx.read(slopes)).transpose()?;
        let (to, scratch) = (cx.write(dlogits)?, cx.scratch()?);
        route_backward(cx.pool, dims, starts, logits, experts, weights, dweights, slopes, to, scratch);
    }
);

cpu_kernel!(CountTokens { experts, slots, offsets, weights, counts }, |_| 0, |cx| {
    let offsets = cx.read::<i32>(offsets.part(0, experts as u64 + 1, 4))?;
    let weights = cx.read::<f32>(weights.part(0, slots as u64, 4))?;
    let counts = cx.write::<u32>(counts.part(0, experts as u64 + 1, 4))?;
    for (count, ends) in counts.iter_mut().zip(offsets.windows(2)) {
        *count = count.wrapping_add((ends[1] - ends[0]) as u32);
    }
    let lost = weights.iter().filter(|weight| !weight.is_finite()).count();
    counts[experts] = counts[experts].wrapping_add(lost as u32);
});
