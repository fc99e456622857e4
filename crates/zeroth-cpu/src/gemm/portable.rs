//! The auto-vectorized f32 micro-kernel: a 6 × 16 C tile, compiled for AVX2 and for the compiler's target.
#![allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]

use super::MatrixView;
use super::blocking::{self, Blocking};
use super::epilogue::Epilogue;
use super::micro_kernel::{MicroKernel, TileRect, store_rows};
use super::pack::pack_panel;
use crate::isa::Isa;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

const MR: usize = 6;
const NR: usize = 16;

/// The micro-kernel, for AVX2 with FMA or for the compiler's target.
pub(super) struct PortableKernel<const AVX2: bool>;

/// Multiplies two panels. `FMA` where multiply-add is one instruction.
#[inline(always)]
fn multiply<const FMA: bool>(
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    stride: usize,
    [rows, columns]: [usize; 2],
    add: bool,
) {
    let mut acc = [[0.0f32; NR]; MR];
    for (a, b) in a.as_chunks::<MR>().0.iter().zip(b.as_chunks::<NR>().0) {
        for (acc, &a) in acc.iter_mut().zip(a) {
            for (acc, &b) in acc.iter_mut().zip(b) {
                *acc = if FMA { a.mul_add(b, *acc) } else { a * b + *acc };
            }
        }
    }
    for (acc, c) in acc.iter().zip(c.chunks_mut(stride)).take(rows) {
        for (c, acc) in c[..columns].iter_mut().zip(acc) {
            *c = if add { *c + acc } else { *acc };
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_avx2(a: &[f32], b: &[f32], c: &mut [f32], stride: usize, extent: [usize; 2], add: bool) {
    multiply::<true>(a, b, c, stride, extent, add);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn store_tile_avx2<O>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &impl Epilogue<O>) {
    store_rows::<NR, O>(acc, rect, out, epilogue);
}

impl<const AVX2: bool> PortableKernel<AVX2> {
    const ISA: Isa = if AVX2 { Isa::Avx2 } else { Isa::Portable };
}

impl<const AVX2: bool> MicroKernel for PortableKernel<AVX2> {
    type Packed = f32;
    const BLOCKING: Blocking = blocking::PORTABLE;

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
        pack_panel(Self::ISA, source, rows, kc, MR, out);
        out
    }

    fn pack_b<T: Element>(&self, source: MatrixView<T>, columns: usize, kc: usize, out: &mut [f32]) {
        pack_panel(Self::ISA, source, columns, kc, NR, out);
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
        #[cfg(target_arch = "x86_64")]
        if AVX2 {
            // SAFETY: a pool has an instruction set only if `Isa::available` found it.
            return unsafe { multiply_avx2(a, b, c, stride, extent, add) };
        }
        multiply::<{ cfg!(target_arch = "aarch64") }>(a, b, c, stride, extent, add);
    }

    fn store_tile<O, E: Epilogue<O>>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &E) {
        #[cfg(target_arch = "x86_64")]
        if AVX2 {
            // SAFETY: as in `multiply`.
            return unsafe { store_tile_avx2(acc, rect, out, epilogue) };
        }
        store_rows::<NR, O>(acc, rect, out, epilogue);
    }
}
