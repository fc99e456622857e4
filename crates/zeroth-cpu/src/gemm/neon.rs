//! The NEON f32 micro-kernel: an 8 × 12 C tile in 24 of the 32 vector registers. 16-bit elements are widened as they are
//! packed.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::aarch64::{vaddq_f32, vdupq_n_f32, vfmaq_laneq_f32, vld1q_f32, vst1q_f32};

use super::MatrixView;
use super::blocking::{self, Blocking};
use super::epilogue::Epilogue;
use super::micro_kernel::{MicroKernel, TileRect, store_rows};
use super::pack::pack_panel;
use crate::isa::Isa;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

const MR: usize = 8;
const NR: usize = 12;
/// f32 lanes of a vector register.
const LANES: usize = 4;

/// The micro-kernel.
pub(super) struct NeonKernel;

impl MicroKernel for NeonKernel {
    type Packed = f32;
    const BLOCKING: Blocking = blocking::NEON;

    fn setup() -> Self {
        Self
    }

    type PackedA<'a> = &'a [f32];

    fn pack_a<'a, T: Element>(
        &self,
        source: MatrixView<'a, T>,
        rows: usize,
        kc: usize,
        out: &'a mut [f32],
    ) -> &'a [f32] {
        pack_panel(Isa::Neon, source, rows, kc, MR, out);
        out
    }

    fn pack_b<T: Element>(&self, source: MatrixView<T>, columns: usize, kc: usize, out: &mut [f32]) {
        pack_panel(Isa::Neon, source, columns, kc, NR, out);
    }

    fn multiply(
        &mut self,
        a: &[f32],
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        extent: [usize; 2],
        add: bool,
    ) {
        let [rows, columns] = extent;
        assert!(rows <= MR && columns <= NR && (rows - 1) * stride + columns <= c.len());
        if extent == [MR, NR] {
            multiply(a, b, c, stride, add);
            return;
        }
        let mut tile = [0.0; MR * NR];
        multiply(a, b, &mut tile, NR, false);
        for (acc, c) in tile.chunks_exact(NR).zip(c.chunks_mut(stride)).take(rows) {
            for (c, sum) in c[..columns].iter_mut().zip(acc) {
                *c = if add { *c + sum } else { *sum };
            }
        }
    }

    fn store_tile<O, E: Epilogue<O>>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &E) {
        store_rows::<NR, O>(acc, rect, out, epilogue);
    }
}

/// Multiplies two panels into a full C tile.
fn multiply(a: &[f32], b: &[f32], c: &mut [f32], stride: usize, add: bool) {
    assert!((MR - 1) * stride + NR <= c.len());
    // SAFETY: NEON is part of AArch64. Panels are read in whole chunks, and the tile is inside `c`.
    unsafe {
        let mut acc = [[vdupq_n_f32(0.0); 3]; MR];
        for (a, b) in a.as_chunks::<MR>().0.iter().zip(b.as_chunks::<NR>().0) {
            let b = [0, 1, 2].map(|part| vld1q_f32(b.as_ptr().add(part * LANES)));
            for half in 0..2 {
                let a = vld1q_f32(a.as_ptr().add(half * LANES));
                let [first, second, third, fourth] = acc.as_chunks_mut::<LANES>().0[half].each_mut();
                for part in 0..3 {
                    first[part] = vfmaq_laneq_f32::<0>(first[part], b[part], a);
                    second[part] = vfmaq_laneq_f32::<1>(second[part], b[part], a);
                    third[part] = vfmaq_laneq_f32::<2>(third[part], b[part], a);
                    fourth[part] = vfmaq_laneq_f32::<3>(fourth[part], b[part], a);
                }
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            for (part, sum) in acc.into_iter().enumerate() {
                let at = c.as_mut_ptr().add(i * stride + part * LANES);
                vst1q_f32(at, if add { vaddq_f32(vld1q_f32(at), sum) } else { sum });
            }
        }
    }
}
