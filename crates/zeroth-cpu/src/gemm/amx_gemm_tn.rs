//! C = Aᵀ · B on AMX, the shape of weight gradients: the contraction runs transposed the rows of both operands.
//!
//! Neither operand has the layout of an A panel, and transposing one costs four times as much as packing the other. The
//! narrow operand is transposed once and stays in L2; if it is B, C tiles are transposed as they are stored. The wide
//! operand is packed a few panels at a time. C tiles are computed along the rows of C: down its columns, one cache line of
//! each row at a time, a GEMM with k = 512 took up to 1.9 times as long. The next packed rows are prefetched. Rows yet to
//! be packed are not: their cache misses would compete with tile loads from L2 for the same line fill buffers.
//!
//! The bits are those of [`super::gemm`]: each sum has the same terms in the same order.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::_mm512_storeu_si512;

use super::MatrixView;
use super::amx::{AmxKernel, L1_STEPS};
use super::amx_pack::{Operand, pack};
use super::blocking::{GemmTnBlocking, PANEL, TILE};
use super::epilogue::Epilogue;
use super::micro_kernel::{Interleaved, TileRect, serpentine, store_rows};
use super::prefetch::prefetch_read_l2;
use super::transpose::transpose_from;
use crate::pool::Pool;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{Chunks, Grid, RowChunks, Tile};
use zeroth_kernel::Element;

/// Quarters in which a C tile is transposed.
pub(super) const QUARTERS: usize = 4;
const SIDE: usize = 16;
/// Panels of the wide operand packed together.
const PACKED_TOGETHER: usize = 8;
/// Panels of the narrow operand multiplied by one wide panel before the next one, where C tiles are transposed and a panel
/// exceeds L1.
const STRIPE: usize = 4;

/// Computes a[k, m]ᵀ · b[k, n] and passes each row of each C tile to `epilogue`.
pub(super) fn run<T: Element, O: Send>(
    pool: &Pool,
    blocking: GemmTnBlocking,
    [m, n, k]: [usize; 3],
    a: MatrixView<T>,
    b: MatrixView<T>,
    out: &mut [O],
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    let ((narrow, width), (wide, across)) = if m > n { ((b, n), (a, m)) } else { ((a, m), (b, n)) };
    let (shared, own) = scratch.split_at_mut(blocking.shared_len());
    let packed = ScratchSplitter::new(shared).bf16(blocking.narrow * blocking.steps * TILE);
    pool.each(Chunks::new(packed, 2 * blocking.steps * TILE), |pair, out| {
        let first = 2 * pair * PANEL;
        let view = narrow.submatrix(0, first).transposed();
        pack(Operand::A, view, (2 * PANEL).min(width - first), k, out);
    });
    let packed = &*packed;
    let panels_per_task = blocking.panels_per_task(pool.threads());
    let part = panels_per_task * PANEL;
    let grid = if m > n { Grid::new(out, n, part, n) } else { Grid::new(out, n, m, part) };
    pool.each_with(grid, own, |group, out, scratch| {
        let mut scratch = ScratchSplitter::new(scratch);
        let panels = (across - group * part).div_ceil(PANEL).min(panels_per_task);
        let b_pack = scratch.bf16(panels * blocking.steps * TILE);
        let view = wide.submatrix(0, group * part).transposed();
        // A few panels at a time, so that the packed output does not evict its own lines.
        for (at, out) in b_pack.chunks_mut(PACKED_TOGETHER * blocking.steps * TILE).enumerate() {
            let first = at * PACKED_TOGETHER * PANEL;
            let lines = (PACKED_TOGETHER * PANEL).min(part.min(across - group * part) - first);
            pack(Operand::B, view.submatrix(first, 0), lines, k, out);
        }
        // SAFETY: `Isa::available` reports AMX only with AVX-512 and its bf16 conversions.
        unsafe {
            match (m > n, blocking.fits_l2() || m > n && panel_fits_l1(blocking)) {
                (true, true) => run_task::<true, false, O>(blocking, packed, b_pack, out, scratch, epilogue),
                (true, false) => run_task::<true, true, O>(blocking, packed, b_pack, out, scratch, epilogue),
                (false, true) => {
                    run_task::<false, false, O>(blocking, packed, b_pack, out, scratch, epilogue);
                }
                (false, false) => {
                    run_task::<false, true, O>(blocking, packed, b_pack, out, scratch, epilogue);
                }
            }
        }
    });
}

