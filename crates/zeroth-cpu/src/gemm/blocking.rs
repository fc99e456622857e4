//! Cache and register blocking of each micro-kernel, and the scratch that follows from it.
//!
//! Scratch is the maximum over all micro-kernels, not the need of the one this machine runs, so a memory plan is valid on
//! every machine.

use crate::scratch_splitter::ALIGN;

/// Register and cache blocking of one micro-kernel, in BLIS notation.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    /// Rows and columns of the C tile held in registers.
    pub(super) mr: usize,
    pub(super) nr: usize,
    /// Panels packed together. With AMX and a column-major A, two panels share the cache lines they read; AVX-512 in f32
    /// multiplies a group of five panels while the next five are packed.
    pub(super) panels_per_pack: usize,
    /// Cache blocks by increasing `max_k`.
    blocks: &'static [CacheBlock],
    /// Cache blocks where A is column-major, so that it is packed again for every block of columns.
    blocks_transposed: &'static [CacheBlock],
    /// Packed panels are padded with zeros to a multiple of this depth.
    pub(super) k_align: usize,
    /// Bytes of a packed element.
    packed_bytes: usize,
}

/// The block of C that one task computes, for sums of at most `max_k` terms.
#[derive(Clone, Copy)]
struct CacheBlock {
    max_k: usize,
    mc: usize,
    nc: usize,
    /// Depth packed at a time. Longer sums keep their accumulators in scratch from one block of k to the next.
    kc: usize,
}

/// The packed B block of a task takes at most 1 MiB, half of L2.
pub(super) const AMX: Blocking = Blocking {
    mr: 32,
    nr: 32,
    panels_per_pack: 2,
    blocks: &[
        CacheBlock { max_k: 1024, mc: 4096, nc: 512, kc: 1024 },
        CacheBlock { max_k: 2048, mc: 4096, nc: 256, kc: 2048 },
        CacheBlock { max_k: 2304, mc: 4096, nc: 192, kc: 2304 },
        CacheBlock { max_k: 3072, mc: 2048, nc: 256, kc: 1536 },
        CacheBlock { max_k: usize::MAX, mc: 2048, nc: 256, kc: 2048 },
    ],
    blocks_transposed: &[
        CacheBlock { max_k: 1024, mc: 4096, nc: 512, kc: 1024 },
        CacheBlock { max_k: usize::MAX, mc: 1024, nc: 512, kc: 1024 },
    ],
    k_align: 32,
    packed_bytes: 2,
};
/// The packed B block of a task takes 0.94 MiB and two groups of A panels a third of that. Sums of up to 1024 terms never
/// leave the registers.
const AVX512_BLOCKS: &[CacheBlock] = &[
    CacheBlock { max_k: 1024, mc: 4096, nc: 240, kc: 1024 },
    CacheBlock { max_k: usize::MAX, mc: 2048, nc: 240, kc: 1024 },
];
pub(super) const AVX512: Blocking = Blocking {
    mr: 9,
    nr: 48,
    panels_per_pack: 10,
    blocks: AVX512_BLOCKS,
    blocks_transposed: AVX512_BLOCKS,
    k_align: 16,
    packed_bytes: 4,
};
/// One packed panel of A and one of B stay in L1.
const F32_BLOCKS: &[CacheBlock] = &[CacheBlock { max_k: usize::MAX, mc: 768, nc: 512, kc: 192 }];
pub(super) const PORTABLE: Blocking = Blocking {
    mr: 6,
    nr: 16,
    panels_per_pack: 1,
    blocks: F32_BLOCKS,
    blocks_transposed: F32_BLOCKS,
    k_align: 1,
    packed_bytes: 4,
};
pub(super) const NEON: Blocking = Blocking { mr: 8, nr: 12, ..PORTABLE };

/// Rows of a band in [`super::gemm_row_bands`]: a multiple of most kernels' `mr`.
pub(super) const BAND_ROWS: usize = 96;

const ALL: [Blocking; 5] = [AMX, AMX.for_layout(true), AVX512, PORTABLE, NEON];

