//! The AMX GEMM driver for a short inner dimension, as the rank of an adapter: y += u · Bᵀ.
//!
//! A C tile takes one or two tile steps, so the time is that of reading and writing C. [`super::amx_driver`] would store a
//! tile right behind the tile instructions that produce it: the loads of its accumulators wait until those have left the
//! store buffer, behind the stores of the previous tile, and there is no k loop to prefetch C in. Here a strip of tiles is
//! multiplied first, then stored row by row, while the rows of the next strip are prefetched.
//!
//! The bits are those of the other driver: a sum has the same tile steps in the same order.
#![allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]

use super::amx::AmxKernel;
use super::blocking::{PANEL, STRIP_PANELS};
use super::epilogue::{Epilogue, WIDE_ROW};
use super::micro_kernel::{MicroKernel, Operands, panels};
use super::prefetch::{CACHE_LINE, prefetch_write};
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

/// Columns of a strip.
const STRIP: usize = STRIP_PANELS * PANEL;

/// Computes one task's block of C, as [`MicroKernel::run_task`], for a k above 0 that is at most [`super::blocking::SHORT_K`].
pub(super) fn run_task<A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    // SAFETY: `Isa::available` reports AMX only with AVX-512 and its bf16 conversions.
    unsafe { by_strips(operands, out, scratch, epilogue) }
}

/// [`run_task`], with the epilogue compiled to AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn by_strips<A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let (k, blocking) = (operands.k, AmxKernel::BLOCKING);
    let (rows, columns) = (out.rows(), out.columns());
    let mut scratch = ScratchSplitter::new(scratch);
    // The accumulators of a strip, [32, STRIP].
    let acc = scratch.f32(PANEL * STRIP);
    let group_rows = blocking.panels_per_pack * PANEL;
    let (a_pack, b_pack) = panels::<AmxKernel>(scratch.rest(), group_rows, columns, k);
    let mut kernel = AmxKernel::configured();
    let a = operands.a.submatrix(out.first_row(), 0);
    kernel.pack_b(operands.b.transposed().submatrix(out.first_column(), 0), columns, k, b_pack);
    let panel_len = blocking.panel_len(PANEL, k);
    for group in (0..rows).step_by(group_rows) {
        let packed = kernel.pack_a(a.submatrix(group, 0), group_rows.min(rows - group), k, a_pack);
        for row in (group..rows.min(group + group_rows)).step_by(PANEL) {
            let a_panel = packed.panel((row - group) / PANEL);
            let tile_rows = PANEL.min(rows - row);
            for first in (0..columns).step_by(STRIP) {
                let strip = STRIP.min(columns - first);
                for column in (0..strip).step_by(PANEL) {
                    let b_panel = &b_pack[(first + column) / PANEL * panel_len..][..panel_len];
                    let extent = [tile_rows, PANEL.min(strip - column)];
                    kernel.multiply(a_panel, b_panel, &mut acc[column..], STRIP, extent, false);
                }
                let next =
                    if first + STRIP < columns { Some([row, first + STRIP]) } else { Some([row + PANEL, 0]) };
                let next = next.filter(|next| next[0] < rows);
                for (i, acc) in acc.as_chunks::<STRIP>().0.iter().enumerate().take(tile_rows) {
                    if let Some([next_row, next_column]) = next
                        && next_row + i < rows
                    {
                        let line = &mut out.row(next_row + i)[next_column..];
                        let bytes = size_of::<O>() * line.len().min(STRIP);
                        let start = line.as_ptr().cast::<u8>();
                        for at in (0..bytes).step_by(CACHE_LINE) {
                            prefetch_write(start.wrapping_add(at));
                        }
                    }
                    let first_column = out.first_column() + first;
                    let (wide, edge) = out.row(row + i)[first..][..strip].as_chunks_mut::<WIDE_ROW>();
                    let last = WIDE_ROW * wide.len();
                    for (at, (acc, out)) in acc.as_chunks().0.iter().zip(wide).enumerate() {
                        epilogue.store_wide_row(first_column + at * WIDE_ROW, acc, out);
                    }
                    if !edge.is_empty() {
                        epilogue.store_row(first_column + last, &acc[last..strip], edge);
                    }
                }
            }
        }
    }
}
