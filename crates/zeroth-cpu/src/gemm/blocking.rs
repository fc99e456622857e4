//! How each register kernel cuts a product, and the scratch that follows from it.
//!
//! Scratch is the largest need of any kernel, whatever the machine at hand runs: a plan holds everywhere.

/// The cut of one register kernel.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Rows and columns of the register tile.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Panels that a task packs at a time: where the rows of a term lie side by side, two share what the processor reads. (Tiles pack
    /// all columns at a time if these lie so.)
    /// AVX-512 in f32: a group of five that is multiplied, and one that is filled meanwhile.
    pub(super) panels: usize,
    /// Tasks, by the length of the sums, the shortest first.
    cuts: &'static [Cut],
    /// The same where rows of a are packed, for every band of columns anew.
    turned: &'static [Cut],
    /// Panels are padded with zeros to a multiple of this depth.
    pub(super) step: usize,
    /// Bytes of a packed element.
    bytes: usize,
}

/// What one task computes where sums have `longest` terms at most.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    longest: usize,
    rows: usize,
    columns: usize,
    /// Terms that are packed at a time. Longer sums are kept from one block of terms to the next.
    depth: usize,
}

/// All columns of a task in packed form take 1 MiB at most, half of the second-level cache.
pub(super) const TILES: Sizes = Sizes {
    rows: 32,
    columns: 32,
    panels: 2,
    cuts: &[
        Cut { longest: 1024, rows: 4096, columns: 512, depth: 1024 },
        Cut { longest: 2048, rows: 4096, columns: 256, depth: 2048 },
        Cut { longest: 2304, rows: 4096, columns: 192, depth: 2304 },
        Cut { longest: 3072, rows: 2048, columns: 256, depth: 1536 },
        Cut { longest: usize::MAX, rows: 2048, columns: 256, depth: 2048 },
    ],
    turned: &[
        Cut { longest: 1024, rows: 4096, columns: 512, depth: 1024 },
        Cut { longest: usize::MAX, rows: 1024, columns: 512, depth: 1024 },
    ],
    step: 32,
    bytes: 2,
};
/// All columns of a task in packed form take 0.94 MiB, and two groups of panels of rows a third of that. Sums of up to 1024
/// terms never leave the registers.
const WOVEN: &[Cut] = &[
    Cut { longest: 1024, rows: 4096, columns: 240, depth: 1024 },
    Cut { longest: usize::MAX, rows: 2048, columns: 240, depth: 1024 },
];
pub(super) const ZMM: Sizes =
    Sizes { rows: 9, columns: 48, panels: 10, cuts: WOVEN, turned: WOVEN, step: 16, bytes: 4 };
/// A panel of b of this depth stays in the first-level cache with one of a.
const F32: &[Cut] = &[Cut { longest: usize::MAX, rows: 768, columns: 512, depth: 192 }];
pub(super) const PLAIN: Sizes =
    Sizes { rows: 6, columns: 16, panels: 1, cuts: F32, turned: F32, step: 1, bytes: 4 };
pub(super) const NEON: Sizes = Sizes { rows: 8, columns: 12, ..PLAIN };

/// Rows of a band: a multiple of most kernels'.
pub(super) const BAND: usize = 96;

const ALL: [Sizes; 5] = [TILES, TILES.seen(true), ZMM, PLAIN, NEON];

/// f32 elements that bring a buffer to a cache line.
pub(crate) const ALIGN: usize = 16;

