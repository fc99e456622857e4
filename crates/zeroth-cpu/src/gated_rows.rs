//! Gated activations of expert rows, each times the weight of its slot: y = f(gate) · up · weight, and its gradients. The
//! weight is here and not behind the next matmul, because a row is shorter here. Computed in f32 and rounded once.

use super::expert_rows::routed_slots;
use super::gated_activation::{Activation, Gelu, GeluTanh, Relu, Silu, with_activation};
use super::isa::each_isa;
use super::launch::{cpu_kernel, floats};
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use super::{check_len, check_scratch, math};
use zeroth_base::ActivationFn;
use zeroth_kernel::{Element, GatedRowsDims};

/// Rows per task.
const BLOCK: usize = 8;

/// y[p] = f(gate[p]) · up[p] · weights[order[p]] for every routed place p. A row of `gate_up` is the gate, then up.
pub fn gated_rows<T: Element>(
    pool: &Pool,
    activation: ActivationFn,
    dims: GatedRowsDims,
    order: &[i32],
    offsets: &[i32],
    weights: &[f32],
    gate_up: &[T],
    y: &mut [T],
) {
    let GatedRowsDims { width, gate_up_stride, y_stride, .. } = dims;
    let slots = dims.slots();
    check_rows("gate_up", gate_up.len(), [slots, 2 * width], gate_up_stride);
    check_rows("y", y.len(), [slots, width], y_stride);
    check_len("order", order.len(), slots);
    check_len("weights", weights.len(), slots);
    let (routed, fused) = (routed_slots(offsets, slots), math::has_fma(pool.isa()));
    pool.each(Chunks::new(&mut y[..routed * y_stride], BLOCK * y_stride), |block, y| {
        for (place, y) in (block * BLOCK..).zip(y.chunks_exact_mut(y_stride)) {
            let weight = weights[order[place] as usize];
            let (gate, up) = gate_up[place * gate_up_stride..][..2 * width].split_at(width);
            forward(pool.isa(), activation, fused, weight, gate, up, &mut y[..width]);
        }
    });
}

each_isa! {
    fn forward<T>(activation: ActivationFn, fused: bool, weight: f32, gate: &[T], up: &[T], y: &mut [T]) {
        with_activation!(activation, fused, forward_with(weight, gate, up, y));
    }
}

#[inline(always)]
fn forward_with<F: Activation, T: Element, const FUSED: bool>(
    weight: f32,
    gate: &[T],
    up: &[T],
    y: &mut [T],
) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = T::from_f32(F::value::<FUSED>(gate.to_f32()) * up.to_f32() * weight);
    }
}

/// f32 elements of scratch that [`gated_rows_backward`] needs: a weight's gradient at its place.
pub fn gated_rows_scratch(dims: GatedRowsDims) -> usize {
    dims.slots()
}

/// Writes the gradient of every routed row of gate and up, and that of all `weights`: 0 where a slot is not routed.
pub fn gated_rows_backward<T: Element>(
    pool: &Pool,
    activation: ActivationFn,
    dims: GatedRowsDims,
    order: &[i32],
    offsets: &[i32],
    weights: &[f32],
    gate_up: &[T],
    dy: &[T],
    dgate_up: &mut [T],
    dweights: Option<&mut [f32]>,
    scratch: &mut [f32],
) {
    let GatedRowsDims { width, gate_up_stride, y_stride, .. } = dims;
    let slots = dims.slots();
    check_rows("gate_up", gate_up.len(), [slots, 2 * width], gate_up_stride);
    check_rows("dgate_up", dgate_up.len(), [slots, 2 * width], gate_up_stride);
    check_rows("dy", dy.len(), [slots, width], y_stride);
    check_len("order", order.len(), slots);
    check_len("weights", weights.len(), slots);
    check_scratch(scratch.len(), gated_rows_scratch(dims));
    let (routed, fused) = (routed_slots(offsets, slots), math::has_fma(pool.isa()));
    let by_place = &mut scratch[..routed];
    let outputs = (
        Chunks::new(&mut dgate_up[..routed * gate_up_stride], BLOCK * gate_up_stride),
        Chunks::new(&mut *by_place, BLOCK),
    );
    pool.each(outputs, |block, (dgate_up, by_place)| {
        let places = (block * BLOCK..).zip(dgate_up.chunks_exact_mut(gate_up_stride));
        for ((place, dgate_up), dweight) in places.zip(by_place) {
            let weight = weights[order[place] as usize];
            let (gate, up) = gate_up[place * gate_up_stride..][..2 * width].split_at(width);
            let (dgate, dup) = dgate_up[..2 * width].split_at_mut(width);
            let dy = &dy[place * y_stride..][..width];
            *dweight = backward(pool.isa(), activation, fused, weight, [dy, gate, up], dgate, dup);
        }
    });
    let Some(dweights) = dweights else { return };
    check_len("dweights", dweights.len(), slots);
    dweights.fill(0.0);
    for (dweight, slot) in by_place.iter().zip(order) {
        dweights[*slot as usize] = *dweight;
    }
}

each_isa! {
    /// Writes dgate and dup of a row, and returns the gradient of its weight.
    fn backward<T>(activation: ActivationFn, fused: bool, weight: f32, inputs: [&[T]; 3], dgate: &mut [T], dup: &mut [T]) -> f32 {
        with_activation!(activation, fused, backward_with(weight, inputs, dgate, dup))
    }
}

#[inline(always)]
fn backward_with<F: Activation, T: Element, const FUSED: bool>(
    weight: f32,
    [dy, gate, up]: [&[T]; 3],
    dgate: &mut [T],
    dup: &mut [T],
) -> f32 {
    let mut lanes = [0.0f32; math::LANES];
    let inputs = dy.chunks(math::LANES).zip(gate.chunks(math::LANES)).zip(up.chunks(math::LANES));
    let outputs = dgate.chunks_mut(math::LANES).zip(dup.chunks_mut(math::LANES));
    for (((dy, gate), up), (dgate, dup)) in inputs.zip(outputs) {
        let inputs = dy.iter().zip(gate).zip(up);
        for ((((dy, gate), up), (dgate, dup)), lane) in inputs.zip(dgate.iter_mut().zip(dup)).zip(&mut lanes)
        {
            let (dy, up) = (dy.to_f32(), up.to_f32());
            let (value, slope) = F::value_and_slope::<FUSED>(gate.to_f32());
            *lane += dy * value * up;
            *dgate = T::from_f32(dy * weight * up * slope);
            *dup = T::from_f32(dy * weight * value);
        }
    }
    math::add_lanes(lanes)
}

cpu_kernel!(GatedRows { activation, dims, order, offsets, weights, gate_up, y }, |_| 0, |cx| {
    let (order, offsets, weights) = (cx.read(order)?, cx.read(offsets)?, cx.read(weights)?);
    let (gate_up, y) = (cx.read::<T>(gate_up)?, cx.write(y)?);
    gated_rows(cx.pool, activation, dims, order, offsets, weights, gate_up, y);
});

cpu_kernel!(
    GatedRowsBackward { activation, dims, order, offsets, weights, gate_up, dy, dgate_up, dweights },
    |_| floats(gated_rows_scratch(dims)),
    |cx| gated_rows_backward::<T>(
        cx.pool,
        activation,
        dims,
        cx.read(order)?,
        cx.read(offsets)?,
        cx.read(weights)?,
        cx.read(gate_up)?,
        cx.read(dy)?,
        cx.write(dgate_up)?,
        dweights.map(|dweights| cx.write(dweights)).transpose()?,
        cx.scratch()?,
    )
);
