//! The software-pipelined GEMM driver for the AVX-512 f32 micro-kernel.
//!
//! The FMA loop leaves the load ports and the memory bus mostly idle. While one panel of A is multiplied, the next is
//! packed or, if the kernel can read it in place, prefetched, and so are the rows of the C tile that will be written.

use super::avx512::{Avx512Kernel, multiply};
use super::avx512_pack::{APanel, GROUP_PANELS, LANES, MR, NR, PanelPacker, panel_len, readable_in_place};
use super::epilogue::Epilogue;
use super::micro_kernel::{Interleaved, K_STEP, MicroKernel, Operands, TileRect, store_zeros};
use super::prefetch::{CACHE_LINE, prefetch_read_l2, prefetch_write};
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

/// Memory work interleaved with the FMA loop of one micro-kernel call: the f32 micro-kernel leaves the load ports idle, so
/// every k-step also packs (or prefetches) a slice of the next A panel and, near the end, prefetches the C tile for writing.
struct Interleave<'a, 'f, T> {
    /// Packs the next A panels; `None` where A is read in place.
    pack_next: Option<&'a mut PanelPacker<'f, T>>,
    /// First row of the next A panel, prefetched where it is not packed; rows are `a_stride` elements apart.
    next_a: *const T,
    a_stride: usize,
    /// Cache lines packed, or rows prefetched, per k-step.
    per_step: usize,
    /// Accumulator and output tiles, prefetched for writing during the last k-steps.
    outputs: [TileRows; 2],
    steps_left: usize,
}

/// The rows of a tile in memory, in bytes: first row, row stride, and offset of a row's last byte.
#[derive(Clone, Copy)]
struct TileRows {
    start: *const u8,
    stride: usize,
    last: usize,
}

impl TileRows {
    fn new<O>(start: *const O, stride: usize, columns: usize) -> Self {
        let [stride, width] = [stride, columns].map(|count| count * size_of::<O>());
        Self { start: start.cast(), stride, last: width.saturating_sub(1) }
    }
}

impl<T: Element> Interleaved for Interleave<'_, '_, T> {
    #[inline(always)]
    fn k_step(&mut self) {
        if let Some(pack_next) = &mut self.pack_next {
            pack_next.step(self.per_step);
        } else {
            for row in 0..self.per_step {
                let row = self.next_a.wrapping_add(row * self.a_stride);
                for line in (0..K_STEP).step_by(LANES) {
                    prefetch_read_l2(row.wrapping_add(line).cast());
                }
            }
            self.next_a = self.next_a.wrapping_add(K_STEP);
        }
        self.steps_left -= 1;
        // One row during each of the last k-steps.
        if self.steps_left < MR {
            for rows in self.outputs {
                let row = rows.start.wrapping_add(self.steps_left * rows.stride);
                for at in [0, CACHE_LINE.min(rows.last), (2 * CACHE_LINE).min(rows.last), rows.last] {
                    prefetch_write(row.wrapping_add(at));
                }
            }
        }
    }
}

/// Computes one task's block of C, as [`MicroKernel::run_task`].
pub(super) fn run_task<A: Element, B: Element, O, E: Epilogue<O>>(
    operands: Operands<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    epilogue: &E,
) {
    let (k, blocking) = (operands.k, Avx512Kernel::BLOCKING);
    let (rows, columns) = (out.rows(), out.columns());
    let (tile_len, group_rows) = (MR * NR, GROUP_PANELS * MR);
    let mut scratch = ScratchSplitter::new(scratch);
    let acc = scratch.f32(blocking.acc_len(rows, columns, k));
    if k == 0 {
        return store_zeros::<Avx512Kernel, O, E>(&mut acc[..tile_len], &mut out, epilogue);
    }
    let across = columns.div_ceil(NR);
    let kc_max = blocking.kc(k);
    // One group of A panels is multiplied while the other is packed.
    let mut current = scratch.f32(blocking.panel_len(group_rows, kc_max));
    let mut next = scratch.f32(blocking.panel_len(blocking.panels_per_pack * MR, kc_max) - current.len());
    let b_pack = scratch.rest();
    let a = operands.a.submatrix(out.first_row(), 0);
    let b = operands.b.transposed().submatrix(out.first_column(), 0);
    let group = |row: usize, first: usize| {
        (a.submatrix(row, first), group_rows.min(rows - row), kc_max.min(k - first))
    };
    let packs_a = !readable_in_place(a);
    if packs_a {
        PanelPacker::new(group(0, 0), current).finish();
    }
    for first in (0..k).step_by(kc_max) {
        let (kc, last) = (kc_max.min(k - first), first + kc_max >= k);
        let (k_steps, b_len) = (kc.div_ceil(K_STEP), blocking.panel_len(NR, kc));
        for top in (0..rows).step_by(group_rows) {
            let bottom = rows.min(top + group_rows);
            let (next_row, next_k) = if bottom < rows { (bottom, first) } else { (0, first + kc) };
            let mut packer = (packs_a && next_k < k).then(|| PanelPacker::new(group(next_row, next_k), next));
            let all_steps = (bottom - top).div_ceil(MR) * across * k_steps;
            let lines_per_step = packer.as_ref().map_or(0, |packer| packer.lines().div_ceil(all_steps));
            for (row, packed) in (top..bottom).step_by(MR).zip(current.chunks_exact(panel_len(kc))) {
                let a_panel = APanel::in_place(a.submatrix(row, first), MR.min(rows - row), kc)
                    .unwrap_or_else(|| APanel::packed(packed, kc, a.is_transposed()));
                let (next_row, next_k) = if row + MR < rows { (row + MR, first) } else { (0, first + kc) };
                let next_a = a.data.as_ptr().wrapping_add(next_row * a.row_stride + next_k);
                // Zero where nothing follows.
                let per_step = if packs_a || next_k >= k { lines_per_step } else { MR.div_ceil(across) };
                // In order: the hardware prefetcher reads past the end of a B panel, into the next one.
                for panel in 0..across {
                    let rect = TileRect::new(&out, [row, panel * NR], [MR, NR]);
                    let b_panel = &mut b_pack[panel * b_len..][..b_len];
                    if row == 0 {
                        Avx512Kernel.pack_b(b.submatrix(rect.column, first), rect.columns, kc, b_panel);
                    }
                    let slot = if k <= kc_max { 0 } else { row / MR * across + panel };
                    let acc = &mut acc[slot * tile_len..][..tile_len];
                    let acc_rows = TileRows::new(acc.as_ptr(), NR, rect.columns);
                    let stride = out.stride();
                    let out_rows = TileRows::new(out.row(row)[rect.column..].as_ptr(), stride, rect.columns);
                    let mut interleave = Interleave {
                        pack_next: packer.as_mut(),
                        next_a: next_a.wrapping_add(panel * per_step * a.row_stride),
                        a_stride: a.row_stride,
                        per_step,
                        outputs: [acc_rows, if last { out_rows } else { acc_rows }],
                        steps_left: k_steps,
                    };
                    multiply(a_panel, b_panel, acc, NR, rect.extent(), first > 0, &mut interleave);
                    if last {
                        Avx512Kernel::store_tile(acc, rect, &mut out, epilogue);
                    }
                }
            }
            if let Some(packer) = packer {
                packer.finish();
                std::mem::swap(&mut current, &mut next);
            }
        }
    }
}