/// Whether a panel fits in L1.
const fn panel_fits_l1(blocking: GemmTnBlocking) -> bool {
    blocking.steps <= L1_STEPS
}

/// Multiplies some panels of the wide operand by all of the narrow one, prefetching the next band of it with
/// `PREFETCH`. Both decisions are type parameters because the loops have no registers to spare.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn run_task<const TRANSPOSED: bool, const PREFETCH: bool, O>(
    blocking: GemmTnBlocking,
    narrow: &[u16],
    wide: &[u16],
    mut out: Tile<O>,
    mut scratch: ScratchSplitter,
    epilogue: &impl Epilogue<O>,
) {
    let mut kernel = AmxKernel::configured();
    let (mut next, mut acc, transposed) = (scratch.f32(TILE), scratch.f32(TILE), scratch.f32(TILE));
    let mut pending = None;
    let panel = blocking.steps * TILE;
    let count = wide.len() / panel;
    let stripe = match (TRANSPOSED, panel_fits_l1(blocking)) {
        (false, _) => panel,
        (true, false) => STRIPE * panel,
        (true, true) => narrow.len(),
    };
    for (band, band_rows) in narrow.chunks(stripe).enumerate() {
        // The next task starts over with the first rows.
        let mut next_rows =
            narrow.get((band + 1) * stripe..).filter(|next| !next.is_empty()).unwrap_or(narrow).as_ptr();
        for turn in 0..count {
            // Serpentine order: each band starts with the panels the previous one left in cache.
            let right = serpentine(band, turn, count);
            for (down, panel_rows) in band_rows.chunks_exact(panel).enumerate() {
                let mut store = TileStore::<_, _, TRANSPOSED, PREFETCH>::new(
                    &*acc,
                    &mut *transposed,
                    pending,
                    next_rows,
                    &mut out,
                    epilogue,
                );
                kernel.matmul_panels_pipelined::<TRANSPOSED>(
                    panel_rows,
                    &wide[right * panel..][..panel],
                    next,
                    &mut store,
                );
                store.finish();
                store_edge(if TRANSPOSED { transposed } else { acc }, pending, &mut out, epilogue);
                let down = band * (stripe / panel) + down;
                let [row, column] = if TRANSPOSED { [right, down] } else { [down, right] };
                pending = Some(TileRect::new(&out, [row * PANEL, column * PANEL], [PANEL; 2]));
                (next, acc) = (acc, next);
                next_rows = next_rows.wrapping_add(panel / count);
            }
        }
    }
    TileStore::<_, _, TRANSPOSED, false>::new(
        acc,
        &mut *transposed,
        pending,
        narrow.as_ptr(),
        &mut out,
        epilogue,
    )
    .finish();
    store_edge(if TRANSPOSED { transposed } else { acc }, pending, &mut out, epilogue);
}

/// Stores a C tile that has fewer than 32 columns.
#[inline(always)]
fn store_edge<O>(acc: &[f32], at: Option<TileRect>, out: &mut Tile<O>, epilogue: &impl Epilogue<O>) {
    if let Some(at) = at.filter(|at| at.columns < PANEL) {
        store_rows::<PANEL, O>(acc, at, out, epilogue);
    }
}

/// Stores a C tile while the next one is multiplied: transposes it if needed, then stores full rows.
struct TileStore<'a, O, E, const TRANSPOSED: bool, const PREFETCH: bool> {
    acc: &'a [f32],
    /// Buffer for the transposed tile.
    transposed: &'a mut [f32],
    /// Quarters transposed, and rows stored, so far.
    quarters: usize,
    rows: usize,
    lines: RowChunks<'a, O, PANEL>,
    /// First column of the tile in C.
    first: usize,
    /// Next packed rows to prefetch.
    next_rows: *const u16,
    epilogue: &'a E,
}

impl<O, E: Epilogue<O>, const TRANSPOSED: bool, const PREFETCH: bool> Interleaved
    for TileStore<'_, O, E, TRANSPOSED, PREFETCH>
{
    #[inline(always)]
    fn k_step(&mut self) {
        if PREFETCH {
            prefetch_read_l2(self.next_rows.cast());
            self.next_rows = self.next_rows.wrapping_add(PANEL);
        }
        self.next();
    }
}

