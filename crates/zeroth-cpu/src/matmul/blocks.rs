//! The loops around a register kernel, the same for all that have none of their own.

use bytemuck::Pod;
#[cfg(target_arch = "x86_64")]
use zeroth_base::DType;

use super::View;
use super::plain;
#[cfg(target_arch = "x86_64")]
use super::sizes::OverRows;
use super::sizes::{ALIGN, BAND, Sizes, band_scratch, over_rows_scratch, scratch};
#[cfg(target_arch = "x86_64")]
use super::store::LINE;
use super::store::{Each, Store};
use crate::cut::{Grid, Tile};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::rows::stride as pitch;
use crate::{check_len, check_scratch};
use zeroth_kernel::Element;

/// What a register kernel brings.
pub(super) trait Kernel {
    /// What panels hold.
    type Packed: Pod;
    /// How it cuts a product.
    const SIZES: Sizes;

    /// Makes the calling thread ready.
    fn start() -> Self;

    /// Panels of rows of a, as many as are packed at a time.
    type Rows<'a>: Copy;

    /// Packs at most `SIZES.panels` panels of `SIZES.rows` rows of a into `out`, or takes them as they stand where that is
    /// as good.
    fn pack_rows<'a, T: Element>(
        &self,
        source: View<'a, T>,
        rows: usize,
        depth: usize,
        out: &'a mut [Self::Packed],
    ) -> Self::Rows<'a>;

    /// One of the panels that were packed at a time.
    fn panel(rows: Self::Rows<'_>, _index: usize) -> Self::Rows<'_> {
        rows
    }

    /// Packs at most `SIZES.panels` panels of `SIZES.columns` columns of b, given as the rows of its transpose.
    fn pack_columns<T: Element>(
        &self,
        source: View<T>,
        columns: usize,
        depth: usize,
        out: &mut [Self::Packed],
    );

    /// Writes the product of a panel of a and one of b to the `live` rows and columns of `c`, whose rows are `stride` apart, or adds
    /// it to what is there.
    fn multiply(
        &mut self,
        a: Self::Rows<'_>,
        b: &[Self::Packed],
        c: &mut [f32],
        stride: usize,
        live: [usize; 2],
        add: bool,
    );

    /// Calls [`finish_rows`], compiled with the instructions of the kernel. `sums` begins with the first row of `at`.
    fn finish<O, S: Store<O>>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &S);

    /// Calls [`task`], or has loops of its own, in which other work is done between the beats of a product.
    fn run_task<A: Element, B: Element, O>(
        job: Job<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        store: &impl Store<O>,
    ) where
        Self: Sized,
    {
        task::<Self, A, B, O, _>(job, out, scratch, store);
    }
}

/// Terms of a beat.
pub(super) const BEAT: usize = 64;

/// Work that is done between the beats of a product. A trait and no closure: it has to be compiled into the loop that it
/// stands in, with the instructions of that loop.
pub(crate) trait Between {
    /// Called after every beat.
    fn beat(&mut self);

    /// Called after the last one, before the sums are written: whoever takes what stands in their place has done so then.
    #[inline(always)]
    fn end(&mut self) {}
}

/// No work.
pub(crate) struct Nothing;

impl Between for Nothing {
    #[inline(always)]
    fn beat(&mut self) {}
}

/// What every task of a product reads.
pub(super) struct Job<'a, A, B> {
    pub(super) k: usize,
    pub(super) a: View<'a, A>,
    pub(super) b: View<'a, B>,
}

impl<A, B> Clone for Job<'_, A, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, B> Copy for Job<'_, A, B> {}

/// Runs an expression with `$kernel` as the register kernel for factors of these types on a path.
macro_rules! with_kernel {
    ($path:expr, $a:ty, $b:ty, $kernel:ident => $body:expr) => {
        match $path {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if for_tiles::<$a, $b>() => {
                type $kernel = super::tiles::Tiles;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                type $kernel = super::zmm::Zmm;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                type $kernel = plain::Avx2;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                type $kernel = super::neon::Neon;
                $body
            }
            _ => {
                type $kernel = plain::Portable;
                $body
            }
        }
    };
}