const fn min(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

impl Sizes {
    /// The cut for an a that is stored row by row, or seen the other way round.
    pub(super) const fn seen(self, turned: bool) -> Self {
        Self { cuts: if turned { self.turned } else { self.cuts }, ..self }
    }

    /// Rows and columns of a task: bands of rows are cut until the tasks can be shared evenly by `threads`.
    pub(super) const fn task(&self, m: usize, n: usize, k: usize, threads: usize) -> [usize; 2] {
        let cut = self.cut(k);
        let across = n.div_ceil(cut.columns);
        let mut bands = m.div_ceil(cut.rows);
        while !(bands * across).is_multiple_of(threads)
            && bands * across < 4 * threads
            && bands * self.rows < m
        {
            bands += 1;
        }
        let bands = if bands == 0 { 1 } else { bands };
        [min(cut.rows, m.div_ceil(bands).next_multiple_of(self.rows)), cut.columns]
    }

    /// The cut for sums of `k` terms.
    pub(super) const fn cut(&self, k: usize) -> Cut {
        let mut at = 0;
        while self.cuts[at].longest < k {
            at += 1;
        }
        self.cuts[at]
    }

    /// The length of the blocks that a sum of `k` terms is taken in.
    pub(super) const fn depth(&self, k: usize) -> usize {
        min(k, self.cut(k).depth)
    }

    /// Packed elements of a panel of `lines` rows or columns.
    pub(super) const fn panel(&self, lines: usize, depth: usize) -> usize {
        lines * depth.next_multiple_of(self.step)
    }

    /// f32 elements of packed panels: one of a's and all of b's.
    const fn pack(&self, n: usize, k: usize) -> usize {
        let lines = self.rows + n.next_multiple_of(self.columns);
        (self.panel(lines, self.depth(k)) * self.bytes).div_ceil(4) + ALIGN
    }

    /// f32 elements of the sums: two tiles where sums are taken in one block, else all of the task's.
    pub(super) const fn sums(&self, m: usize, n: usize, k: usize) -> usize {
        let two = 2 * self.rows * self.columns;
        let all = m.next_multiple_of(self.rows) * n.next_multiple_of(self.columns);
        if k <= self.depth(k) || all < two { two } else { all }
    }

    const fn thread_scratch(&self, m: usize, n: usize, k: usize) -> usize {
        let (m, n) = (min(m, self.cut(k).rows), min(n, self.cut(k).columns));
        let more = self.panel((self.panels - 1) * self.rows, self.depth(k)) * self.bytes;
        self.sums(m, n, k) + self.pack(n, k) + more.div_ceil(4)
    }
}

/// Rows or columns of a panel for tiles; elements of a panel's step, and of the sums of two panels.
pub(crate) const PANEL: usize = 32;
pub(crate) const TILE: usize = PANEL * PANEL;
/// Panels of the wider factor that a task takes, at most, where products sum over rows.
const GROUP: usize = 8;
/// The same beside a narrower factor of more than `RESIDENT` steps, of which the second-level cache keeps a part: the more
/// panels take a row of it that comes from further away, the better.
const LARGER_GROUP: usize = 16;
const RESIDENT: usize = 256;
/// Steps of the narrower one at most, and steps of one panel at most: longer sums would have to be kept from one block of
/// terms to the next.
const CACHED: usize = 768;
const LONGEST: usize = 32;

/// How tiles cut a product that sums over rows.
#[derive(Clone, Copy)]
pub(super) struct OverRows {
    /// Panels of the narrower and of the wider factor.
    pub(super) narrow: usize,
    pub(super) wide: usize,
    pub(super) steps: usize,
}

impl OverRows {
    /// The cut of a[k, m]ᵀ · b[k, n]; `None` where the narrower factor is too large to stay in the cache.
    pub(super) const fn of([m, n, k]: [usize; 3]) -> Option<Self> {
        let (narrow, steps) = (min(m, n).div_ceil(PANEL), k.div_ceil(PANEL));
        let fits = narrow > 0 && steps > 0 && steps <= LONGEST && narrow * steps <= CACHED;
        let wide = (if m > n { m } else { n }).div_ceil(PANEL);
        if fits { Some(Self { narrow, wide, steps }) } else { None }
    }

    /// Whether the second-level cache keeps the narrower factor.
    pub(super) const fn resident(self) -> bool {
        self.narrow * self.steps <= RESIDENT
    }

    /// Panels of the wider factor that a task takes, at most: all tasks about as many.
    const fn largest_group(self) -> usize {
        let most = if self.resident() { GROUP } else { LARGER_GROUP };
        self.wide.div_ceil(self.wide.div_ceil(most))
    }

    /// Panels of a task: the most, or less where tasks could not be shared evenly by `threads`.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn group(self, threads: usize) -> usize {
        let mut group = self.largest_group();
        while group > 1
            && !self.wide.div_ceil(group).is_multiple_of(threads)
            && self.wide.div_ceil(group) < 4 * threads
        {
            group -= 1;
        }
        group
    }

    /// f32 elements of what threads share: the narrower factor, packed.
    pub(super) const fn shared(self) -> usize {
        self.narrow * self.steps * TILE / 2 + ALIGN
    }
}

/// f32 elements of scratch that [`super::over_rows`] needs.
pub(crate) const fn over_rows_scratch(m: usize, n: usize, k: usize, threads: usize) -> usize {
    let blocks = scratch(m, n, k, threads);
    let Some(cut) = OverRows::of([m, n, k]) else { return blocks };
    // Some panels of the wider factor, two tiles of sums and a turned one.
    let tiles = cut.shared() + threads * (cut.largest_group() * cut.steps * TILE / 2 + 3 * TILE + ALIGN);
    if tiles > blocks { tiles } else { blocks }
}

/// f32 elements of scratch that [`super::in_bands`] needs: a band's sums, a panel of a and all of b[k, n] packed.
pub(crate) const fn band_scratch(n: usize, k: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let sizes = ALL[at];
        let elements =
            sizes.panel(sizes.rows, sizes.depth(k)) + sizes.panel(n.next_multiple_of(sizes.columns), k);
        let found = (elements * sizes.bytes).div_ceil(4);
        largest = if found > largest { found } else { largest };
        at += 1;
    }
    BAND * n + largest + ALIGN
}

/// f32 elements that [`super::block`] needs for packing b[k, n] and a panel of a.
pub(crate) const fn pack_len(n: usize, k: usize) -> usize {
    let (mut largest, mut at) = (0, 0);
    while at < ALL.len() {
        let found = ALL[at].pack(n, k);
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
