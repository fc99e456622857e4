//! Attention over cached keys and values, and the copies that fill the cache.

use zeroth_kernel::{AttentionDims, CacheRange, DeviceError, Span, StoreRowsDims};

use super::attention;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, THREADS};

/// Threads per block, and elements of a head that it computes (`THREADS` in cached_attention.cu).
const BLOCK: usize = 128;

/// Copies each row of x to its row of the cache.
pub(super) fn store_rows(
    cx: &LaunchContext,
    dims: StoreRowsDims,
    ranges: Span,
    x: Span,
    cache: Span,
) -> Result<(), DeviceError> {
    let StoreRowsDims { rows, width, cached, .. } = dims;
    let ranges = cx.sized("ranges", ranges, rows, size_of::<CacheRange>() as u64)?;
    let (x, cache) = (cx.typed("x", x, rows * width)?, cx.typed("cache", cache, cached * width)?);
    let arguments = [ranges, x, cache, width as u64, cached as u64];
    cx.run(EntryPoint::StoreRows, &[cx.dtype], [rows, 1, 1], THREADS, &arguments)
}

/// Attention of each row over its range of the cache.
pub(super) fn forward(
    cx: &LaunchContext,
    dims: &AttentionDims,
    cached: usize,
    [ranges, q, k, v]: [Span; 4],
    bias: Option<Span>,
    y: Span,
) -> Result<(), DeviceError> {
    attention::check(cx, dims, bias)?;
    let ranges = cx.sized("ranges", ranges, dims.rows, size_of::<CacheRange>() as u64)?;
    let (q_elements, kv_elements) = (dims.rows * dims.q_width(), cached * dims.kv_width());
    let (q, y) = (cx.typed("q", q, q_elements)?, cx.typed("y", y, q_elements)?);
    let (k, v) = (cx.typed("k", k, kv_elements)?, cx.typed("v", v, kv_elements)?);
    let [bias, most] = attention::biases(cx, dims, bias)?;
    let [_, heads, kv_heads, head_dim, window, scale] = attention::shape(dims);
    let arguments = [ranges, q, k, v, y, heads, kv_heads, head_dim, cached as u64, window, scale, bias, most];
    let grid = [dims.rows, dims.heads, dims.head_dim.div_ceil(BLOCK)];
    cx.run(EntryPoint::CachedAttention, &[cx.dtype], grid, BLOCK as u32, &arguments)
}

cuda_kernel!(StoreRows { dims, ranges, x, cache }, |_| NO_SCRATCH, |cx| store_rows(
    cx, dims, ranges, x, cache
));

cuda_kernel!(CachedAttention { dims, cached, ranges, bias, q, k, v, y }, |_| NO_SCRATCH, |cx| forward(
    cx,
    &dims,
    cached,
    [ranges, q, k, v],
    bias,
    y
));
