//! How AMX tiles cut the head, and the scratch that follows from it.
//!
//! Scratch is the largest need of any path, whatever the machine at hand runs: a plan holds everywhere.

use half::bf16;

use crate::gemm::{ALIGN, PANEL, TILE};
use zeroth_kernel::HeadLossDims;

/// Lanes that a row's exponentials are summed in.
pub(super) const LANES: usize = 16;
/// The widest model whose sums of dx are added to block by block of the vocabulary: of wider ones too few tokens of the
/// vocabulary fit the cache.
const WIDEST: usize = 1024;
/// Panels of a block at most, and how many in all of both packed forms the second-level cache has room for.
const BLOCK: usize = 16;
const CACHED: usize = 256;
/// Steps of x that the second-level cache has room for when gradients of w are computed.
pub(super) const RESIDENT: usize = 512;
/// Panels of the vocabulary whose gradients a thread computes at a time: few, to be in the cache when they are rounded. Where x
/// does not stay there, each time reads all of it again.
const CHUNK: usize = 2;
const LARGER_CHUNK: usize = 16;

/// The head in panels.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    /// Panels of the vocabulary that are taken together.
    pub(super) block: usize,
}

impl Panels {
    /// The panels of a slice; `None` where tiles do not take it.
    pub(super) fn of(dims: HeadLossDims) -> Option<Self> {
        let hidden = dims.hidden.div_ceil(PANEL);
        (1..=WIDEST).contains(&dims.hidden).then(|| Self {
            rows: dims.slice_rows::<bf16>().div_ceil(PANEL),
            hidden,
            vocab: dims.vocab.div_ceil(PANEL),
            block: (CACHED / hidden).min(BLOCK),
        })
    }

    /// f32 elements of what all threads share: exponentials; x as rows and as terms of dw, a block of w in two forms, sums of dx;
    /// lanes and marks.
    pub(super) fn shared(self) -> usize {
        let Self { rows, hidden, vocab, block } = self;
        let packed = rows * vocab + 2 * rows * hidden + 2 * block * hidden;
        packed * TILE / 2 + rows * hidden * TILE + rows * PANEL * (2 * LANES + MARK) + rows + ALIGN
    }

    /// f32 elements of a thread: two tiles of sums and a row panel's exponentials; weights of labels as they stand and packed.
    pub(super) fn thread(self) -> usize {
        2 * TILE + self.block * TILE / 2 + self.hidden * TILE + ALIGN
    }

    /// Panels of the vocabulary whose gradients a thread computes at a time.
    pub(super) const fn chunk(self) -> usize {
        if self.rows * self.hidden <= RESIDENT { CHUNK } else { LARGER_CHUNK }
    }

    /// f32 elements of a thread for a chunk of the gradient that is yet to be rounded.
    const fn chunk_sums(self) -> usize {
        self.chunk() * self.hidden * TILE + ALIGN
    }
}

/// f32 elements of a row's mark.
pub(super) const MARK: usize = 4;

/// f32 elements of scratch with a pool of `threads`, for a gradient of w that is rounded or not.
pub(super) fn scratch(dims: HeadLossDims, threads: usize, rounds: bool) -> usize {
    let chunk = |panels: Panels| if rounds { panels.chunk_sums() } else { 0 };
    Panels::of(dims).map_or(0, |panels| panels.shared() + threads * (panels.thread() + chunk(panels)))
}
