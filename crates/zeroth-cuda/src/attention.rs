//! Attention: by cuDNN where it is faster, else by our own kernels. These use tensor cores for 16-bit data types and head dimensions that
//! are a multiple of 8, else f32 arithmetic, with one block per 64 rows, head, and 128 elements of a head. Attention with a context, that
//! of encoder-decoders, has variants of its own of both.

use zeroth_base::DType;

use super::cudnn::{FusedAttention, Operands, workspace};
use super::driver::{Address, Handle};
use super::entry_points::EntryPoint;
use super::flash::{Features, KernelConfig, MAX_DISTANCES, MAX_GROUP, TileConfigs, padded_head_dim};
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, THREADS, VEC, WARP, aligned16, float};
use super::modules::AttentionVariant;
use super::rowwise;
use super::scratch::{TILE, bias_partials, deltas};
use zeroth_kernel::{AttentionContext, AttentionDims, AttentionDropout, BiasGrad, RowKey};
use zeroth_kernel::{DeviceError, Span};

/// Elements of a head per block.
const HEAD_ELEMENTS: usize = 128;
/// Largest number of rows that flash attention can index with 32 bits.
const MAX_ROWS: usize = 1 << 30;

/// Whether attention is more than causal attention within sequences.
pub(super) fn needs_context(dims: &AttentionDims, context: &AttentionContext) -> bool {
    let AttentionContext { kv_starts, bias, dropout, .. } = context;
    !dims.causal || kv_starts.is_some() || bias.is_some() || dropout.is_some()
}

pub(super) fn check(cx: &LaunchContext, dims: &AttentionDims, bias: Option<Span>) -> Result<(), DeviceError> {
    let AttentionDims { heads, kv_heads, window, causal, max_distance, .. } = *dims;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(cx.invalid(format!("{heads} heads cannot share {kv_heads} kv heads")));
    }
    if window == Some(0) {
        return Err(cx.invalid("a window of 0 keys masks everything".to_owned()));
    }
    if window.is_some() && !causal {
        return Err(cx.invalid("only causal attention has a window".to_owned()));
    }
    if bias.is_some() != max_distance.is_some() {
        return Err(cx.invalid(format!("biases {bias:?} with a largest distance of {max_distance:?}")));
    }
    Ok(())
}

