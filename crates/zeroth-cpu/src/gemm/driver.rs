//! The GEMM driver: entry points, the micro-kernel interface, and the loops around a micro-kernel that needs no loops of
//! its own.
//!
//! There are seven loop nests. A single one with the kernels behind it would lose the interleaving or the packing order that
//! each was measured with:
//! - [`run_task`] is the plain one, for AVX2, NEON and portable code.
//! - [`multiply_block`] multiplies a packed B on the calling thread, for attention and the head.
//! - `avx512_driver` packs a group of A panels while the previous group is multiplied.
//! - `amx_driver` stores a C tile while the next one is multiplied.
//! - `amx_gemm_tn` keeps a whole transposed operand in L2, which the blocked order would transpose again for every block.
//! - `amx_short_k` and `amx_narrow_tn` are for matmuls of adapters, whose k or whose output is a few tiles.

use bytemuck::Pod;
#[cfg(target_arch = "x86_64")]
use zeroth_base::DType;

use super::MatrixView;
use super::blocking::{BAND_ROWS, Blocking, band_scratch, gemm_tn_scratch, scratch};
#[cfg(target_arch = "x86_64")]
use super::blocking::{GemmTnBlocking, NarrowTnBlocking};
#[cfg(target_arch = "x86_64")]
use super::epilogue::WIDE_ROW;
use super::epilogue::{ClosureEpilogue, Epilogue};
use super::portable::PortableKernel;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::rows::check_rows;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{Grid, Tile};
use crate::{check_len, check_scratch};
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

/// Evaluates an expression with `$kernel` bound to the micro-kernel for these operand types on an instruction set.
macro_rules! with_kernel {
    ($isa:expr, $a:ty, $b:ty, $kernel:ident => $body:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if amx_supports::<$a, $b>() => {
                type $kernel = super::amx::AmxKernel;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                type $kernel = super::avx512::Avx512Kernel;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                type $kernel = PortableKernel<true>;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                type $kernel = super::neon::NeonKernel;
                $body
            }
            _ => {
                type $kernel = PortableKernel<false>;
                $body
            }
        }
    };
}

pub(super) use with_kernel;

/// Whether AMX multiplies these types: one operand is bf16, and the other can be rounded to it.
#[cfg(target_arch = "x86_64")]
pub(super) const fn amx_supports<A: Element, B: Element>() -> bool {
    matches!((A::DTYPE, B::DTYPE), (DType::Bf16, DType::Bf16 | DType::F32) | (DType::F32, DType::Bf16))
}

/// [`gemm`] with a closure `(first column, accumulators, out)` as its epilogue.
pub(crate) fn gemm_with<A: Element, B: Element, O: Send>(
    pool: &Pool,
    shape: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    out: &mut [O],
    scratch: &mut [f32],
    epilogue: impl Fn(usize, &[f32], &mut [O]) + Sync,
) {
    gemm(pool, shape, a, b, out, shape[1], scratch, &ClosureEpilogue(epilogue));
}

/// Computes a[m, k] · b[k, n] and passes each row of each C tile to `epilogue`. Rows of `out` are `row_stride` apart.
pub(crate) fn gemm<A: Element, B: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    out: &mut [O],
    row_stride: usize,
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    check_rows("out", out.len(), [m, n], row_stride);
    check_scratch(scratch.len(), self::scratch(m, n, k, pool.threads()));
    let operands = Operands { k, a, b };
    with_kernel!(pool.isa(), A, B, K => {
        let [rows, columns] = K::BLOCKING.for_layout(a.is_transposed()).task_shape(m, n, k, pool.threads());
        pool.each_with(Grid::with_row_stride(out, [n, row_stride], rows, columns), scratch, |_, tile, scratch| {
            K::run_task(operands, tile, scratch, epilogue);
        });
    });
}

