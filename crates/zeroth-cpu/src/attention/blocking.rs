//! Tile sizes of attention, and the scratch that follows from them.
//!
//! Scratch is the maximum over all instruction sets, so a memory plan is valid on every machine.

use crate::gemm::pack_len;
use crate::scratch_splitter::ALIGN;
use zeroth_kernel::AttentionDims;

/// Queries and keys of a tile, without AMX.
pub(super) const QUERIES: usize = 96;
pub(super) const KEYS: usize = 128;

/// Queries or keys of an AMX panel.
pub(super) const PANEL: usize = 32;
/// Queries of a task of the AMX forward.
pub(super) const BLOCK: usize = 4 * PANEL;
/// Panels of queries or keys whose weights AMX buffers before they are multiplied.
pub(super) const SPAN: usize = 8;
/// bf16 elements of a tile step of a panel.
const STEP: usize = PANEL * PANEL;

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// Head dimension, padded to whole tile steps.
pub(super) const fn padded(dims: &AttentionDims) -> usize {
    dims.head_dim.next_multiple_of(PANEL)
}

/// Most full panels in the packed rows of k and v: panels of a sequence start at its first row, so at most one starts in every 32
/// rows.
pub(super) const fn slots(dims: &AttentionDims) -> usize {
    dims.kv_rows.div_ceil(PANEL)
}

/// bf16 elements of a panel.
pub(super) const fn panel(dims: &AttentionDims) -> usize {
    PANEL * padded(dims)
}

/// f32 elements of the packed k and v that all tasks of the AMX forward share.
pub(super) const fn forward_shared(dims: &AttentionDims) -> usize {
    slots(dims) * dims.kv_heads * panel(dims) + ALIGN
}

/// f32 elements of the biases of a head as AMX reads them: those of all distances up to `most`, and of the tiles around them.
pub(super) const fn bias_table(most: usize) -> usize {
    2 * (most + 2 * (PANEL - 1)) + 1
}

/// f32 elements of [`bias_table`], in whole cache lines, where there are biases.
pub(super) const fn bias_elements(dims: &AttentionDims) -> usize {
    match dims.max_distance {
        Some(most) => bias_table(most).next_multiple_of(ALIGN),
        None => 0,
    }
}

/// f32 elements of a tile whose rows are shifted so that its diagonals are columns.
pub(super) const SKEWED: usize = PANEL * 2 * PANEL;

/// f32 elements per thread of the AMX forward: packed queries and the last keys and values of a sequence; two tiles of scores;
/// packed weights; accumulators; biases.
const fn forward_thread(dims: &AttentionDims) -> usize {
    (BLOCK / PANEL + 2) * panel(dims) / 2
        + 2 * STEP
        + SPAN * STEP / 2
        + panel(dims)
        + bias_elements(dims)
        + ALIGN
}

/// f32 elements per thread of the AMX backward: seven packed forms of a sequence and three accumulators; lse and delta; two
/// pairs of score tiles; packed weights and gradients of a panel of keys, and gradients of a span of panels; biases and a shifted
/// tile of their gradients.
const fn backward_thread(dims: &AttentionDims) -> usize {
    let (rows, kv_rows) = (dims.rows.div_ceil(PANEL), dims.kv_rows.div_ceil(PANEL));
    let (queries, keys) = (rows * panel(dims), kv_rows * panel(dims));
    let tiles = 4 * STEP + (2 + SPAN) * SPAN * STEP / 2;
    let biases = if dims.max_distance.is_some() { bias_elements(dims) + SKEWED } else { 0 };
    // q and dout in two forms each and dq; k in two forms, v, dk and dv.
    let sequence = 3 * queries + 7 * keys / 2;
    sequence + 2 * rows * PANEL + tiles + biases + ALIGN
}

/// f32 elements of the sums along diagonals.
pub(super) const fn diagonals(dims: &AttentionDims) -> usize {
    match dims.max_distance {
        Some(_) => dims.heads * (dims.rows + dims.kv_rows),
        None => 0,
    }
}

const fn plain_forward_thread(dims: &AttentionDims) -> usize {
    let pack = max(pack_len(KEYS, dims.head_dim), pack_len(dims.head_dim, KEYS));
    QUERIES * (KEYS + dims.head_dim + 2) + pack
}

const fn plain_backward_thread(dims: &AttentionDims) -> usize {
    let head = dims.head_dim;
    let pack = max(pack_len(KEYS, head), max(pack_len(head, KEYS), pack_len(head, QUERIES)));
    2 * QUERIES * KEYS + dims.rows * (head + 2) + dims.kv_rows * 2 * head + pack
}

/// f32 elements of scratch that [`super::attention`] needs with a pool of `threads`.
pub const fn attention_scratch(dims: &AttentionDims, threads: usize) -> usize {
    max(forward_shared(dims) + forward_thread(dims) * threads, plain_forward_thread(dims) * threads)
}

/// f32 elements of scratch that [`super::attention_backward`] needs with a pool of `threads`.
pub const fn attention_backward_scratch(dims: &AttentionDims, threads: usize) -> usize {
    diagonals(dims) + max(backward_thread(dims), plain_backward_thread(dims)) * threads
}