/// Whether tiles multiply these types: one factor is bf16, and the other can be rounded to it.
#[cfg(target_arch = "x86_64")]
const fn for_tiles<A: Element, B: Element>() -> bool {
    matches!((A::DTYPE, B::DTYPE), (DType::Bf16, DType::Bf16 | DType::F32) | (DType::F32, DType::Bf16))
}

/// Computes a[m, k] · b[k, n] and gives each piece of a row to `store(first column, sums, out)`.
pub(crate) fn matmul<A: Element, B: Element, O: Send>(
    pool: &Pool,
    sizes: [usize; 3],
    a: View<A>,
    b: View<B>,
    out: &mut [O],
    scratch: &mut [f32],
    store: impl Fn(usize, &[f32], &mut [O]) + Sync,
) {
    product(pool, sizes, a, b, out, scratch, &Each(store));
}

/// Computes a[m, k] · b[k, n] and gives each piece of a row to `store`. Rows of `out` may be further apart than they are long.
pub(crate) fn product<A: Element, B: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: View<A>,
    b: View<B>,
    out: &mut [O],
    scratch: &mut [f32],
    store: &(impl Store<O> + Sync),
) {
    let pitch = pitch("out", out.len(), [m, n]);
    check_scratch(scratch.len(), self::scratch(m, n, k, pool.threads()));
    let job = Job { k, a, b };
    with_kernel!(pool.isa(), A, B, K => {
        let [rows, columns] = K::SIZES.seen(a.turned()).task(m, n, k, pool.threads());
        pool.each_with(Grid::with_pitch(out, [n, pitch], rows, columns), scratch, |_, tile, scratch| {
            K::run_task(job, tile, scratch, store);
        });
    });
}

/// Computes a[k, m]ᵀ · b[k, n] and gives each piece of a row to `store`.
pub(crate) fn over_rows<T: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: View<T>,
    b: View<T>,
    out: &mut [O],
    scratch: &mut [f32],
    store: &(impl Store<O> + Sync),
) {
    check_len("out", out.len(), m * n);
    check_scratch(scratch.len(), over_rows_scratch(m, n, k, pool.threads()));
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx, Some(cut)) = (pool.isa(), OverRows::of([m, n, k]))
        && T::DTYPE == DType::Bf16
        && pool.threads() <= cut.wide
    {
        super::over_rows::run(pool, cut, [m, n, k], a, b, out, scratch, store);
        return;
    }
    product(pool, [m, n, k], a.transposed(), b, out, scratch, store);
}

/// One task's part of a product.
pub(super) fn task<K: Kernel, A: Element, B: Element, O, S: Store<O>>(
    job: Job<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    store: &S,
) {
    let (k, sizes) = (job.k, K::SIZES.seen(job.a.turned()));
    let (rows, columns) = (out.rows(), out.columns());
    let (sums, pack) = aligned(scratch).split_at_mut(sizes.sums(rows, columns, k));
    let (tile, across) = (sizes.rows * sizes.columns, columns.div_ceil(sizes.columns));
    if k == 0 {
        return no_terms::<K, O, S>(&mut sums[..tile], &mut out, store);
    }
    let mut kernel = K::start();
    let (a, b) = (job.a.from(out.first_row(), 0), job.b.transposed().from(out.first_column(), 0));
    let group_rows = sizes.panels * sizes.rows;
    for first in (0..k).step_by(sizes.depth(k)) {
        let depth = sizes.depth(k).min(k - first);
        let last = first + depth == k;
        let (a_pack, b_pack) = panels::<K>(pack, group_rows, columns, depth);
        let panel_len = sizes.panel(sizes.columns, depth);
        for group in (0..rows).step_by(group_rows) {
            let packed = kernel.pack_rows(a.from(group, first), group_rows.min(rows - group), depth, a_pack);
            for row in (group..rows.min(group + group_rows)).step_by(sizes.rows) {
                let a_panel = K::panel(packed, (row - group) / sizes.rows);
                for turn in 0..across {
                    let panel = back_and_forth(row / sizes.rows, turn, across);
                    let at = Place::of(&out, [row, panel * sizes.columns], [sizes.rows, sizes.columns]);
                    if row == 0 && panel.is_multiple_of(sizes.panels) {
                        let together = sizes.panels.min(across - panel);
                        let out = &mut b_pack[panel * panel_len..][..together * panel_len];
                        let columns = (together * sizes.columns).min(columns - at.column);
                        kernel.pack_columns(b.from(at.column, first), columns, depth, out);
                    }
                    let b_panel = &b_pack[panel * panel_len..][..panel_len];
                    let slot = if k <= sizes.depth(k) { 0 } else { row / sizes.rows * across + panel };
                    let sums = &mut sums[slot * tile..][..tile];
                    kernel.multiply(a_panel, b_panel, sums, sizes.columns, [at.rows, at.columns], first > 0);
                    if last {
                        K::finish(sums, at, &mut out, store);
                    }
                }
            }
        }
    }
}

