//! How each register kernel cuts a product, and the scratch that follows from it.
//!
//! Scratch is the largest need of any kernel, whatever the machine at hand runs: a plan holds everywhere.

/// The cut of one register kernel.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Rows and columns of the register tile.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Rows and columns that one task computes.
    pub(super) block_rows: usize,
    pub(super) block_columns: usize,
    /// The longest sum that is taken in one block, and the length of blocks above it.
    pub(super) single: usize,
    pub(super) depth: usize,
    /// Panels are padded with zeros to a multiple of this depth.
    pub(super) step: usize,
    /// Bytes of a packed element.
    pub(super) bytes: usize,
}

/// A block of b is 1 MiB at most, half of the second-level cache.
pub(super) const TILES: Sizes = Sizes {
    rows: 32,
    columns: 32,
    block_rows: 1024,
    block_columns: 512,
    single: 1024,
    depth: 512,
    step: 32,
    bytes: 2,
};
pub(super) const ZMM: Sizes = Sizes {
    rows: 12,
    columns: 32,
    block_rows: 192,
    block_columns: 256,
    single: 256,
    depth: 256,
    step: 1,
    bytes: 4,
};
pub(super) const PLAIN: Sizes = Sizes { rows: 6, columns: 16, ..ZMM };
pub(super) const NEON: Sizes = Sizes { rows: 8, columns: 12, ..ZMM };

const ALL: [Sizes; 4] = [TILES, ZMM, PLAIN, NEON];

/// f32 elements that bring a buffer to a cache line.
pub(super) const ALIGN: usize = 16;

const fn min(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

impl Sizes {
    /// The length of the blocks that a sum of `k` terms is taken in.
    pub(super) const fn depth(&self, k: usize) -> usize {
        if k <= self.single { k } else { self.depth }
    }

    /// Packed elements of a panel of `lines` rows or columns.
    pub(super) const fn panel(&self, lines: usize, depth: usize) -> usize {
        lines * depth.next_multiple_of(self.step)
    }

    /// How often a product of panels of this depth can be asked to do something else.
    pub(super) const fn steps(&self, depth: usize) -> usize {
        if self.step == 1 { 1 } else { depth.div_ceil(self.step) }
    }

    /// f32 elements of the packed panels: one of a's and all of b's.
    const fn pack(&self, n: usize, k: usize) -> usize {
        let lines = self.rows + n.next_multiple_of(self.columns);
        (self.panel(lines, self.depth(k)) * self.bytes).div_ceil(4) + ALIGN
    }

    /// f32 elements of the sums: one tile where sums are taken in one block, else all of the task's.
    pub(super) const fn sums(&self, m: usize, n: usize, k: usize) -> usize {
        if k <= self.single {
            self.rows * self.columns
        } else {
            m.next_multiple_of(self.rows) * n.next_multiple_of(self.columns)
        }
    }

    const fn thread_scratch(&self, m: usize, n: usize, k: usize) -> usize {
        let (m, n) = (min(m, self.block_rows), min(n, self.block_columns));
        self.sums(m, n, k) + self.pack(n, k)
    }
}

/// f32 elements that [`super::block`] needs for packing b[k, n] and a panel of a.
pub(in crate::cpu) const fn pack_len(n: usize, k: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let found = ALL[at].pack(n, k);
        largest = if found > largest { found } else { largest };
        at += 1;
    }
    largest
}

/// f32 elements of scratch that [`super::matmul`] needs.
pub(in crate::cpu) const fn scratch(m: usize, n: usize, k: usize, threads: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let found = ALL[at].thread_scratch(m, n, k);
        largest = if found > largest { found } else { largest };
        at += 1;
    }
    largest * threads
}
