//! The software-pipelined GEMM driver for AMX. A C tile is stored while the next one is multiplied: AMX instructions leave
//! the vector units idle.
#![allow(unsafe_code, reason = "accumulators are read and written through one raw pointer")]

use super::amx::AmxKernel;
use super::amx_gemm_tn::{QUARTERS, transpose_quarter};
use super::blocking::{PANEL, TILE};
use super::epilogue::{Epilogue, WIDE_ROW};
use super::micro_kernel::{
    Interleaved, K_STEP, MicroKernel, Operands, TileRect, panels, serpentine, store_rows, store_zeros,
};
use super::prefetch::{CACHE_LINE, Prefetch, RowPrefetch, prefetch_write};
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{PendingRows, Tile};
use zeroth_kernel::Element;

/// Terms of k up to which a tile's stores outlast its multiplication. The loads of the next tile's sums wait until tile stores have
/// left the store buffer, behind the stores to C: one that misses the cache delays them all.
const FEW_STEPS: usize = 4 * K_STEP;

/// Computes one task's block of C, as [`MicroKernel::run_task`].
pub(super) fn run_task<A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let blocking = AmxKernel::BLOCKING.for_layout(operands.a.is_transposed());
    // SAFETY: `Isa::available` reports AMX only with AVX-512 and its bf16 conversions.
    unsafe {
        // C is prefetched where the epilogue reads the output, where k takes more than one block, and where a tile has too few
        // k-steps to hide the misses of its stores.
        if E::READS_OUTPUT || operands.k > blocking.kc(operands.k) || operands.k <= FEW_STEPS {
            pipelined::<A, B, O, E, true, false>(operands, out, scratch, epilogue);
        } else {
            pipelined::<A, B, O, E, false, false>(operands, out, scratch, epilogue);
        }
    }
}

/// [`run_task`] with exchanged operands: Cᵀ = Bᵀ · Aᵀ, whose tiles are transposed as they are stored. So a column-major B is read
/// in place, and A is packed.
pub(super) fn run_exchanged_task<A: Element, B: Element, O, E: Epilogue<O>>(
    Operands { k, a, b }: Operands<'_, A, B>,
    out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let operands = Operands { k, a: b.transposed(), b: a.transposed() };
    // SAFETY: as in `run_task`.
    unsafe {
        if E::READS_OUTPUT || k > AmxKernel::BLOCKING.kc(k) || k <= FEW_STEPS {
            pipelined::<B, A, O, E, true, true>(operands, out, scratch, epilogue);
        } else {
            pipelined::<B, A, O, E, false, true>(operands, out, scratch, epilogue);
        }
    }
}

