//! Attention on a card: by NVIDIA's library where that is faster, else by our own kernels. These are on the tensor cores
//! where the type has 16 bits and the head is a multiple of 16 bytes, else in plain f32 arithmetic, with a block for every
//! tile of 64 rows, head, and 128 elements of a head.

use zeroth_base::DType;

use super::cudnn::{Fused, Operands, workspace};
use super::driver::{Address, Handle};
use super::flash::{Cuts, Part, program_head};
use super::line::{LOT, Line, THREADS, WARP, float, in_sixteens};
use super::programs::{Attention, Entry};
use super::scratch::deltas;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::{DeviceError, Span};

const TILE: usize = 64;
/// Elements of a head that a block has.
const ELEMENTS: usize = 128;
/// Rows whose places fit into the numbers that the tensor cores' kernels count with.
const MOST_ROWS: usize = 1 << 30;

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

/// The functions of the tensor cores, and how they are cut; `None` where the plain kernels are to do it. `operands` are
/// addresses of tensors.
fn tensor_cores(
    line: &Line,
    dims: &AttentionDims,
    operands: &[Address],
) -> Result<Option<(Cuts, [Handle; 3])>, DeviceError> {
    let within = dims.rows <= MOST_ROWS && i32::try_from(dims.heads * dims.head_dim).is_ok();
    let fitting = line.dtype != DType::F32 && in_sixteens(operands) && within && dims.scale > 0.0;
    let Some(head) = program_head(dims.head_dim).filter(|_| fitting) else { return Ok(None) };
    let functions = line.functions.attention(line.driver, Attention::TensorCores(head), line.dtype)?;
    Ok(functions.map(|functions| (line.functions.cuts(head), functions)))
}

fn plain(line: &Line) -> Result<[Handle; 3], DeviceError> {
    let functions = line.functions.attention(line.driver, Attention::Plain, line.dtype)?;
    Ok(functions.expect("the plain kernels ask for no shared memory"))
}

/// A block for every tile of every head.
fn items(part: Part, rows: usize, heads: usize) -> usize {
    rows.div_ceil(part.rows) * heads
}

pub(super) fn forward(
    line: &mut Line,
    fused: &mut Fused,
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
    let workspace = match workspace(dims, line.dtype) {
        0 => 0,
        bytes => line.scratch.take(bytes)?,
    };
    if fused.forward(dims, line.dtype, &Operands { q, k, v, y, lse, workspace }, line.stream)? {
        return Ok(());
    }
    let [rows, heads, kv_heads, head_dim, window, scale] = shape(dims);
    let arguments = [starts, room, q, k, v, y, lse, rows, heads, kv_heads, head_dim, window, scale];
    if let Some((cuts, [function, ..])) = tensor_cores(line, dims, &[q, k, v, y])? {
        let [part, ..] = cuts.parts();
        let grid = [items(part, dims.rows, dims.heads), 1, 1];
        return line.launch(function, grid, part.threads, part.shared, &arguments);
    }
    let grid = [dims.rows.div_ceil(TILE), dims.heads, dims.head_dim.div_ceil(ELEMENTS)];
    line.launch(plain(line)?[0], grid, THREADS, 0, &arguments)
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
    let lots = dims.head_dim.is_multiple_of(LOT) && in_sixteens(&[y, dy]);
    let span = if lots { (dims.head_dim / LOT).next_power_of_two().min(WARP as usize) } else { 0 };
    let at_once = THREADS as usize / if lots { span } else { WARP as usize };
    let arguments = [y, dy, delta, rows, heads, head_dim, span as u64];
    let grid = [deltas(dims).div_ceil(at_once), 1, 1];
    line.run(Entry::AttentionDelta, &[line.dtype], grid, THREADS, &arguments)?;
    let to_q = [starts, room, q, k, v, lse, dy, delta, dq, rows, heads, kv_heads, head_dim, window, scale];
    let to_kv =
        [starts, room, q, k, v, lse, dy, delta, dk, dv, rows, heads, kv_heads, head_dim, window, scale];
    if let Some((cuts, [_, queries, keys])) = tensor_cores(line, dims, &[q, k, v, y, dy, dq, dk, dv])? {
        let [_, part, of_keys] = cuts.parts();
        let grid = [items(part, dims.rows, dims.heads), 1, 1];
        line.launch(queries, grid, part.threads, part.shared, &to_q)?;
        let grid = [items(of_keys, dims.rows, dims.kv_heads), 1, cuts.shares()];
        return line.launch(keys, grid, of_keys.threads, of_keys.shared, &to_kv);
    }
    let (tiles, parts) = (dims.rows.div_ceil(TILE), dims.head_dim.div_ceil(ELEMENTS));
    let [_, queries, keys] = plain(line)?;
    line.launch(queries, [tiles, dims.heads, parts], THREADS, 0, &to_q)?;
    line.launch(keys, [tiles, dims.kv_heads, parts], THREADS, 0, &to_kv)
}