impl<'a, O, E: Epilogue<O>, const TRANSPOSED: bool, const PREFETCH: bool>
    TileStore<'a, O, E, TRANSPOSED, PREFETCH>
{
    #[inline(always)]
    fn new(
        acc: &'a [f32],
        transposed: &'a mut [f32],
        at: Option<TileRect>,
        next_rows: *const u16,
        out: &'a mut Tile<O>,
        epilogue: &'a E,
    ) -> Self {
        let corner = at.map_or([0, 0], |at| [at.row, at.column]);
        let quarters = if at.is_some() { 0 } else { QUARTERS };
        let first = out.first_column() + corner[1];
        let lines = out.row_chunks(corner, at.map_or(0, |at| at.rows));
        Self { acc, transposed, quarters, rows: 0, lines, first, next_rows, epilogue }
    }

    /// Does the next piece of work; false when none is left.
    #[inline(always)]
    fn next(&mut self) -> bool {
        if TRANSPOSED && self.quarters < QUARTERS {
            // SAFETY: AMX implies AVX-512.
            unsafe { transpose_quarter(self.acc, self.transposed, self.quarters) };
            self.quarters += 1;
            return true;
        }
        let Some(out) = self.lines.next() else { return false };
        let acc = if TRANSPOSED { &*self.transposed } else { self.acc };
        self.epilogue.store_wide_row(self.first, &acc.as_chunks().0[self.rows], out);
        self.rows += 1;
        true
    }

    #[inline(always)]
    fn finish(&mut self) {
        while self.next() {}
    }
}

/// Transposes a quarter of a C tile.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_quarter(acc: &[f32], out: &mut [f32], quarter: usize) {
    assert!(acc.len() >= TILE && out.len() >= TILE && quarter < QUARTERS);
    let (down, right) = (quarter / 2 * SIDE, quarter % 2 * SIDE);
    // SAFETY: 16 rows of 16 elements, inside the tiles.
    unsafe {
        let lines = transpose_from(acc.as_ptr().add(down * PANEL + right).cast(), PANEL * size_of::<f32>());
        for (i, line) in lines.into_iter().enumerate() {
            _mm512_storeu_si512(out.as_mut_ptr().add((right + i) * PANEL + down).cast(), line);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::{gemm_tn, gemm_tn_scratch, gemm_with};
    use super::*;
    use crate::{Isa, normal};

    struct Copied;

    impl Epilogue<f32> for Copied {
        fn store_row(&self, _: usize, acc: &[f32], out: &mut [f32]) {
            out.copy_from_slice(acc);
        }
    }

    #[test]
    fn gemm_tn_has_the_bits_of_gemm() {
        let Some(pool) = Pool::on_isa(2, Isa::Amx) else { return };
        for [m, n, k] in [
            [32, 32, 32],
            [70, 33, 100],
            [33, 300, 1],
            [300, 40, 1024],
            [1, 1, 31],
            [256, 96, 513],
            // Larger than L2, with either operand the narrow one.
            [290, 610, 1024],
            [610, 290, 1000],
            [800, 600, 500],
        ] {
            assert!(GemmTnBlocking::of([m, n, k]).is_some());
            // Contiguous rows, and padded rows.
            let [a_stride, b_stride] = if k.is_multiple_of(2) { [m, n] } else { [m + 3, n + 32] };
            let (mut a, mut b) = (vec![bf16::ZERO; k * a_stride], vec![bf16::ZERO; k * b_stride]);
            normal(&pool, 1, 1, 0, 1.0, &mut a);
            normal(&pool, 1, 2, 0, 1.0, &mut b);
            let mut scratch = vec![f32::NAN; gemm_tn_scratch(m, n, k, 2)];
            let (mut expected, mut found) = (vec![0.0f32; m * n], vec![f32::NAN; m * n]);
            let (a, b) = (MatrixView::row_major(&a, a_stride), MatrixView::row_major(&b, b_stride));
            gemm_with(&pool, [m, n, k], a.transposed(), b, &mut expected, &mut scratch, |_, acc, out| {
                out.copy_from_slice(acc);
            });
            scratch.fill(f32::NAN);
            gemm_tn(&pool, [m, n, k], a, b, &mut found, &mut scratch, &Copied);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&expected), "{m} x {n} transposed {k} rows");
        }
    }
}