/// A task whose sums have no terms.
pub(super) fn no_terms<K: Kernel, O, S: Store<O>>(sums: &mut [f32], out: &mut Tile<O>, store: &S) {
    sums.fill(0.0);
    for row in (0..out.rows()).step_by(K::SIZES.rows) {
        for column in (0..out.columns()).step_by(K::SIZES.columns) {
            let at = Place::of(out, [row, column], [K::SIZES.rows, K::SIZES.columns]);
            K::finish(sums, at, out, store);
        }
    }
}

/// The panel of b at a turn of a band of rows: what the cache has let go by the end of a band is what the next one needs
/// last.
#[inline(always)]
pub(super) const fn back_and_forth(band: usize, turn: usize, across: usize) -> usize {
    if band.is_multiple_of(2) { turn } else { across - 1 - turn }
}

/// The rectangle of a task's part that a tile of sums belongs to.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Place {
    /// The one of `size` at a corner, less what is not in `out`.
    #[inline(always)]
    pub(super) fn of<O>(out: &Tile<O>, [row, column]: [usize; 2], size: [usize; 2]) -> Self {
        Self {
            row,
            column,
            rows: size[0].min(out.rows() - row),
            columns: size[1].min(out.columns() - column),
        }
    }
}

/// Gives the rows of a tile of sums, `WIDTH` columns wide where none is missing, to `store`.
#[inline(always)]
pub(super) fn finish_rows<const WIDTH: usize, O>(
    sums: &[f32],
    at: Place,
    out: &mut Tile<O>,
    store: &impl Store<O>,
) {
    let Place { row, column, rows, columns } = at;
    let first = out.first_column() + column;
    for (i, sums) in sums.as_chunks::<WIDTH>().0.iter().enumerate().take(rows) {
        let out = &mut out.row(row + i)[column..][..columns];
        // A length that the compiler knows lets it write the row in straight vector code.
        match out.as_chunks_mut::<WIDTH>() {
            ([out], _) => store.row(first, sums, out),
            (_, out) => store.row(first, &sums[..columns], out),
        }
    }
}

/// As [`finish_rows`] of two tiles.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn finish_lines<O>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &impl Store<O>) {
    let Place { row, column, rows, columns } = at;
    let first = out.first_column() + column;
    if columns == LINE {
        for (sums, out) in sums.as_chunks().0.iter().zip(out.lines([row, column], rows)) {
            store.line(first, sums, out);
        }
    } else {
        finish_rows::<LINE, O>(sums, at, out, store);
    }
}

