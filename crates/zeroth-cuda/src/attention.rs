//! Attention: by cuDNN where it is faster, else by our own kernels. These use tensor cores for 16-bit data types and head dimensions that
//! are a multiple of 8, else f32 arithmetic, with one block per 64 rows, head, and 128 elements of a head.

use zeroth_base::DType;

use super::cudnn::{FusedAttention, Operands, workspace};
use super::driver::{Address, Handle};
use super::flash::{KernelConfig, TileConfigs, padded_head_dim};
use super::launch_context::{LaunchContext, THREADS, VEC, WARP, aligned16, float};
use super::modules::{AttentionVariant, EntryPoint};
use super::scratch::deltas;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::{DeviceError, Span};

const TILE: usize = 64;
/// Elements of a head per block.
const HEAD_ELEMENTS: usize = 128;
/// Largest number of rows that flash attention can index with 32 bits.
const MAX_ROWS: usize = 1 << 30;

pub(super) fn check(cx: &LaunchContext, dims: &AttentionDims) -> Result<(), DeviceError> {
    let AttentionDims { heads, kv_heads, window, .. } = *dims;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(cx.invalid(format!("{heads} heads cannot share {kv_heads} kv heads")));
    }
    if window == Some(0) {
        return Err(cx.invalid("a window of 0 keys masks everything".to_owned()));
    }
    Ok(())
}

/// Address of the sequence starts, and the capacity of their entry array.
pub(super) fn starts_of(cx: &LaunchContext, starts: Span) -> Result<[Address; 2], DeviceError> {
    let entries = (starts.bytes / 4) as usize;
    let at = cx.words("starts", starts, entries)?;
    if entries < 2 {
        return Err(cx.invalid("`starts` is too short for a count and an entry".to_owned()));
    }
    Ok([at, entries as u64 - 1])
}

/// Rows, heads, kv heads, head_dim, window (0: none) and scale, as kernel arguments.
pub(super) fn shape(dims: &AttentionDims) -> [u64; 6] {
    let AttentionDims { rows, heads, kv_heads, head_dim, window, scale, .. } = *dims;
    let sizes = [rows, heads, kv_heads, head_dim, window.map_or(0, |window| window.min(i32::MAX as usize))];
    let [rows, heads, kv_heads, head_dim, window] = sizes.map(|size| size as u64);
    [rows, heads, kv_heads, head_dim, window, float(scale)]
}

/// The flash attention kernels and their tile sizes; `None` if the shape or the alignment of `operands` is not supported.
fn tensor_cores(
    cx: &LaunchContext,
    dims: &AttentionDims,
    operands: &[Address],
) -> Result<Option<(TileConfigs, [Handle; 3])>, DeviceError> {
    let within = dims.rows <= MAX_ROWS && i32::try_from(dims.heads * dims.head_dim).is_ok();
    let is_supported = cx.dtype != DType::F32 && aligned16(operands) && within && dims.scale > 0.0;
    let Some(head) = padded_head_dim(dims.head_dim).filter(|_| is_supported) else { return Ok(None) };
    let functions = cx.modules.attention(cx.driver, AttentionVariant::TensorCores(head), cx.dtype)?;
    Ok(functions.map(|functions| (cx.modules.tile_configs(head), functions)))
}

fn cuda_cores(cx: &LaunchContext) -> Result<[Handle; 3], DeviceError> {
    let functions = cx.modules.attention(cx.driver, AttentionVariant::CudaCores, cx.dtype)?;
    Ok(functions.expect("these kernels use no dynamic shared memory"))
}

/// Grid size: one block per tile and head.
fn blocks(kernel: KernelConfig, rows: usize, heads: usize) -> usize {
    rows.div_ceil(kernel.rows) * heads
}

