//! Biases of relative positions: the table that attention reads, and the gradient of the learned one.

use zeroth_kernel::{DeviceError, PositionBiasDims, Span};

use super::entry_points::EntryPoint;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, THREADS};

/// Buckets, the largest distance, whether they are bidirectional, and heads, as kernel arguments.
fn sizes(dims: PositionBiasDims) -> [u64; 4] {
    let buckets = dims.buckets;
    [buckets.buckets, buckets.max_distance, u64::from(buckets.bidirectional), dims.heads as u64]
}

pub(super) fn forward(
    cx: &LaunchContext,
    dims: PositionBiasDims,
    w: Span,
    table: Span,
) -> Result<(), DeviceError> {
    let entries = dims.buckets.distances() as usize * dims.heads;
    let w = cx.typed("w", w, dims.buckets.buckets as usize * dims.heads)?;
    let table = cx.words("table", table, entries)?;
    let [buckets, most, bidirectional, heads] = sizes(dims);
    let arguments = [w, table, buckets, most, bidirectional, heads];
    cx.run_elementwise(EntryPoint::PositionBias, &[cx.dtype], entries, &arguments)
}

pub(super) fn backward(
    cx: &LaunchContext,
    dims: PositionBiasDims,
    dtable: Span,
    dw: Span,
) -> Result<(), DeviceError> {
    let dtable = cx.words("dtable", dtable, dims.buckets.distances() as usize * dims.heads)?;
    let dw = cx.words("dw", dw, dims.buckets.buckets as usize * dims.heads)?;
    let [buckets, most, bidirectional, heads] = sizes(dims);
    let grid = [buckets as usize, dims.heads.div_ceil(THREADS as usize), 1];
    cx.run(
        EntryPoint::PositionBiasBackward,
        &[],
        grid,
        THREADS,
        &[dtable, dw, buckets, most, bidirectional, heads],
    )
}

cuda_kernel!(PositionBias { dims, w, table }, |_| NO_SCRATCH, |cx| forward(cx, dims, w, table));

cuda_kernel!(PositionBiasBackward { dims, dtable, dw }, |_| NO_SCRATCH, |cx| backward(cx, dims, dtable, dw));