const fn min(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

impl Blocking {
    /// The blocking for a row-major A, or for a column-major one.
    pub(super) const fn for_layout(self, transposed: bool) -> Self {
        Self { blocks: if transposed { self.blocks_transposed } else { self.blocks }, ..self }
    }

    /// Rows and columns of a task. Row blocks are split until `threads` can share the tasks evenly.
    pub(super) const fn task_shape(&self, m: usize, n: usize, k: usize, threads: usize) -> [usize; 2] {
        let block = self.block(k);
        let across = n.div_ceil(block.nc);
        let mut down = m.div_ceil(block.mc);
        while !(down * across).is_multiple_of(threads) && down * across < 4 * threads && down * self.mr < m {
            down += 1;
        }
        let down = if down == 0 { 1 } else { down };
        [min(block.mc, m.div_ceil(down).next_multiple_of(self.mr)), block.nc]
    }

    /// Most rows and columns of a task.
    pub(super) const fn cache_block(&self, k: usize) -> [usize; 2] {
        let block = self.block(k);
        [block.mc, block.nc]
    }

    /// The cache block for sums of `k` terms.
    const fn block(&self, k: usize) -> CacheBlock {
        let mut at = 0;
        while self.blocks[at].max_k < k {
            at += 1;
        }
        self.blocks[at]
    }

    /// KC: the depth that a sum of `k` terms is processed in.
    pub(super) const fn kc(&self, k: usize) -> usize {
        min(k, self.block(k).kc)
    }

    /// Packed elements of `lines` rows of A or columns of B.
    pub(super) const fn panel_len(&self, lines: usize, kc: usize) -> usize {
        lines * kc.next_multiple_of(self.k_align)
    }

    /// f32 elements of packed panels: one of A and all of B.
    const fn pack_len(&self, n: usize, k: usize) -> usize {
        let lines = self.mr + n.next_multiple_of(self.nr);
        (self.panel_len(lines, self.kc(k)) * self.packed_bytes).div_ceil(4) + ALIGN
    }

    /// f32 elements of the accumulators: two C tiles where k is one block, else every tile of the task.
    pub(super) const fn acc_len(&self, m: usize, n: usize, k: usize) -> usize {
        let two = 2 * self.mr * self.nr;
        let all = m.next_multiple_of(self.mr) * n.next_multiple_of(self.nr);
        if k <= self.kc(k) || all < two { two } else { all }
    }

    const fn thread_scratch(&self, m: usize, n: usize, k: usize) -> usize {
        let (m, n) = (min(m, self.block(k).mc), min(n, self.block(k).nc));
        let more = self.panel_len((self.panels_per_pack - 1) * self.mr, self.kc(k)) * self.packed_bytes;
        let (acc, strip) = (self.acc_len(m, n, k), if k <= SHORT_K { STRIP_PANELS * TILE } else { 0 });
        (if acc > strip { acc } else { strip }) + self.pack_len(n, k) + more.div_ceil(4)
    }
}

/// Most rows of A that AMX packs instead of reading them in place, so that B is: one block, hence B is read once.
pub(super) const EXCHANGED_ROWS: usize = 256;

/// Longest k of [`super::amx_short_k`], and panels of B that it multiplies before it stores their C tiles.
pub(super) const SHORT_K: usize = 64;
pub(super) const STRIP_PANELS: usize = 4;

/// Rows or columns of an AMX panel.
pub(crate) const PANEL: usize = 32;
/// bf16 elements of one tile step (32 terms) of an AMX panel, and f32 elements of its 32 × 32 C tile.
pub(crate) const TILE: usize = PANEL * PANEL;

/// Most panels of the wide operand per task of an AMX `gemm_tn`.
const WIDE_PANELS: usize = 8;
/// The same where the narrow operand exceeds `L2_STEPS` tile steps and is partly read from L3: each row fetched from L3 is
/// reused by more panels.
const WIDE_PANELS_L3: usize = 16;
const L2_STEPS: usize = 256;
/// Most tile steps of the narrow operand, and of one panel. Longer sums would need accumulators kept in memory.
const MAX_STEPS: usize = 768;
const MAX_PANEL_STEPS: usize = 32;

/// Blocking of an AMX GEMM that contracts over the rows of both operands.
#[derive(Clone, Copy)]
pub(super) struct GemmTnBlocking {
    /// Panels of the narrow and of the wide operand.
    pub(super) narrow: usize,
    pub(super) wide: usize,
    /// Tile steps of a panel.
    pub(super) steps: usize,
}

impl GemmTnBlocking {
    /// The blocking of a[k, m]ᵀ · b[k, n]; `None` where the narrow operand is too large to stay in cache.
    pub(super) const fn of([m, n, k]: [usize; 3]) -> Option<Self> {
        let (narrow, steps) = (min(m, n).div_ceil(PANEL), k.div_ceil(PANEL));
        let fits = narrow > 0 && steps > 0 && steps <= MAX_PANEL_STEPS && narrow * steps <= MAX_STEPS;
        let wide = (if m > n { m } else { n }).div_ceil(PANEL);
        if fits { Some(Self { narrow, wide, steps }) } else { None }
    }

    /// Whether the packed narrow operand stays in L2.
    pub(super) const fn fits_l2(self) -> bool {
        self.narrow * self.steps <= L2_STEPS
    }

    /// Most panels of the wide operand per task; tasks are about equal.
    const fn max_panels_per_task(self) -> usize {
        let most = if self.fits_l2() { WIDE_PANELS } else { WIDE_PANELS_L3 };
        self.wide.div_ceil(self.wide.div_ceil(most))
    }

    /// Panels of the wide operand per task, fewer than the maximum where `threads` could not share the tasks evenly.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn panels_per_task(self, threads: usize) -> usize {
        let mut panels = self.max_panels_per_task();
        while panels > 1
            && !self.wide.div_ceil(panels).is_multiple_of(threads)
            && self.wide.div_ceil(panels) < 4 * threads
        {
            panels -= 1;
        }
        panels
    }

    /// f32 elements of the packed narrow operand, which all threads share.
    pub(super) const fn shared_len(self) -> usize {
        self.narrow * self.steps * TILE / 2 + ALIGN
    }
}

