//! The f32 kernel of Arm's 128-bit vectors: 8 by 12 sums in 24 of the 32 registers. 16-bit numbers are widened when
//! they are packed.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::aarch64::{vaddq_f32, vdupq_n_f32, vfmaq_laneq_f32, vld1q_f32, vst1q_f32};

use super::View;
use super::blocking::{self, Sizes};
use super::driver::{Kernel, Place, finish_rows};
use super::epilogue::Store;
use super::pack::pack_panel;
use crate::isa::Isa;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

const ROWS: usize = 8;
const COLUMNS: usize = 12;
/// Lanes of a register.
const LANES: usize = 4;

/// The kernel; it has no state.
pub(super) struct Neon;

impl Kernel for Neon {
    type Packed = f32;
    const SIZES: Sizes = blocking::NEON;

    fn start() -> Self {
        Self
    }

    type Rows<'a> = &'a [f32];

    fn pack_rows<'a, T: Element>(
        &self,
        source: View<'a, T>,
        rows: usize,
        depth: usize,
        out: &'a mut [f32],
    ) -> &'a [f32] {
        pack_panel(Isa::Neon, source, rows, depth, ROWS, out);
        out
    }

    fn pack_columns<T: Element>(&self, source: View<T>, columns: usize, depth: usize, out: &mut [f32]) {
        pack_panel(Isa::Neon, source, columns, depth, COLUMNS, out);
    }

    fn multiply(&mut self, a: &[f32], b: &[f32], c: &mut [f32], stride: usize, live: [usize; 2], add: bool) {
        let [rows, columns] = live;
        assert!(rows <= ROWS && columns <= COLUMNS && (rows - 1) * stride + columns <= c.len());
        if live == [ROWS, COLUMNS] {
            multiply(a, b, c, stride, add);
            return;
        }
        let mut tile = [0.0; ROWS * COLUMNS];
        multiply(a, b, &mut tile, COLUMNS, false);
        for (sums, c) in tile.chunks_exact(COLUMNS).zip(c.chunks_mut(stride)).take(rows) {
            for (c, sum) in c[..columns].iter_mut().zip(sums) {
                *c = if add { *c + sum } else { *sum };
            }
        }
    }

    fn finish<O, S: Store<O>>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &S) {
        finish_rows::<COLUMNS, O>(sums, at, out, store);
    }
}

/// A whole tile.
fn multiply(a: &[f32], b: &[f32], c: &mut [f32], stride: usize, add: bool) {
    assert!((ROWS - 1) * stride + COLUMNS <= c.len());
    // SAFETY: every Arm processor of 64 bits has these vectors; panels are read in whole chunks, and the tile is within c.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); 3]; ROWS];
        for (a, b) in a.as_chunks::<ROWS>().0.iter().zip(b.as_chunks::<COLUMNS>().0) {
            let b = [0, 1, 2].map(|part| vld1q_f32(b.as_ptr().add(part * LANES)));
            for half in 0..2 {
                let a = vld1q_f32(a.as_ptr().add(half * LANES));
                let [first, second, third, fourth] = sums.as_chunks_mut::<LANES>().0[half].each_mut();
                for part in 0..3 {
                    first[part] = vfmaq_laneq_f32::<0>(first[part], b[part], a);
                    second[part] = vfmaq_laneq_f32::<1>(second[part], b[part], a);
                    third[part] = vfmaq_laneq_f32::<2>(third[part], b[part], a);
                    fourth[part] = vfmaq_laneq_f32::<3>(fourth[part], b[part], a);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (part, sum) in sums.into_iter().enumerate() {
                let at = c.as_mut_ptr().add(i * stride + part * LANES);
                vst1q_f32(at, if add { vaddq_f32(vld1q_f32(at), sum) } else { sum });
            }
        }
    }
}
