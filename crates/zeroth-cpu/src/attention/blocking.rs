//! Tiles of attention, and the scratch that follows from them.
//!
//! Scratch is the largest need of any path, whatever the machine at hand runs: a plan holds everywhere.

use crate::gemm::pack_len;
use zeroth_kernel::AttentionDims;

/// Queries and keys of a tile, on all paths but AMX's.
pub(super) const QUERIES: usize = 96;
pub(super) const KEYS: usize = 128;

/// Queries or keys of a panel for AMX: two tiles.
pub(super) const PANEL: usize = 32;
/// Queries of a task of AMX's forward.
pub(super) const BLOCK: usize = 4 * PANEL;
/// Panels of queries or keys whose weights are kept with AMX until they are multiplied.
pub(super) const SPAN: usize = 8;
/// bf16 elements of a step of a panel.
const STEP: usize = PANEL * PANEL;

/// f32 elements that bring a buffer to a cache line.
pub(super) const ALIGN: usize = 16;

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// The elements of a head, whole steps of 32.
pub(super) const fn padded(dims: &AttentionDims) -> usize {
    dims.head_dim.next_multiple_of(PANEL)
}

/// Panels that a pack can have in whole: those of a sequence begin at its first row, so a panel begins in each 32 rows at
/// most.
pub(super) const fn slots(dims: &AttentionDims) -> usize {
    dims.rows.div_ceil(PANEL)
}

/// bf16 elements of a panel.
pub(super) const fn panel(dims: &AttentionDims) -> usize {
    PANEL * padded(dims)
}

/// f32 elements of k and v as AMX's forward keeps them for all tasks.
pub(super) const fn forward_shared(dims: &AttentionDims) -> usize {
    slots(dims) * dims.kv_heads * panel(dims) + ALIGN
}

/// What a thread of AMX's forward needs: queries, the sequence's last keys and values in bf16; two tiles of scores; weights
/// in bf16; sums.
const fn forward_thread(dims: &AttentionDims) -> usize {
    (BLOCK / PANEL + 2) * panel(dims) / 2 + 2 * STEP + SPAN * STEP / 2 + panel(dims) + ALIGN
}

/// What a thread of AMX's backward needs: seven packed forms of the sequence and three sums; lse and delta; two times two
/// tiles of scores; weights and gradients of a panel of keys, and gradients of a span of them, in bf16.
const fn backward_thread(dims: &AttentionDims) -> usize {
    let sequence = slots(dims) * panel(dims);
    let tiles = 4 * STEP + (2 + SPAN) * SPAN * STEP / 2;
    7 * sequence / 2 + 3 * sequence + 2 * slots(dims) * PANEL + tiles + ALIGN
}

const fn plain_forward_thread(dims: &AttentionDims) -> usize {
    let pack = max(pack_len(KEYS, dims.head_dim), pack_len(dims.head_dim, KEYS));
    QUERIES * (KEYS + dims.head_dim + 2) + pack
}

const fn plain_backward_thread(dims: &AttentionDims) -> usize {
    let head = dims.head_dim;
    let pack = max(pack_len(KEYS, head), max(pack_len(head, KEYS), pack_len(head, QUERIES)));
    2 * QUERIES * KEYS + dims.rows * (3 * head + 2) + pack
}

/// f32 elements of scratch that [`super::attention`] needs with a pool of `threads`.
pub const fn attention_scratch(dims: &AttentionDims, threads: usize) -> usize {
    max(forward_shared(dims) + forward_thread(dims) * threads, plain_forward_thread(dims) * threads)
}

/// f32 elements of scratch that [`super::attention_backward`] needs with a pool of `threads`.
pub const fn attention_backward_scratch(dims: &AttentionDims, threads: usize) -> usize {
    max(backward_thread(dims), plain_backward_thread(dims)) * threads
}