/// Computes a[k, m]ᵀ · b[k, n] and passes each row of each C tile to `epilogue`.
pub(crate) fn gemm_tn<T: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: MatrixView<T>,
    b: MatrixView<T>,
    out: &mut [O],
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    check_len("out", out.len(), m * n);
    check_scratch(scratch.len(), gemm_tn_scratch(m, n, k, pool.threads()));
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx, Some(blocking)) = (pool.isa(), NarrowTnBlocking::of([m, n, k]))
        && T::DTYPE == DType::Bf16
    {
        super::amx_narrow_tn::run(pool, blocking, [m, n, k], a, b, out, scratch, epilogue);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx, Some(blocking)) = (pool.isa(), GemmTnBlocking::of([m, n, k]))
        && T::DTYPE == DType::Bf16
        && pool.threads() <= blocking.wide
    {
        super::amx_gemm_tn::run(pool, blocking, [m, n, k], a, b, out, scratch, epilogue);
        return;
    }
    gemm(pool, [m, n, k], a.transposed(), b, out, n, scratch, epilogue);
}

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
fn pack_b_panels<K: MicroKernel, T: Element>(
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

/// Multiplies a[m, kc] by a packed b[kc, n] into `c`, whose rows are `stride` apart; with `add` accumulates.
fn multiply_block<K: MicroKernel, T: Element>(
    kernel: &mut K,
    [m, n, kc]: [usize; 3],
    a: MatrixView<T>,
    a_pack: &mut [K::Packed],
    b_pack: &[K::Packed],
    c: &mut [f32],
    stride: usize,
    add: bool,
) {
    let Blocking { mr, nr, .. } = K::BLOCKING;
    for row in (0..m).step_by(mr) {
        let rows = mr.min(m - row);
        let a_panel = kernel.pack_a(a.submatrix(row, 0), rows, kc, a_pack);
        for (panel, b_panel) in b_pack.chunks_exact(K::BLOCKING.panel_len(nr, kc)).enumerate() {
            let column = panel * nr;
            let extent = [rows, nr.min(n - column)];
            kernel.multiply(a_panel, b_panel, &mut c[row * stride + column..], stride, extent, add);
        }
    }
}

/// Computes a[m, k] · b[k, n] on the calling thread with B packed once, and passes C of each band of rows, [rows, n], to
/// `finish(first row, c)`.
pub(crate) fn gemm_row_bands<A: Element, B: Element>(
    isa: Isa,
    [m, n, k]: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    scratch: &mut [f32],
    mut finish: impl FnMut(usize, &mut [f32]),
) {
    check_scratch(scratch.len(), band_scratch(n, k));
    with_kernel!(isa, A, B, K => {
        let (mut kernel, blocking, b) = (K::setup(), K::BLOCKING, b.transposed());
        let mut scratch = ScratchSplitter::new(scratch);
        let (c, pack) = (scratch.f32(BAND_ROWS * n), bytemuck::cast_slice_mut(scratch.rest()));
        let (a_pack, b_pack) = pack.split_at_mut(blocking.panel_len(blocking.mr, blocking.kc(k)));
        let columns = n.next_multiple_of(blocking.nr);
        let blocks = || (0..k).step_by(blocking.kc(k).max(1)).map(|first| (first, blocking.kc(k).min(k - first)));
        let packed = |first: usize, kc: usize| {
            let start = blocking.panel_len(columns, first);
            start..start + blocking.panel_len(columns, kc)
        };
        for (first, kc) in blocks() {
            pack_b_panels(&kernel, b.submatrix(0, first), n, kc, &mut b_pack[packed(first, kc)]);
        }
        for first_row in (0..m).step_by(BAND_ROWS) {
            let rows = BAND_ROWS.min(m - first_row);
            if k == 0 {
                c.fill(0.0);
            }
            for (first, kc) in blocks() {
                let (a, b_pack) = (a.submatrix(first_row, first), &b_pack[packed(first, kc)]);
                multiply_block(&mut kernel, [rows, n, kc], a, a_pack, b_pack, c, n, first > 0);
            }
            finish(first_row, &mut c[..rows * n]);
        }
    });
}

/// Computes a[m, k] · b[k, n] on the calling thread into `c`, whose rows are `stride` apart; with `add` accumulates.
pub(crate) fn gemm_serial<A: Element, B: Element>(
    isa: Isa,
    [m, n, k]: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    c: &mut [f32],
    stride: usize,
    add: bool,
    pack: &mut [f32],
) {
    with_kernel!(isa, A, B, K => {
        let (mut kernel, blocking) = (K::setup(), K::BLOCKING);
        let (b, pack) = (b.transposed(), ScratchSplitter::new(pack).rest());
        for first in (0..k).step_by(blocking.kc(k).max(1)) {
            let kc = blocking.kc(k).min(k - first);
            let (a_pack, b_pack) = panels::<K>(pack, blocking.mr, n, kc);
            pack_b_panels(&kernel, b.submatrix(0, first), n, kc, b_pack);
            let a = a.submatrix(0, first);
            multiply_block(&mut kernel, [m, n, kc], a, a_pack, b_pack, c, stride, add || first > 0);
        }
    });
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
