//! Rows of activations in the order of experts: gathered, summed per token, and their gated activation.

use zeroth_base::ActivationFn;

use super::driver::Address;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, VEC, aligned16};
use zeroth_kernel::{DeviceError, ExpertRowsDims, GatedRowsDims, Span};

/// The address of the number of routed rows: the last of the offsets.
fn routed(cx: &LaunchContext, offsets: Span, experts: usize) -> Result<Address, DeviceError> {
    Ok(cx.words("offsets", offsets, experts + 1)? + 4 * experts as Address)
}

/// Whether rows of these widths and strides at these addresses can be accessed by vectors.
fn is_vectorized(sizes: &[usize], addresses: &[Address]) -> bool {
    sizes.iter().all(|size| size.is_multiple_of(VEC)) && aligned16(addresses)
}

pub(super) fn gather(
    cx: &LaunchContext,
    dims: ExpertRowsDims,
    [order, offsets, x, y]: [Span; 4],
) -> Result<(), DeviceError> {
    let ExpertRowsDims { rows, experts, k, width, row_stride } = dims;
    let order = cx.words("order", order, dims.slots())?;
    let routed = routed(cx, offsets, experts)?;
    let x = cx.typed("x", x, rows * row_stride)?;
    let y = cx.typed("y", y, dims.slots() * row_stride)?;
    let vectorized = u64::from(is_vectorized(&[width, row_stride], &[x, y]));
    let arguments = [order, routed, x, y, k as u64, width as u64, row_stride as u64, vectorized];
    cx.run_rowwise(EntryPoint::GatherRows, dims.slots(), &arguments)
}

pub(super) fn combine(
    cx: &LaunchContext,
    dims: ExpertRowsDims,
    [places, offsets, x, y]: [Span; 4],
) -> Result<(), DeviceError> {
    let ExpertRowsDims { rows, experts, k, width, row_stride } = dims;
    let places = cx.words("places", places, dims.slots())?;
    let routed = routed(cx, offsets, experts)?;
    let x = cx.typed("x", x, dims.slots() * row_stride)?;
    let y = cx.typed("y", y, rows * row_stride)?;
    let vectorized = u64::from(is_vectorized(&[width, row_stride], &[x, y]));
    let arguments =
        [places, routed, x, y, rows as u64, k as u64, width as u64, row_stride as u64, vectorized];
    cx.run_elementwise(EntryPoint::CombineRows, &[cx.dtype], rows * width.div_ceil(VEC), &arguments)
}

pub(super) fn gated(
    cx: &LaunchContext,
    activation: ActivationFn,
    dims: GatedRowsDims,
    [order, offsets, weights, gate_up, y]: [Span; 5],
) -> Result<(), DeviceError> {
    let GatedRowsDims { experts, width, gate_up_stride, y_stride, .. } = dims;
    let slots = dims.slots();
    let order = cx.words("order", order, slots)?;
    let routed = routed(cx, offsets, experts)?;
    let weights = cx.words("weights", weights, slots)?;
    let gate_up = cx.typed("gate_up", gate_up, slots * gate_up_stride)?;
    let y = cx.typed("y", y, slots * y_stride)?;
    let vectorized = u64::from(is_vectorized(&[width, gate_up_stride, y_stride], &[gate_up, y]));
    let arguments = [
        order,
        routed,
        weights,
        gate_up,
        y,
        width as u64,
        gate_up_stride as u64,
        y_stride as u64,
        vectorized,
    ];
    let entry = EntryPoint::gated_rows(activation);
    cx.run_elementwise(entry, &[cx.dtype], slots * width.div_ceil(VEC), &arguments)
}

pub(super) fn gated_backward(
    cx: &LaunchContext,
    activation: ActivationFn,
    dims: GatedRowsDims,
    [order, offsets, weights, gate_up, dy]: [Span; 5],
    dgate_up: Span,
    dweights: Option<Span>,
) -> Result<(), DeviceError> {
    let GatedRowsDims { experts, width, gate_up_stride, y_stride, .. } = dims;
    let slots = dims.slots();
    let order = cx.words("order", order, slots)?;
    let routed = routed(cx, offsets, experts)?;
    let weights = cx.words("weights", weights, slots)?;
    let gate_up = cx.typed("gate_up", gate_up, slots * gate_up_stride)?;
    let dy = cx.typed("dy", dy, slots * y_stride)?;
    let dgate_up = cx.typed("dgate_up", dgate_up, slots * gate_up_stride)?;
    let dweights = dweights.map_or(Ok(0), |dweights| cx.words("dweights", dweights, slots))?;
    let vectorized = u64::from(is_vectorized(&[width, gate_up_stride, y_stride], &[gate_up, dy, dgate_up]));
    let arguments = [
        order,
        routed,
        weights,
        gate_up,
        dy,
        dgate_up,
        dweights,
        slots as u64,
        width as u64,
        gate_up_stride as u64,
        y_stride as u64,
        vectorized,
    ];
    cx.run_rowwise(EntryPoint::gated_rows_backward(activation), slots, &arguments)
}

cuda_kernel!(GatherRows { dims, order, offsets, x, y }, |_| NO_SCRATCH, |cx| gather(
    cx,
    dims,
    [order, offsets, x, y]
));

cuda_kernel!(CombineRows { dims, places, offsets, x, y }, |_| NO_SCRATCH, |cx| combine(
    cx,
    dims,
    [places, offsets, x, y]
));

cuda_kernel!(
    GatedRows { activation, dims, order, offsets, weights, gate_up, y },
    |_| NO_SCRATCH,
    |cx| gated(cx, activation, dims, [order, offsets, weights, gate_up, y])
);

cuda_kernel!(
    GatedRowsBackward { activation, dims, order, offsets, weights, gate_up, dy, dgate_up, dweights },
    |_| NO_SCRATCH,
    |cx| {
        let operands = [order, offsets, weights, gate_up, dy];
        gated_backward(cx, activation, dims, operands, dgate_up, dweights)
    }
);
