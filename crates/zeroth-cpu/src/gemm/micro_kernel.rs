//! The interface of a micro-kernel, and the loops around one that needs no loops of its own.

use bytemuck::Pod;

use super::MatrixView;
use super::blocking::Blocking;
use super::epilogue::Epilogue;
#[cfg(target_arch = "x86_64")]
use super::epilogue::WIDE_ROW;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

/// A micro-kernel with its packing routines.
pub(super) trait MicroKernel {
    /// Element type of packed panels.
    type Packed: Pod;
    /// Register and cache blocking.
    const BLOCKING: Blocking;
    /// Most rows of A in a [`MicroKernel::run_exchanged_task`]; 0 for a kernel that does not exchange operands.
    const EXCHANGED_ROWS: usize = 0;

    /// Prepares the calling thread.
    fn setup() -> Self;

    /// Packed panels of A, or rows of A read in place.
    type PackedA<'a>: Copy;

    /// Packs at most `panels_per_pack` panels of `mr` rows of A into `out`, or borrows the rows where that is as fast.
    fn pack_a<'a, T: Element>(
        &self,
        source: MatrixView<'a, T>,
        rows: usize,
        kc: usize,
        out: &'a mut [Self::Packed],
    ) -> Self::PackedA<'a>;

    /// Packs at most `panels_per_pack` panels of `nr` columns of B, given as rows of Bᵀ.
    fn pack_b<T: Element>(&self, source: MatrixView<T>, columns: usize, kc: usize, out: &mut [Self::Packed]);

    /// Multiplies a panel of A by a panel of B into `extent` rows and columns of `c`, whose rows are `stride` apart;
    /// with `add` accumulates into `c`.
    fn multiply(
        &mut self,
        a: Self::PackedA<'_>,
        b: &[Self::Packed],
        c: &mut [f32],
        stride: usize,
        extent: [usize; 2],
        add: bool,
    );

    /// Calls [`store_rows`], compiled with the instructions of the kernel. `acc` starts at the first row of `rect`.
    fn store_tile<O, E: Epilogue<O>>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &E);

    /// Computes one task's block of C: [`run_task`], or a software-pipelined driver of the kernel's own.
    fn run_task<A: Element, B: Element, O>(
        operands: Operands<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        epilogue: &impl Epilogue<O>,
    ) where
        Self: Sized,
    {
        run_task::<Self, A, B, O, _>(operands, out, scratch, epilogue);
    }

    /// [`MicroKernel::run_task`] as Cᵀ = Bᵀ · Aᵀ: A, which has few rows, is packed instead of a column-major B.
    fn run_exchanged_task<A: Element, B: Element, O>(
        operands: Operands<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        epilogue: &impl Epilogue<O>,
    ) where
        Self: Sized,
    {
        Self::run_task(operands, out, scratch, epilogue);
    }
}

/// Terms of k between two calls of [`Interleaved::k_step`].
pub(super) const K_STEP: usize = 64;

/// Work interleaved with the k loop of a micro-kernel call. It is a trait, not a closure, so that it is inlined into the
/// loop and compiled with the loop's target features.
pub(crate) trait Interleaved {
    /// Called after every k-step.
    fn k_step(&mut self);

    /// Called after the last k-step, before the C tile is stored. Work that reads the memory of the C tile ends here.
    #[inline(always)]
    fn drain(&mut self) {}
}

/// Interleaves nothing.
pub(crate) struct NoInterleave;

impl Interleaved for NoInterleave {
    #[inline(always)]
    fn k_step(&mut self) {}
}

/// The operands of a GEMM, read by every task: a[m, k] and b[k, n].
pub(super) struct Operands<'a, A, B> {
    pub(super) k: usize,
    pub(super) a: MatrixView<'a, A>,
    pub(super) b: MatrixView<'a, B>,
}

impl<A, B> Clone for Operands<'_, A, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, B> Copy for Operands<'_, A, B> {}

/// Computes one task's block of C.
fn run_task<K: MicroKernel, A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let (k, blocking) = (operands.k, K::BLOCKING);
    let (rows, columns) = (out.rows(), out.columns());
    let mut scratch = ScratchSplitter::new(scratch);
    let (acc, pack) = (scratch.f32(blocking.acc_len(rows, columns, k)), scratch.rest());
    let (tile_len, across) = (blocking.mr * blocking.nr, columns.div_ceil(blocking.nr));
    if k == 0 {
        return store_zeros::<K, O, E>(&mut acc[..tile_len], &mut out, epilogue);
    }
    let mut kernel = K::setup();
    let a = operands.a.submatrix(out.first_row(), 0);
    let b = operands.b.transposed().submatrix(out.first_column(), 0);
    for first in (0..k).step_by(blocking.kc(k)) {
        let kc = blocking.kc(k).min(k - first);
        let (a_pack, b_pack) = panels::<K>(pack, blocking.mr, columns, kc);
        pack_b_panels(&kernel, b.submatrix(0, first), columns, kc, b_pack);
        let panel_len = blocking.panel_len(blocking.nr, kc);
        for row in (0..rows).step_by(blocking.mr) {
            let a_panel = kernel.pack_a(a.submatrix(row, first), blocking.mr.min(rows - row), kc, a_pack);
            for turn in 0..across {
                let panel = serpentine(row / blocking.mr, turn, across);
                let rect = TileRect::new(&out, [row, panel * blocking.nr], [blocking.mr, blocking.nr]);
                let b_panel = &b_pack[panel * panel_len..][..panel_len];
                let slot = if k <= blocking.kc(k) { 0 } else { row / blocking.mr * across + panel };
                let acc = &mut acc[slot * tile_len..][..tile_len];
                kernel.multiply(a_panel, b_panel, acc, blocking.nr, rect.extent(), first > 0);
                if first + kc == k {
                    K::store_tile(acc, rect, &mut out, epilogue);
                }
            }
        }
    }
}