pub(super) fn forward(
    cx: &mut LaunchContext,
    fused: &mut FusedAttention,
    dims: &AttentionDims,
    starts: Span,
    [q, k, v]: [Span; 3],
    y: Span,
    lse: Span,
) -> Result<(), DeviceError> {
    check(cx, dims)?;
    let (q_elements, kv_elements) =
        (dims.rows * dims.heads * dims.head_dim, dims.rows * dims.kv_heads * dims.head_dim);
    let [starts, capacity] = starts_of(cx, starts)?;
    let q = cx.typed("q", q, q_elements)?;
    let (k, v) = (cx.typed("k", k, kv_elements)?, cx.typed("v", v, kv_elements)?);
    let (y, lse) = (cx.typed("y", y, q_elements)?, cx.words("lse", lse, deltas(dims))?);
    let workspace = match workspace(dims, cx.dtype) {
        0 => 0,
        bytes => cx.scratch.take(bytes)?,
    };
    if fused.forward(dims, cx.dtype, &Operands { q, k, v, y, lse, workspace }, cx.stream)? {
        return Ok(());
    }
    let [rows, heads, kv_heads, head_dim, window, scale] = shape(dims);
    let arguments = [starts, capacity, q, k, v, y, lse, rows, heads, kv_heads, head_dim, window, scale];
    if let Some((tiles, [function, ..])) = tensor_cores(cx, dims, &[q, k, v, y])? {
        let [kernel, ..] = tiles.kernels();
        let grid = [blocks(kernel, dims.rows, dims.heads), 1, 1];
        return cx.launch(function, grid, kernel.threads, kernel.shared, &arguments);
    }
    let grid = [dims.rows.div_ceil(TILE), dims.heads, dims.head_dim.div_ceil(HEAD_ELEMENTS)];
    cx.launch(cuda_cores(cx)?[0], grid, THREADS, 0, &arguments)
}

pub(super) fn backward(
    cx: &mut LaunchContext,
    dims: &AttentionDims,
    starts: Span,
    [q, k, v]: [Span; 3],
    [y, lse, dy]: [Span; 3],
    [dq, dk, dv]: [Span; 3],
) -> Result<(), DeviceError> {
    check(cx, dims)?;
    let (q_elements, kv_elements) =
        (dims.rows * dims.heads * dims.head_dim, dims.rows * dims.kv_heads * dims.head_dim);
    let [starts, capacity] = starts_of(cx, starts)?;
    let (q, k) = (cx.typed("q", q, q_elements)?, cx.typed("k", k, kv_elements)?);
    let (v, y) = (cx.typed("v", v, kv_elements)?, cx.typed("y", y, q_elements)?);
    let (lse, dy) = (cx.words("lse", lse, deltas(dims))?, cx.typed("dy", dy, q_elements)?);
    let dq = cx.typed("dq", dq, q_elements)?;
    let (dk, dv) = (cx.typed("dk", dk, kv_elements)?, cx.typed("dv", dv, kv_elements)?);
    let delta = cx.scratch.take(4 * deltas(dims) as u64)?;
    let [rows, heads, kv_heads, head_dim, window, scale] = shape(dims);
    let vectorized = dims.head_dim.is_multiple_of(VEC) && aligned16(&[y, dy]);
    let row_threads =
        if vectorized { (dims.head_dim / VEC).next_power_of_two().min(WARP as usize) } else { 0 };
    let rows_per_block = THREADS as usize / if vectorized { row_threads } else { WARP as usize };
    let arguments = [y, dy, delta, rows, heads, head_dim, row_threads as u64];
    let grid = [deltas(dims).div_ceil(rows_per_block), 1, 1];
    cx.run(EntryPoint::AttentionDelta, &[cx.dtype], grid, THREADS, &arguments)?;
    let dq_arguments =
        [starts, capacity, q, k, v, lse, dy, delta, dq, rows, heads, kv_heads, head_dim, window, scale];
    let dkv_arguments =
        [starts, capacity, q, k, v, lse, dy, delta, dk, dv, rows, heads, kv_heads, head_dim, window, scale];
    if let Some((tiles, [_, dq_kernel, dkv_kernel])) = tensor_cores(cx, dims, &[q, k, v, y, dy, dq, dk, dv])?
    {
        let [_, dq_config, dkv_config] = tiles.kernels();
        let grid = [blocks(dq_config, dims.rows, dims.heads), 1, 1];
        cx.launch(dq_kernel, grid, dq_config.threads, dq_config.shared, &dq_arguments)?;
        let grid = [blocks(dkv_config, dims.rows, dims.kv_heads), 1, tiles.column_blocks()];
        return cx.launch(dkv_kernel, grid, dkv_config.threads, dkv_config.shared, &dkv_arguments);
    }
    let (tiles, columns) = (dims.rows.div_ceil(TILE), dims.head_dim.div_ceil(HEAD_ELEMENTS));
    let [_, dq_kernel, dkv_kernel] = cuda_cores(cx)?;
    cx.launch(dq_kernel, [tiles, dims.heads, columns], THREADS, 0, &dq_arguments)?;
    cx.launch(dkv_kernel, [tiles, dims.kv_heads, columns], THREADS, 0, &dkv_arguments)
}