/// Most panels of the narrow operand of [`super::amx_narrow_tn`].
const NARROW_PANELS: usize = 2;
/// Most panels of the wide operand of a task there: long reads along its rows engage the hardware prefetcher.
const LONG_PANELS: usize = 32;
/// Tile steps of a block of rows there: a packed block of the wide operand takes at most 256 KiB, its C tiles as much.
pub(super) const NARROW_STEPS: usize = 4;

/// Blocking of an AMX GEMM that contracts over the rows of both operands, one of which has a few columns.
#[derive(Clone, Copy)]
pub(super) struct NarrowTnBlocking {
    /// Panels of the narrow and of the wide operand.
    pub(super) narrow: usize,
    wide: usize,
    /// Tile steps of a panel.
    pub(super) steps: usize,
}

impl NarrowTnBlocking {
    /// The blocking of a[k, m]ᵀ · b[k, n]; `None` where both operands are wide, or a [`GemmTnBlocking`] is as good.
    pub(super) const fn of([m, n, k]: [usize; 3]) -> Option<Self> {
        let (narrow, steps) = (min(m, n).div_ceil(PANEL), k.div_ceil(PANEL));
        let wide = (if m > n { m } else { n }).div_ceil(PANEL);
        let fits =
            narrow > 0 && narrow <= NARROW_PANELS && steps > NARROW_STEPS && narrow * steps <= MAX_STEPS;
        if fits { Some(Self { narrow, wide, steps }) } else { None }
    }

    /// Panels of the wide operand per task: `threads` share the tasks evenly.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn panels_per_task(self, threads: usize) -> usize {
        self.wide.div_ceil(self.wide.div_ceil(LONG_PANELS).next_multiple_of(threads))
    }

    /// f32 elements of the packed narrow operand, which all threads share.
    pub(super) const fn shared_len(self) -> usize {
        self.narrow * self.steps * TILE / 2 + ALIGN
    }

    /// f32 elements of scratch: the narrow operand, and for each thread C tiles, a transposed one and a packed block.
    const fn scratch(self, threads: usize) -> usize {
        let panels = min(self.wide, LONG_PANELS);
        self.shared_len()
            + threads * ((self.narrow * panels + 1) * TILE + panels * NARROW_STEPS * TILE / 2 + ALIGN)
    }
}

/// f32 elements of scratch that [`super::gemm_tn`] needs.
pub(crate) const fn gemm_tn_scratch(m: usize, n: usize, k: usize, threads: usize) -> usize {
    let blocked = scratch(m, n, k, threads);
    if let Some(narrow) = NarrowTnBlocking::of([m, n, k]) {
        let narrow = narrow.scratch(threads);
        return if narrow > blocked { narrow } else { blocked };
    }
    let Some(blocking) = GemmTnBlocking::of([m, n, k]) else { return blocked };
    // Packed panels of the wide operand, two C tiles and a transposed one.
    let thread = blocking.max_panels_per_task() * blocking.steps * TILE / 2 + 3 * TILE + ALIGN;
    let amx = blocking.shared_len() + threads * thread;
    if amx > blocked { amx } else { blocked }
}

/// f32 elements of scratch that [`super::gemm_row_bands`] needs: C of a band, a packed panel of A and all of b[k, n].
pub(crate) const fn band_scratch(n: usize, k: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let blocking = ALL[at];
        let elements = blocking.panel_len(blocking.mr, blocking.kc(k))
            + blocking.panel_len(n.next_multiple_of(blocking.nr), k);
        let found = (elements * blocking.packed_bytes).div_ceil(4);
        largest = if found > largest { found } else { largest };
        at += 1;
    }
    BAND_ROWS * n + largest + ALIGN
}

/// f32 elements that [`super::gemm_serial`] needs to pack b[k, n] and a panel of A.
pub(crate) const fn pack_len(n: usize, k: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let found = ALL[at].pack_len(n, k);
        largest = if found > largest { found } else { largest };
        at += 1;
    }
    largest
}

/// f32 elements of scratch that [`super::gemm`] needs.
pub(crate) const fn scratch(m: usize, n: usize, k: usize, threads: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let found = ALL[at].thread_scratch(m, n, k);
        largest = if found > largest { found } else { largest };
        at += 1;
    }
    largest * threads
}

/// f32 elements of scratch that are enough for any k up to `most`: it does not grow with k where cache blocks change.
pub(crate) fn scratch_up_to(m: usize, n: usize, most: usize, threads: usize) -> usize {
    let ends = ALL.into_iter().flat_map(|blocking| blocking.blocks).map(|block| block.max_k.min(most));
    ends.map(|k| scratch(m, n, k, threads)).max().unwrap_or(0)
}