/// Passes zeros to the epilogue: the result of a GEMM with k = 0.
pub(super) fn store_zeros<K: MicroKernel, O, E: Epilogue<O>>(
    acc: &mut [f32],
    out: &mut Tile<O>,
    epilogue: &E,
) {
    let size = [K::BLOCKING.mr, K::BLOCKING.nr];
    acc.fill(0.0);
    for row in (0..out.rows()).step_by(size[0]) {
        for column in (0..out.columns()).step_by(size[1]) {
            K::store_tile(acc, TileRect::new(out, [row, column], size), out, epilogue);
        }
    }
}

/// The panel of B at position `turn` of a row of tiles. The order alternates, so that each row starts with the panels the
/// previous one left in cache.
#[inline(always)]
pub(super) const fn serpentine(row: usize, turn: usize, across: usize) -> usize {
    if row.is_multiple_of(2) { turn } else { across - 1 - turn }
}

/// The rectangle of a task's output that a C tile covers.
#[derive(Clone, Copy)]
pub(super) struct TileRect {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl TileRect {
    /// A rectangle of `size` at a corner, clipped to `out`.
    #[inline(always)]
    pub(super) fn new<O>(out: &Tile<O>, [row, column]: [usize; 2], size: [usize; 2]) -> Self {
        Self {
            row,
            column,
            rows: size[0].min(out.rows() - row),
            columns: size[1].min(out.columns() - column),
        }
    }

    /// Rows and columns.
    pub(super) const fn extent(self) -> [usize; 2] {
        [self.rows, self.columns]
    }
}

/// Passes the rows of a C tile with `NR` columns to `epilogue`.
#[inline(always)]
pub(super) fn store_rows<const NR: usize, O>(
    acc: &[f32],
    rect: TileRect,
    out: &mut Tile<O>,
    epilogue: &impl Epilogue<O>,
) {
    let TileRect { row, column, rows, columns } = rect;
    let first = out.first_column() + column;
    for (i, acc) in acc.as_chunks::<NR>().0.iter().enumerate().take(rows) {
        let out = &mut out.row(row + i)[column..][..columns];
        // A constant length lets the compiler emit straight-line vector code.
        match out.as_chunks_mut::<NR>() {
            ([out], _) => epilogue.store_row(first, acc, out),
            (_, out) => epilogue.store_row(first, &acc[..columns], out),
        }
    }
}

/// [`store_rows`] for AMX, whose full-width rows have an epilogue in intrinsics.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn store_wide_rows<O>(
    acc: &[f32],
    rect: TileRect,
    out: &mut Tile<O>,
    epilogue: &impl Epilogue<O>,
) {
    let TileRect { row, column, rows, columns } = rect;
    let first = out.first_column() + column;
    if columns == WIDE_ROW {
        for (acc, out) in acc.as_chunks().0.iter().zip(out.row_chunks([row, column], rows)) {
            epilogue.store_wide_row(first, acc, out);
        }
    } else {
        store_rows::<WIDE_ROW, O>(acc, rect, out, epilogue);
    }
}

/// Packs B, given as rows of Bᵀ, panel by panel.
pub(super) fn pack_b_panels<K: MicroKernel, T: Element>(
    kernel: &K,
    b: MatrixView<T>,
    columns: usize,
    kc: usize,
    out: &mut [K::Packed],
) {
    let nr = K::BLOCKING.nr;
    for (panel, out) in out.chunks_exact_mut(K::BLOCKING.panel_len(nr, kc)).enumerate() {
        let column = panel * nr;
        kernel.pack_b(b.submatrix(column, 0), nr.min(columns - column), kc, out);
    }
}

/// Splits a packing buffer into `rows` rows of A and all panels of B.
pub(super) fn panels<K: MicroKernel>(
    pack: &mut [f32],
    rows: usize,
    columns: usize,
    kc: usize,
) -> (&mut [K::Packed], &mut [K::Packed]) {
    let blocking = K::BLOCKING;
    let (a, b) = bytemuck::cast_slice_mut(pack).split_at_mut(blocking.panel_len(rows, kc));
    (a, &mut b[..blocking.panel_len(columns.next_multiple_of(blocking.nr), kc)])
}