fn check_context(
    cx: &LaunchContext,
    dims: &AttentionDims,
    context: &AttentionContext,
) -> Result<(), DeviceError> {
    check(cx, dims, context.bias)?;
    let AttentionDims { rows, kv_rows, causal, .. } = *dims;
    if context.kv_starts.is_some() && causal {
        return Err(cx.invalid("causal attention has the keys of its own sequences".to_owned()));
    }
    if context.kv_starts.is_none() && kv_rows != rows {
        return Err(cx.invalid(format!("{kv_rows} rows of k and {rows} of q without sequences of k")));
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

/// Address of the biases (0: none) and their largest distance, as kernel arguments.
pub(super) fn biases(
    cx: &LaunchContext,
    dims: &AttentionDims,
    bias: Option<Span>,
) -> Result<[u64; 2], DeviceError> {
    let bias = bias.map(|bias| cx.words("bias", bias, dims.heads * dims.distances())).transpose()?;
    Ok([bias.unwrap_or(0), dims.max_distance.unwrap_or(0) as u64])
}

/// Shape and context as the last arguments of the kernels: SHAPE and CONTEXT in attention_context.cu.
fn shape_and_context(
    cx: &LaunchContext,
    dims: &AttentionDims,
    context: &AttentionContext,
) -> Result<Vec<u64>, DeviceError> {
    let kv_starts = starts_of(cx, context.kv_starts.unwrap_or(context.starts))?;
    let rows_and_mask = [dims.kv_rows as u64, u64::from(dims.causal)];
    let dropout = match context.dropout {
        Some(AttentionDropout { probability, seed, op, keys }) => {
            let keys = cx.sized("keys", keys, dims.rows, size_of::<RowKey>() as u64)?;
            let threshold = u64::from(AttentionDropout::threshold(probability));
            [keys, seed, u64::from(op), threshold, float(1.0 / (1.0 - probability))]
        }
        None => [0, 0, 0, 0, float(1.0)],
    };
    let biases = biases(cx, dims, context.bias)?;
    Ok([shape(dims).as_slice(), &kv_starts, &rows_and_mask, &biases, &dropout].concat())
}

/// The flash attention kernels and their launch configurations.
struct Flash {
    tiles: TileConfigs,
    kernels: [KernelConfig; 3],
    functions: [Handle; 3],
}

/// The flash attention kernels; `None` if the shape or the alignment of `operands` is not supported.
fn tensor_cores(
    cx: &LaunchContext,
    dims: &AttentionDims,
    context: &AttentionContext,
    operands: &[Address],
) -> Result<Option<Flash>, DeviceError> {
    let within = dims.rows.max(dims.kv_rows) <= MAX_ROWS && i32::try_from(dims.q_width()).is_ok();
    let (distances, group) = (dims.distances(), dims.group());
    let fits = distances == 0 || distances <= MAX_DISTANCES && group <= MAX_GROUP;
    let is_supported = cx.dtype != DType::F32 && aligned16(operands) && within && fits && dims.scale > 0.0;
    let Some(head) = padded_head_dim(dims.head_dim).filter(|_| is_supported) else { return Ok(None) };
    let features = Features {
        general: needs_context(dims, context),
        bias: context.bias.is_some(),
        dropout: context.dropout.is_some(),
    };
    let variant = AttentionVariant::TensorCores(head, features);
    let Some(functions) = cx.modules.attention(cx.driver, variant, cx.dtype)? else { return Ok(None) };
    let tiles = cx.modules.tile_configs(head, features);
    Ok(Some(Flash { tiles, kernels: tiles.kernels(distances, group), functions }))
}

fn cuda_cores(
    cx: &LaunchContext,
    dims: &AttentionDims,
    context: &AttentionContext,
) -> Result<[Handle; 3], DeviceError> {
    let features = if needs_context(dims, context) { Features::GENERAL } else { Features::CAUSAL };
    let functions = cx.modules.attention(cx.driver, AttentionVariant::CudaCores(features), cx.dtype)?;
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
    context: &AttentionContext,
    [q, k, v]: [Span; 3],
    y: Span,
    lse: Span,
) -> Result<(), DeviceError> {
    check_context(cx, dims, context)?;
    let (q_elements, kv_elements) = (dims.rows * dims.q_width(), dims.kv_rows * dims.kv_width());
    let [starts, capacity] = starts_of(cx, context.starts)?;
    let q = cx.typed("q", q, q_elements)?;
    let (k, v) = (cx.typed("k", k, kv_elements)?, cx.typed("v", v, kv_elements)?);
    let (y, lse) = (cx.typed("y", y, q_elements)?, cx.words("lse", lse, deltas(dims))?);
    if !needs_context(dims, context) {
        let workspace = match workspace(dims, cx.dtype) {
            0 => 0,
            bytes => cx.scratch.take(bytes)?,
        };
        if fused.forward(dims, cx.dtype, &Operands { q, k, v, y, lse, workspace }, cx.stream)? {
            return Ok(());
        }
    }
    let last = shape_and_context(cx, dims, context)?;
    let arguments = [&[starts, capacity, q, k, v, y, lse], last.as_slice()].concat();
    if let Some(Flash { kernels: [kernel, ..], functions: [function, ..], .. }) =
        tensor_cores(cx, dims, context, &[q, k, v, y])?
    {
        let grid = [blocks(kernel, dims.rows, dims.heads), 1, 1];
        return cx.launch(function, grid, kernel.threads, kernel.shared, &arguments);
    }
    let grid = [dims.rows.div_ceil(TILE), dims.heads, dims.head_dim.div_ceil(HEAD_ELEMENTS)];
    cx.launch(cuda_cores(cx, dims, context)?[0], grid, THREADS, 0, &arguments)
}

pub(super) fn backward(
    cx: &mut LaunchContext,
    dims: &AttentionDims,
    context: &AttentionContext,
    [q, k, v]: [Span; 3],
    [y, lse, dy]: [Span; 3],
    [dq, dk, dv]: [Span; 3],
    dbias: Option<BiasGrad>,
) -> Result<(), DeviceError> {
    check_context(cx, dims, context)?;
    let (q_elements, kv_elements) = (dims.rows * dims.q_width(), dims.kv_rows * dims.kv_width());
    let [starts, capacity] = starts_of(cx, context.starts)?;
    let (q, k) = (cx.typed("q", q, q_elements)?, cx.typed("k", k, kv_elements)?);
    let (v, y) = (cx.typed("v", v, kv_elements)?, cx.typed("y", y, q_elements)?);
    let (lse, dy) = (cx.words("lse", lse, deltas(dims))?, cx.typed("dy", dy, q_elements)?);
    let dq = cx.typed("dq", dq, q_elements)?;
    let (dk, dv) = (cx.typed("dk", dk, kv_elements)?, cx.typed("dv", dv, kv_elements)?);
    let delta = cx.scratch.take(4 * deltas(dims) as u64)?;
    let partials = dbias.map_or(Ok(0), |_| cx.scratch.take(bias_partials(dims)))?;
    let vectorized = dims.head_dim.is_multiple_of(VEC) && aligned16(&[y, dy]);
    let row_threads =
        if vectorized { (dims.head_dim / VEC).next_power_of_two().min(WARP as usize) } else { 0 };
    let rows_per_block = THREADS as usize / if vectorized { row_threads } else { WARP as usize };
    let [rows, heads, _, head_dim, ..] = shape(dims);
    let arguments = [y, dy, delta, rows, heads, head_dim, row_threads as u64];
    let grid = [deltas(dims).div_ceil(rows_per_block), 1, 1];
    cx.run(EntryPoint::AttentionDelta, &[cx.dtype], grid, THREADS, &arguments)?;
    let last = shape_and_context(cx, dims, context)?;
    let read = [starts, capacity, q, k, v, lse, dy, delta];
    let dq_arguments = [read.as_slice(), &[dq], &last, &[partials]].concat();
    let dkv_arguments = [read.as_slice(), &[dk, dv], &last].concat();
    let operands = [q, k, v, y, dy, dq, dk, dv];
    let tile_rows =
        if let Some(Flash { tiles, kernels, functions }) = tensor_cores(cx, dims, context, &operands)? {
            let ([_, dq_config, dkv_config], [_, dq_kernel, dkv_kernel]) = (kernels, functions);
            let grid = [blocks(dq_config, dims.rows, dims.heads), 1, 1];
            cx.launch(dq_kernel, grid, dq_config.threads, dq_config.shared, &dq_arguments)?;
            let grid = [blocks(dkv_config, dims.kv_rows, dims.kv_heads), 1, tiles.column_blocks()];
            cx.launch(dkv_kernel, grid, dkv_config.threads, dkv_config.shared, &dkv_arguments)?;
            dq_config.rows
        } else {
            let columns = dims.head_dim.div_ceil(HEAD_ELEMENTS);
            let [_, dq_kernel, dkv_kernel] = cuda_cores(cx, dims, context)?;
            cx.launch(dq_kernel, [dims.rows.div_ceil(TILE), dims.heads, columns], THREADS, 0, &dq_arguments)?;
            let grid = [dims.kv_rows.div_ceil(TILE), dims.kv_heads, columns];
            cx.launch(dkv_kernel, grid, THREADS, 0, &dkv_arguments)?;
            TILE
        };
    dbias.map_or(Ok(()), |dbias| bias_gradient(cx, dims, dbias, partials, dims.rows.div_ceil(tile_rows)))
}

/// Adds up the gradients of biases of all tiles of queries.
fn bias_gradient(
    cx: &LaunchContext,
    dims: &AttentionDims,
    dbias: BiasGrad,
    partials: Address,
    tiles: usize,
) -> Result<(), DeviceError> {
    let width = dims.heads * dims.distances();
    let to = cx.words("dbias", dbias.to, width)?;
    if !dbias.add {
        cx.driver.set_bytes(to, 0, 4 * width as u64, cx.stream)?;
    }
    rowwise::add_column_sums(cx, partials, to, [tiles, width])
}

cuda_kernel!(
    Attention { dims, context, q, k, v, y, lse },
    |dtype| {
        // Only cuDNN needs a workspace.
        if needs_context(&dims, &context) { NO_SCRATCH } else { [workspace(&dims, dtype), 0, 0] }
    },
    |cx, libraries| forward(cx, libraries.fused, &dims, &context, [q, k, v], y, lse)
);

cuda_kernel!(
    AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias },
    |_| [4 * deltas(&dims) as u64, if dbias.is_some() { bias_partials(&dims) } else { 0 }, 0],
    |cx| backward(cx, &dims, &context, [q, k, v], [y, lse, dy], [dq, dk, dv], dbias)
);
