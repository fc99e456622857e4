//! The AMX GEMM driver for few rows of A, as those of an expert: y = x · wᵀ.
//!
//! Each weight is used for a few rows only, so reading and packing the weights takes as long as multiplying them.
//! [`super::amx_driver`] packs all panels of B during the first 32 rows, while little is multiplied. Here two panels are
//! packed, and while they are multiplied with all rows the weights of the next two are prefetched.
//!
//! Only where the terms of a column of B are adjacent: two panels of dx = dy · w would be read 128 bytes of each row at a
//! time, for which no gain was seen.
//!
//! The bits are those of the other driver: a sum has the same tile steps in the same order.
#![allow(unsafe_code, reason = "accumulators are read and written through one raw pointer")]

use super::amx::AmxKernel;
use super::blocking::{PANEL, TILE};
use super::driver::{Interleaved, K_STEP, MicroKernel, Operands, TileRect, panels, store_rows};
use super::epilogue::{Epilogue, WIDE_ROW};
use super::prefetch::{CACHE_LINE, prefetch_read_l2};
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{PendingRows, Tile};
use zeroth_kernel::Element;

/// Most rows of a task: its rows of A stay in L2.
const FEW_ROWS: usize = 128;
/// Panels of B packed together.
const PACKED_TOGETHER: usize = 2;

/// Whether this driver takes a task: A has few rows and is read in place, and terms of a column of B are adjacent.
pub(super) fn fits<A: Element, B: Element>(operands: &Operands<'_, A, B>, rows: usize) -> bool {
    let k = operands.k;
    let one_block = 0 < k && k <= AmxKernel::BLOCKING.kc(k);
    rows <= FEW_ROWS
        && one_block
        && !operands.b.transposed().is_transposed()
        && AmxKernel::reads_in_place(operands.a, k)
}

/// Computes one task's block of C, as [`MicroKernel::run_task`], where [`fits`] says so.
pub(super) fn run_task<A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    // SAFETY: `Isa::available` reports AMX only with AVX-512 and its bf16 conversions.
    unsafe { by_columns(operands, out, scratch, epilogue) }
}

/// [`run_task`], with the interleaved work compiled to AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn by_columns<A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let (k, blocking) = (operands.k, AmxKernel::BLOCKING);
    let (rows, columns) = (out.rows(), out.columns());
    let mut scratch = ScratchSplitter::new(scratch);
    let acc = scratch.f32(TILE).as_mut_ptr();
    let (a_pack, b_pack) = panels::<AmxKernel>(scratch.rest(), PANEL, columns, k);
    let panel_len = blocking.panel_len(PANEL, k);
    let mut kernel = AmxKernel::configured();
    let a = operands.a.submatrix(out.first_row(), 0);
    let b = operands.b.transposed().submatrix(out.first_column(), 0);
    // While two panels are multiplied, the columns of the next two are prefetched, some by each micro-kernel call.
    let calls = PACKED_TOGETHER * rows.div_ceil(PANEL);
    let columns_per_call = (PACKED_TOGETHER * PANEL).div_ceil(calls);
    let rows_per_step = PANEL.div_ceil(k.div_ceil(K_STEP));
    // The C tile that is multiplied but not stored yet: its corner and its rows.
    let mut pending = ([0, 0], 0);
    for first in (0..columns).step_by(PACKED_TOGETHER * PANEL) {
        let together = (PACKED_TOGETHER * PANEL).min(columns - first);
        kernel.pack_b(
            b.submatrix(first, 0),
            together,
            k,
            &mut b_pack[..together.div_ceil(PANEL) * panel_len],
        );
        // Nothing is left to prefetch during the last panels.
        let next = first + PACKED_TOGETHER * PANEL;
        let count = if next < columns { columns_per_call } else { 0 };
        let mut start = b.data.as_ptr().wrapping_add(next * b.row_stride);
        for row in (0..rows).step_by(PANEL) {
            let a_panel = kernel.pack_a(a.submatrix(row, 0), PANEL.min(rows - row), k, &mut *a_pack);
            for (panel, b_panel) in b_pack.chunks_exact(panel_len).take(together.div_ceil(PANEL)).enumerate()
            {
                let rect = TileRect::new(&out, [row, first + panel * PANEL], [PANEL; 2]);
                let ([pending_row, pending_column], pending_rows) = pending;
                let first_column = out.first_column() + pending_column;
                let chunks = out.row_chunks([pending_row, pending_column], pending_rows);
                // SAFETY: the accumulators are one tile, written when it became pending. They are read until `drain`, before
                // they are overwritten; no one else uses them, and all pointers derive from one.
                unsafe {
                    let mut interleave = Interleave {
                        next: start,
                        stride: b.row_stride,
                        count,
                        rows_per_step,
                        first_column,
                        rows: chunks.with_acc(acc.cast_const().cast()),
                        epilogue,
                    };
                    let extent = rect.extent();
                    kernel.multiply_interleaved(a_panel, b_panel, acc, PANEL, extent, false, &mut interleave);
                }
                start = start.wrapping_add(columns_per_call * b.row_stride);
                pending = ([rect.row, rect.column], 0);
                if rect.columns == WIDE_ROW {
                    pending.1 = rect.rows;
                } else {
                    // SAFETY: the tile that was just written.
                    let acc = unsafe { std::slice::from_raw_parts(acc.cast_const(), TILE) };
                    store_rows::<WIDE_ROW, O>(acc, rect, &mut out, epilogue);
                }
            }
        }
    }
    let ([row, column], rows) = pending;
    let first_column = out.first_column() + column;
    // SAFETY: as above.
    let mut rows = unsafe { out.row_chunks([row, column], rows).with_acc(acc.cast_const().cast()) };
    while rows.take::<1>(|acc, out| epilogue.store_wide_row(first_column, acc, out)) {}
}

/// Work interleaved with one micro-kernel call: prefetches of B, and the stores of the previous C tile.
struct Interleave<'a, B, O, E> {
    /// The next term of the first column to prefetch, elements between columns, and columns.
    next: *const B,
    stride: usize,
    count: usize,
    rows_per_step: usize,
    /// First column of the pending rows in C.
    first_column: usize,
    rows: PendingRows<'a, O, WIDE_ROW>,
    epilogue: &'a E,
}

impl<B, O, E: Epilogue<O>> Interleaved for Interleave<'_, B, O, E> {
    #[inline(always)]
    fn k_step(&mut self) {
        for column in 0..self.count {
            let start = self.next.wrapping_add(column * self.stride).cast::<u8>();
            for line in (0..K_STEP * size_of::<B>()).step_by(CACHE_LINE) {
                prefetch_read_l2(start.wrapping_add(line));
            }
        }
        self.next = self.next.wrapping_add(K_STEP);
        let Self { first_column, rows, epilogue, .. } = self;
        for _ in 0..self.rows_per_step {
            rows.take::<1>(|acc, out| epilogue.store_wide_row(*first_column, acc, out));
        }
    }

    #[inline(always)]
    fn drain(&mut self) {
        let Self { first_column, rows, epilogue, .. } = self;
        while rows.take::<1>(|acc, out| epilogue.store_wide_row(*first_column, acc, out)) {}
    }
}