/// Computes a[m, k] · b[k, n] on the calling thread, b packed once and a band of rows at a time, and gives each band's
/// sums, [rows, n], to `finish(first row, sums)`.
pub(crate) fn in_bands<A: Element, B: Element>(
    path: Isa,
    [m, n, k]: [usize; 3],
    a: View<A>,
    b: View<B>,
    scratch: &mut [f32],
    mut finish: impl FnMut(usize, &mut [f32]),
) {
    check_scratch(scratch.len(), band_scratch(n, k));
    with_kernel!(path, A, B, K => {
        let (mut kernel, sizes, b) = (K::start(), K::SIZES, b.transposed());
        let (sums, pack) = aligned(scratch).split_at_mut(BAND * n);
        let (a_pack, b_pack) = bytemuck::cast_slice_mut(pack).split_at_mut(sizes.panel(sizes.rows, sizes.depth(k)));
        let columns = n.next_multiple_of(sizes.columns);
        let blocks = || (0..k).step_by(sizes.depth(k).max(1)).map(|first| (first, sizes.depth(k).min(k - first)));
        for (first, depth) in blocks() {
            let b_pack = &mut b_pack[sizes.panel(columns, first)..][..sizes.panel(columns, depth)];
            for (panel, out) in b_pack.chunks_exact_mut(sizes.panel(sizes.columns, depth)).enumerate() {
                let column = panel * sizes.columns;
                kernel.pack_columns(b.from(column, first), sizes.columns.min(n - column), depth, out);
            }
        }
        for first_row in (0..m).step_by(BAND) {
            let band = BAND.min(m - first_row);
            if k == 0 {
                sums.fill(0.0);
            }
            for (first, depth) in blocks() {
                let b_pack = &b_pack[sizes.panel(columns, first)..][..sizes.panel(columns, depth)];
                for row in (0..band).step_by(sizes.rows) {
                    let rows = sizes.rows.min(band - row);
                    let a_panel = kernel.pack_rows(a.from(first_row + row, first), rows, depth, a_pack);
                    for (panel, b_panel) in b_pack.chunks_exact(sizes.panel(sizes.columns, depth)).enumerate() {
                        let column = panel * sizes.columns;
                        let live = [rows, sizes.columns.min(n - column)];
                        kernel.multiply(a_panel, b_panel, &mut sums[row * n + column..], n, live, first > 0);
                    }
                }
            }
            finish(first_row, &mut sums[..band * n]);
        }
    });
}

/// Writes a[m, k] · b[k, n] to `c`, whose rows are `width` apart, or adds it to what is there, on the calling thread.
pub(crate) fn block<A: Element, B: Element>(
    path: Isa,
    [m, n, k]: [usize; 3],
    a: View<A>,
    b: View<B>,
    c: &mut [f32],
    width: usize,
    add: bool,
    pack: &mut [f32],
) {
    with_kernel!(path, A, B, K => {
        let (mut kernel, sizes) = (K::start(), K::SIZES);
        let (b, pack) = (b.transposed(), aligned(pack));
        for first in (0..k).step_by(sizes.depth(k).max(1)) {
            let depth = sizes.depth(k).min(k - first);
            let (a_pack, b_pack) = panels::<K>(pack, sizes.rows, n, depth);
            let panel_len = sizes.panel(sizes.columns, depth);
            for (panel, out) in b_pack.chunks_exact_mut(panel_len).enumerate() {
                let column = panel * sizes.columns;
                kernel.pack_columns(b.from(column, first), sizes.columns.min(n - column), depth, out);
            }
            for row in (0..m).step_by(sizes.rows) {
                let rows = sizes.rows.min(m - row);
                let a_panel = kernel.pack_rows(a.from(row, first), rows, depth, a_pack);
                for (panel, b_panel) in b_pack.chunks_exact(panel_len).enumerate() {
                    let column = panel * sizes.columns;
                    let live = [rows, sizes.columns.min(n - column)];
                    kernel.multiply(a_panel, b_panel, &mut c[row * width + column..], width, live, add || first > 0);
                }
            }
        }
    });
}

/// The part of a buffer that begins on a cache line.
pub(super) fn aligned(buffer: &mut [f32]) -> &mut [f32] {
    let skip = buffer.as_ptr().align_offset(64).min(ALIGN);
    &mut buffer[skip..]
}

/// Room for `rows` rows of a and all panels of b.
pub(super) fn panels<K: Kernel>(
    pack: &mut [f32],
    rows: usize,
    columns: usize,
    depth: usize,
) -> (&mut [K::Packed], &mut [K::Packed]) {
    let sizes = K::SIZES;
    let (a, b) = bytemuck::cast_slice_mut(pack).split_at_mut(sizes.panel(rows, depth));
    (a, &mut b[..sizes.panel(columns.next_multiple_of(sizes.columns), depth)])
}
