//! Attention on a card: a block for every tile of 64 rows, head, and 128 elements of a head.

use super::driver::Address;
use super::line::{Line, THREADS, float};
use super::programs::Entry;
use super::scratch::deltas;
use crate::cpu::AttentionDims;
use crate::{DeviceError, Span};

const TILE: usize = 64;
/// Elements of a head that a block has.
const ELEMENTS: usize = 128;

fn check(line: &Line, dims: &AttentionDims) -> Result<(), DeviceError> {
    let AttentionDims { heads, kv_heads, window, .. } = *dims;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(line.refuse(format!("{heads} heads cannot share {kv_heads} kv heads")));
    }
    if window == Some(0) {
        return Err(line.refuse("a window of 0 keys leaves nothing to attend to".to_owned()));
    }
    Ok(())
}

/// Where sequences begin, and how many entries fit behind the count.
pub(super) fn starts_of(line: &Line, starts: Span) -> Result<[Address; 2], DeviceError> {
    let entries = (starts.bytes / 4) as usize;
    let at = line.words("starts", starts, entries)?;
    if entries < 2 {
        return Err(line.refuse("`starts` has no room for a count and an entry".to_owned()));
    }
    Ok([at, entries as u64 - 1])
}

/// Rows, heads, kv heads, elements of a head, window (0: none) and scale, as all functions here take them.
fn shape(dims: &AttentionDims) -> [u64; 6] {
    let AttentionDims { rows, heads, kv_heads, head_dim, window, scale } = *dims;
    let sizes = [rows, heads, kv_heads, head_dim, window.map_or(0, |window| window.min(i32::MAX as usize))];
    let [rows, heads, kv_heads, head_dim, window] = sizes.map(|size| size as u64);
    [rows, heads, kv_heads, head_dim, window, float(scale)]
}

pub(super) fn forward(
    line: &Line,
    dims: &AttentionDims,
    starts: Span,
    [q, k, v]: [Span; 3],
    y: Span,
    lse: Span,
) -> Result<(), DeviceError> {
    check(line, dims)?;
    let (q_elements, kv_elements) =
        (dims.rows * dims.heads * dims.head_dim, dims.rows * dims.kv_heads * dims.head_dim);
    let [starts, room] = starts_of(line, starts)?;
    let q = line.typed("q", q, q_elements)?;
    let (k, v) = (line.typed("k", k, kv_elements)?, line.typed("v", v, kv_elements)?);
    let (y, lse) = (line.typed("y", y, q_elements)?, line.words("lse", lse, deltas(dims))?);
    let [rows, heads, kv_heads, head_dim, window, scale] = shape(dims);
    let arguments = [starts, room, q, k, v, y, lse, rows, heads, kv_heads, head_dim, window, scale];
    let grid = [dims.rows.div_ceil(TILE), dims.heads, dims.head_dim.div_ceil(ELEMENTS)];
    line.run(Entry::Attention, &[line.dtype], grid, THREADS, &arguments)
}

pub(super) fn backward(
    line: &mut Line,
    dims: &AttentionDims,
    starts: Span,
    [q, k, v]: [Span; 3],
    [y, lse, dy]: [Span; 3],
    [dq, dk, dv]: [Span; 3],
) -> Result<(), DeviceError> {
    check(line, dims)?;
    let (q_elements, kv_elements) =
        (dims.rows * dims.heads * dims.head_dim, dims.rows * dims.kv_heads * dims.head_dim);
    let [starts, room] = starts_of(line, starts)?;
    let (q, k) = (line.typed("q", q, q_elements)?, line.typed("k", k, kv_elements)?);
    let (v, y) = (line.typed("v", v, kv_elements)?, line.typed("y", y, q_elements)?);
    let (lse, dy) = (line.words("lse", lse, deltas(dims))?, line.typed("dy", dy, q_elements)?);
    let dq = line.typed("dq", dq, q_elements)?;
    let (dk, dv) = (line.typed("dk", dk, kv_elements)?, line.typed("dv", dv, kv_elements)?);
    let delta = line.scratch.take(4 * deltas(dims) as u64)?;
    let [rows, heads, kv_heads, head_dim, window, scale] = shape(dims);
    line.warps(Entry::AttentionDelta, deltas(dims), &[y, dy, delta, rows, heads, head_dim])?;
    let (tiles, parts) = (dims.rows.div_ceil(TILE), dims.head_dim.div_ceil(ELEMENTS));
    let arguments =
        [starts, room, q, k, v, lse, dy, delta, dq, rows, heads, kv_heads, head_dim, window, scale];
    line.run(Entry::AttentionDq, &[line.dtype], [tiles, dims.heads, parts], THREADS, &arguments)?;
    let arguments =
        [starts, room, q, k, v, lse, dy, delta, dk, dv, rows, heads, kv_heads, head_dim, window, scale];
    line.run(Entry::AttentionDkv, &[line.dtype], [tiles, dims.kv_heads, parts], THREADS, &arguments)
}