/// [`run_task`], with the interleaved work compiled to AVX-512. With `EXCHANGED` the product is the transpose of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn pipelined<A: Element, B: Element, O, E: Epilogue<O>, const FETCHES_C: bool, const EXCHANGED: bool>(
    operands: Operands<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let (k, blocking) = (operands.k, AmxKernel::BLOCKING.for_layout(operands.a.is_transposed()));
    let exchange = |[row, column]: [usize; 2]| if EXCHANGED { [column, row] } else { [row, column] };
    let [rows, columns] = exchange([out.rows(), out.columns()]);
    let mut scratch = ScratchSplitter::new(scratch);
    let acc = scratch.f32(blocking.acc_len(rows, columns, k));
    let transposed = scratch.f32(if EXCHANGED { TILE } else { 0 }).as_mut_ptr();
    let pack = scratch.rest();
    if k == 0 {
        return store_zeros::<AmxKernel, O, E>(&mut acc[..TILE], &mut out, epilogue);
    }
    // With one block of k, all C tiles share one slot, which stays in L1: it is read out before it is overwritten. Else
    // each tile has its own slot.
    let (slots, acc) = (acc.len() / TILE, acc.as_mut_ptr());
    let mut kernel = AmxKernel::configured();
    let [first_row, first_column] = exchange([out.first_row(), out.first_column()]);
    let a = operands.a.submatrix(first_row, 0);
    let b = operands.b.transposed().submatrix(first_column, 0);
    let (across, group_rows) = (columns.div_ceil(PANEL), blocking.panels_per_pack * PANEL);
    // Rows of A that each B panel prefetches.
    let rows_per_panel = PANEL.div_ceil(across.max(1));
    // Where B is row-major, all of its panels are packed together: longer reads along a row engage the hardware prefetcher.
    // With two panels at a time a GEMM of 512 rows took up to a quarter longer.
    let b_per_pack = if b.is_transposed() { across } else { blocking.panels_per_pack };
    let one_block = k <= blocking.kc(k);
    let mut pending = PendingTile { corner: [0, 0], rows: 0, slot: 0 };
    for first in (0..k).step_by(blocking.kc(k)) {
        let kc = blocking.kc(k).min(k - first);
        let last = first + kc == k;
        let (a_pack, b_pack) = panels::<AmxKernel>(pack, group_rows, columns, kc);
        let panel_len = blocking.panel_len(PANEL, kc);
        let k_steps = kc.div_ceil(K_STEP);
        let rows_per_step = if EXCHANGED {
            PANEL.div_ceil(k_steps.saturating_sub(QUARTERS).max(1))
        } else {
            PANEL.div_ceil(k_steps)
        };
        for group in (0..rows).step_by(group_rows) {
            let packed = kernel.pack_a(a.submatrix(group, first), group_rows.min(rows - group), kc, a_pack);
            for row in (group..rows.min(group + group_rows)).step_by(PANEL) {
                let a_panel = packed.panel((row - group) / PANEL);
                let (next_row, next_k) =
                    if row + PANEL < rows { (row + PANEL, first) } else { (0, first + kc) };
                // A column-major A is packed row after row, which the hardware prefetcher follows.
                let next_a = (next_k < k && !a.is_transposed())
                    .then(|| a.data.as_ptr().wrapping_add(next_row * a.row_stride + next_k));
                for turn in 0..across {
                    let panel = serpentine(row / PANEL, turn, across);
                    let rect = TileRect {
                        row,
                        column: panel * PANEL,
                        rows: PANEL.min(rows - row),
                        columns: PANEL.min(columns - panel * PANEL),
                    };
                    if row == 0 && panel.is_multiple_of(b_per_pack) {
                        let together = b_per_pack.min(across - panel);
                        let out = &mut b_pack[panel * panel_len..][..together * panel_len];
                        let columns = (together * PANEL).min(columns - rect.column);
                        kernel.pack_b(b.submatrix(rect.column, first), columns, kc, out);
                    }
                    let b_panel = &b_pack[panel * panel_len..][..panel_len];
                    let mut prefetch = Prefetch::<A, FETCHES_C>::none(b_panel.as_ptr().cast());
                    let mut next_rows = RowPrefetch::new(b_panel.as_ptr(), 0, 0, k_steps);
                    if let Some(next_a) = next_a {
                        let start = next_a.wrapping_add(turn * rows_per_panel * a.row_stride);
                        if EXCHANGED {
                            next_rows = RowPrefetch::new(start, a.row_stride, rows_per_panel, k_steps);
                        } else {
                            prefetch.set_a(start, a.row_stride);
                        }
                    }
                    let slot = if one_block { 0 } else { row / PANEL * across + panel };
                    assert!(slot < slots);
                    if last && (E::READS_OUTPUT || k <= FEW_STEPS) {
                        let stride = out.stride();
                        let [first, column] = exchange([row, rect.column]);
                        let [rows, columns] = exchange(rect.extent());
                        let c = out.row(first)[column..].as_ptr();
                        prefetch.set_c(c, columns, stride);
                        // Sums of a few steps leave no time for two rows per step.
                        for row in 2 * k_steps..rows {
                            let first = c.wrapping_add(row * stride).cast::<u8>();
                            prefetch_write(first);
                            prefetch_write(first.wrapping_add(CACHE_LINE));
                        }
                    } else if !one_block {
                        // The accumulators of the next tile have left the cache since the previous block of k. After the
                        // last panel of a row comes the same panel of the next row.
                        let next = match turn + 1 {
                            end if end == across => slot + across,
                            turn => row / PANEL * across + serpentine(row / PANEL, turn, across),
                        };
                        prefetch.set_c(acc.wrapping_add(next * TILE), PANEL, PANEL);
                    }
                    let (acc, pending_acc) =
                        (acc.wrapping_add(slot * TILE), acc.wrapping_add(pending.slot * TILE));
                    let corner = exchange(pending.corner);
                    let first_column = out.first_column() + corner[1];
                    let chunks = out.row_chunks(corner, pending.rows);
                    // SAFETY: `pending_acc` is a full tile, written when it became pending. It is read until `drain`, before
                    // the same memory is overwritten; no one else uses it, and all pointers derive from one.
                    unsafe {
                        let sums = if EXCHANGED { transposed } else { pending_acc };
                        let rows = chunks.with_acc(sums.cast_const().cast());
                        let mut interleave = Interleave::<_, _, _, FETCHES_C, EXCHANGED> {
                            prefetch,
                            next_rows,
                            rows_per_step,
                            acc: pending_acc,
                            transposed,
                            quarters: if pending.rows > 0 { 0 } else { QUARTERS },
                            first_column,
                            rows,
                            epilogue,
                        };
                        let extent = rect.extent();
                        kernel.multiply_interleaved(
                            a_panel,
                            b_panel,
                            acc,
                            PANEL,
                            extent,
                            first > 0,
                            &mut interleave,
                        );
                    }
                    pending = PendingTile { corner: [rect.row, rect.column], rows: 0, slot };
                    let [tile_rows, tile_columns] = exchange(rect.extent());
                    if last && tile_columns == WIDE_ROW {
                        pending.rows = tile_rows;
                    } else if last {
                        let [row, column] = exchange([rect.row, rect.column]);
                        let rect = TileRect { row, column, rows: tile_rows, columns: tile_columns };
                        // SAFETY: the tile that was just written, and a buffer that no pending tile needs.
                        unsafe {
                            let mut acc = std::slice::from_raw_parts(acc.cast_const(), TILE);
                            if EXCHANGED {
                                let transposed = std::slice::from_raw_parts_mut(transposed, TILE);
                                (0..QUARTERS).for_each(|quarter| transpose_quarter(acc, transposed, quarter));
                                acc = transposed;
                            }
                            store_rows::<WIDE_ROW, O>(acc, rect, &mut out, epilogue);
                        }
                    }
                }
            }
        }
    }
    let corner = exchange(pending.corner);
    let first_column = out.first_column() + corner[1];
    let chunks = out.row_chunks(corner, pending.rows);
    let acc = acc.wrapping_add(pending.slot * TILE);
    // SAFETY: as above.
    let rows = unsafe { chunks.with_acc(if EXCHANGED { transposed } else { acc }.cast_const().cast()) };
    Interleave::<_, _, _, FETCHES_C, EXCHANGED> {
        prefetch: Prefetch::<A, FETCHES_C>::none(std::ptr::null()),
        next_rows: RowPrefetch::new(std::ptr::null::<A>(), 0, 0, 1),
        rows_per_step: 0,
        acc,
        transposed,
        quarters: if pending.rows > 0 { 0 } else { QUARTERS },
        first_column,
        rows,
        epilogue,
    }
    .drain();
}

