//! Blocking of the head on AMX, and the scratch that follows from it.
//!
//! Scratch is the maximum over all instruction sets, so a memory plan is valid on every machine.

use half::bf16;

use crate::gemm::{PANEL, TILE};
use crate::scratch_splitter::ALIGN;
use zeroth_kernel::HeadLossDims;

/// Lanes in which the exponentials of a row are summed.
pub(super) const LANES: usize = 16;
/// Largest hidden size: dx is accumulated block by block of the vocabulary, and with wider models too small a block fits in L2.
const WIDEST: usize = 1024;
/// Most panels of a vocabulary block, and panels of both packed forms that fit in L2.
const BLOCK: usize = 16;
const CACHED: usize = 256;
/// Tile steps of x that fit in L2 during the dw pass.
pub(super) const RESIDENT: usize = 512;
/// Panels of the vocabulary per task of the dw pass: few, so that they are still in cache when they are rounded. If x exceeds
/// L2, every task reads all of it, so tasks are larger.
const CHUNK: usize = 2;
const LARGER_CHUNK: usize = 16;

/// Dimensions of the head in panels.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    /// Panels of a vocabulary block.
    pub(super) block: usize,
}

impl Panels {
    /// The dimensions of a slice; `None` where AMX does not run it.
    pub(super) fn of(dims: HeadLossDims) -> Option<Self> {
        let hidden = dims.hidden.div_ceil(PANEL);
        (1..=WIDEST).contains(&dims.hidden).then(|| Self {
            rows: dims.slice_rows::<bf16>().div_ceil(PANEL),
            hidden,
            vocab: dims.vocab.div_ceil(PANEL),
            block: (CACHED / hidden).min(BLOCK),
        })
    }

    /// f32 elements that all threads share: exponentials; x packed for logits and for dw; a block of w packed for logits and for dx;
    /// accumulators of dx; lanes and row statistics.
    pub(super) fn shared(self) -> usize {
        let Self { rows, hidden, vocab, block } = self;
        let packed = rows * vocab + 2 * rows * hidden + 2 * block * hidden;
        packed * TILE / 2 + rows * hidden * TILE + rows * PANEL * (2 * LANES + ROW_STATS_LEN) + rows + ALIGN
    }

    /// f32 elements per thread: two C tiles and the exponentials of a panel of rows; gathered label rows of w, unpacked and packed.
    pub(super) fn thread(self) -> usize {
        2 * TILE + self.block * TILE / 2 + self.hidden * TILE + ALIGN
    }

    /// Panels of the vocabulary per task of the dw pass.
    pub(super) const fn chunk(self) -> usize {
        if self.rows * self.hidden <= RESIDENT { CHUNK } else { LARGER_CHUNK }
    }

    /// f32 elements per thread for the unrounded gradient of a task.
    const fn chunk_sums(self) -> usize {
        self.chunk() * self.hidden * TILE + ALIGN
    }
}

/// f32 elements of the statistics of a row.
pub(super) const ROW_STATS_LEN: usize = 4;

/// f32 elements of scratch with a pool of `threads`; `rounds` for a rounded dw.
pub(super) fn scratch(dims: HeadLossDims, threads: usize, rounds: bool) -> usize {
    let chunk = |panels: Panels| if rounds { panels.chunk_sums() } else { 0 };
    Panels::of(dims).map_or(0, |panels| panels.shared() + threads * (panels.thread() + chunk(panels)))
}
