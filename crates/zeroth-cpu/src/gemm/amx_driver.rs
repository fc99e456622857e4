//! The software-pipelined GEMM driver for AMX. A C tile is stored while the next one is multiplied: AMX instructions leave
//! the vector units idle.
#![allow(unsafe_code, reason = "accumulators are read and written through one raw pointer")]

use super::amx::AmxKernel;
use super::blocking::{PANEL, TILE};
use super::driver::{
    Interleaved, K_STEP, MicroKernel, Operands, TileRect, panels, serpentine, store_rows, store_zeros,
};
use super::epilogue::{Epilogue, WIDE_ROW};
use super::prefetch::{CACHE_LINE, Prefetch, prefetch_write};
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
            pipelined::<A, B, O, E, true>(operands, out, scratch, epilogue);
        } else {
            pipelined::<A, B, O, E, false>(operands, out, scratch, epilogue);
        }
    }
}

/// [`run_task`], with the interleaved work compiled to AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn pipelined<A: Element, B: Element, O, E: Epilogue<O>, const FETCHES_C: bool>(
    operands: Operands<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let (k, blocking) = (operands.k, AmxKernel::BLOCKING.for_layout(operands.a.is_transposed()));
    let (rows, columns) = (out.rows(), out.columns());
    let mut scratch = ScratchSplitter::new(scratch);
    let (acc, pack) = (scratch.f32(blocking.acc_len(rows, columns, k)), scratch.rest());
    if k == 0 {
        return store_zeros::<AmxKernel, O, E>(&mut acc[..TILE], &mut out, epilogue);
    }
    // With one block of k, all C tiles share one slot, which stays in L1: it is read out before it is overwritten. Else
    // each tile has its own slot.
    let (slots, acc) = (acc.len() / TILE, acc.as_mut_ptr());
    let mut kernel = AmxKernel::configured();
    let a = operands.a.submatrix(out.first_row(), 0);
    let b = operands.b.transposed().submatrix(out.first_column(), 0);
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
        let rows_per_step = PANEL.div_ceil(kc.div_ceil(K_STEP));
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
                    let rect = TileRect::new(&out, [row, panel * PANEL], [PANEL; 2]);
                    if row == 0 && panel.is_multiple_of(b_per_pack) {
                        let together = b_per_pack.min(across - panel);
                        let out = &mut b_pack[panel * panel_len..][..together * panel_len];
                        let columns = (together * PANEL).min(columns - rect.column);
                        kernel.pack_b(b.submatrix(rect.column, first), columns, kc, out);
                    }
                    let b_panel = &b_pack[panel * panel_len..][..panel_len];
                    let mut prefetch = Prefetch::<A, FETCHES_C>::none(b_panel.as_ptr().cast());
                    if let Some(next_a) = next_a {
                        let start = next_a.wrapping_add(turn * rows_per_panel * a.row_stride);
                        prefetch.set_a(start, a.row_stride);
                    }
                    let slot = if one_block { 0 } else { row / PANEL * across + panel };
                    assert!(slot < slots);
                    if last && (E::READS_OUTPUT || k <= FEW_STEPS) {
                        let stride = out.stride();
                        let c = out.row(row)[rect.column..].as_ptr();
                        prefetch.set_c(c, rect.columns, stride);
                        // Sums of a few steps leave no time for two rows per step.
                        for row in 2 * kc.div_ceil(K_STEP)..rect.rows {
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
                    let first_column = out.first_column() + pending.corner[1];
                    let chunks = out.row_chunks(pending.corner, pending.rows);
                    // SAFETY: `pending_acc` is a full tile, written when it became pending. It is read until `drain`, before
                    // the same memory is overwritten; no one else uses it, and all pointers derive from one.
                    unsafe {
                        let rows = chunks.with_acc(pending_acc.cast_const().cast());
                        let mut interleave =
                            Interleave { prefetch, rows_per_step, first_column, rows, epilogue };
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
                    if last && rect.columns == WIDE_ROW {
                        pending.rows = rect.rows;
                    } else if last {
                        // SAFETY: the tile that was just written.
                        let acc = unsafe { std::slice::from_raw_parts(acc.cast_const(), TILE) };
                        store_rows::<WIDE_ROW, O>(acc, rect, &mut out, epilogue);
                    }
                }
            }
        }
    }
    let first_column = out.first_column() + pending.corner[1];
    let chunks = out.row_chunks(pending.corner, pending.rows);
    // SAFETY: as above.
    let rows = unsafe { chunks.with_acc(acc.wrapping_add(pending.slot * TILE).cast_const().cast()) };
    let prefetch = Prefetch::<A, FETCHES_C>::none(std::ptr::null());
    Interleave { prefetch, rows_per_step: 0, first_column, rows, epilogue }.drain();
}

/// A finished C tile that is not stored yet: its corner in the output, its rows, and its accumulator slot.
struct PendingTile {
    corner: [usize; 2],
    rows: usize,
    slot: usize,
}

/// Work interleaved with one micro-kernel call: prefetches, and the stores of the previous C tile.
struct Interleave<'a, A, O, E, const FETCHES_C: bool> {
    prefetch: Prefetch<A, FETCHES_C>,
    rows_per_step: usize,
    /// First column of the pending rows in C.
    first_column: usize,
    rows: PendingRows<'a, O, WIDE_ROW>,
    epilogue: &'a E,
}

impl<A, O, E: Epilogue<O>, const FETCHES_C: bool> Interleaved for Interleave<'_, A, O, E, FETCHES_C> {
    #[inline(always)]
    fn k_step(&mut self) {
        self.prefetch.k_step();
        self.store();
    }

    #[inline(always)]
    fn drain(&mut self) {
        while self.store_rows::<1>() {}
    }
}

impl<A, O, E: Epilogue<O>, const FETCHES_C: bool> Interleave<'_, A, O, E, FETCHES_C> {
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