/// A finished C tile that is not stored yet: its corner in the output, its rows, and its accumulator slot.
struct PendingTile {
    corner: [usize; 2],
    rows: usize,
    slot: usize,
}

/// Work interleaved with one micro-kernel call: prefetches, and the stores of the previous C tile.
struct Interleave<'a, A, O, E, const FETCHES_C: bool, const EXCHANGED: bool> {
    prefetch: Prefetch<A, FETCHES_C>,
    /// The next rows of A, instead of those of `prefetch`, with `EXCHANGED`.
    next_rows: RowPrefetch,
    rows_per_step: usize,
    /// With `EXCHANGED` the previous tile, its transpose, and how many quarters that has so far.
    acc: *const f32,
    transposed: *mut f32,
    quarters: usize,
    /// First column of the pending rows in C.
    first_column: usize,
    rows: PendingRows<'a, O, WIDE_ROW>,
    epilogue: &'a E,
}

impl<A, O, E: Epilogue<O>, const FETCHES_C: bool, const EXCHANGED: bool> Interleaved
    for Interleave<'_, A, O, E, FETCHES_C, EXCHANGED>
{
    #[inline(always)]
    fn k_step(&mut self) {
        if EXCHANGED {
            self.next_rows.k_step();
            self.prefetch.c_step();
            if self.transpose_quarter() {
                return;
            }
        } else {
            self.prefetch.k_step();
        }
        self.store();
    }

    #[inline(always)]
    fn drain(&mut self) {
        while EXCHANGED && self.transpose_quarter() {}
        while self.store_rows::<1>() {}
    }
}

impl<A, O, E: Epilogue<O>, const FETCHES_C: bool, const EXCHANGED: bool>
    Interleave<'_, A, O, E, FETCHES_C, EXCHANGED>
{
    /// Transposes the next quarter of the previous tile; false if there is none left.
    #[inline(always)]
    fn transpose_quarter(&mut self) -> bool {
        if self.quarters == QUARTERS {
            return false;
        }
        // SAFETY: two full tiles, which nobody else uses until `drain` returns; AMX implies AVX-512.
        unsafe {
            let acc = std::slice::from_raw_parts(self.acc, TILE);
            transpose_quarter(acc, std::slice::from_raw_parts_mut(self.transposed, TILE), self.quarters);
        }
        self.quarters += 1;
        true
    }

    /// Stores the rows of one k-step.
    #[inline(always)]
    fn store(&mut self) {
        if self.rows_per_step == 1 {
            self.store_rows::<1>();
            return;
        }
        for _ in 0..self.rows_per_step.div_ceil(2) {
            self.store_rows::<2>();
        }
    }

    /// Stores the next `COUNT` rows; false if fewer are left.
    #[inline(always)]
    fn store_rows<const COUNT: usize>(&mut self) -> bool {
        let Some(rows) = self.rows.take::<COUNT>() else { return false };
        for (acc, out) in rows {
            self.epilogue.store_wide_row(self.first_column, acc, out);
        }
        true
    }
}
