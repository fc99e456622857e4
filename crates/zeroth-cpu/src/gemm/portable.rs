//! The f32 kernel that the compiler turns into vector code: 6 by 16 sums, compiled for AVX2 and for what the target has.

use super::View;
use super::blocking::{self, Sizes};
use super::driver::{Kernel, Place, finish_rows};
use super::epilogue::Store;
use super::pack::pack_panel;
use crate::isa::Isa;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

const ROWS: usize = 6;
const COLUMNS: usize = 16;

/// What the compiler's target has.
pub(super) struct Portable;

/// AVX2 with fused multiply-add.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

/// A tile; `FUSED` where a multiply-add is one instruction.
#[inline(always)]
fn multiply<const FUSED: bool>(
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    stride: usize,
    [rows, columns]: [usize; 2],
    add: bool,
) {
    let mut sums = [[0.0f32; COLUMNS]; ROWS];
    for (a, b) in a.as_chunks::<ROWS>().0.iter().zip(b.as_chunks::<COLUMNS>().0) {
        for (sums, &a) in sums.iter_mut().zip(a) {
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = if FUSED { a.mul_add(b, *sum) } else { a * b + *sum };
            }
        }
    }
    for (sums, c) in sums.iter().zip(c.chunks_mut(stride)).take(rows) {
        for (c, sum) in c[..columns].iter_mut().zip(sums) {
            *c = if add { *c + sum } else { *sum };
        }
    }
}

impl Kernel for Portable {
    type Packed = f32;
    const SIZES: Sizes = blocking::PLAIN;

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
        pack_panel(Isa::Portable, source, rows, depth, ROWS, out);
        out
    }

    fn pack_columns<T: Element>(&self, source: View<T>, columns: usize, depth: usize, out: &mut [f32]) {
        pack_panel(Isa::Portable, source, columns, depth, COLUMNS, out);
    }

    fn multiply(&mut self, a: &[f32], b: &[f32], c: &mut [f32], stride: usize, live: [usize; 2], add: bool) {
        multiply::<{ cfg!(target_arch = "aarch64") }>(a, b, c, stride, live, add);
    }

    fn finish<O, S: Store<O>>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &S) {
        finish_rows::<COLUMNS, O>(sums, at, out, store);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
mod avx2 {
    use super::{
        Avx2, COLUMNS, Isa, Kernel, Place, ROWS, Sizes, Store, Tile, View, blocking, finish_rows, multiply,
        pack_panel,
    };
    use zeroth_kernel::Element;

    #[target_feature(enable = "avx2,fma")]
    fn multiply_avx2(a: &[f32], b: &[f32], c: &mut [f32], stride: usize, live: [usize; 2], add: bool) {
        multiply::<true>(a, b, c, stride, live, add);
    }

    #[target_feature(enable = "avx2,fma")]
    fn finish_avx2<O>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &impl Store<O>) {
        finish_rows::<COLUMNS, O>(sums, at, out, store);
    }

    impl Kernel for Avx2 {
        type Packed = f32;
        const SIZES: Sizes = blocking::PLAIN;

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
            pack_panel(Isa::Avx2, source, rows, depth, ROWS, out);
            out
        }

        fn pack_columns<T: Element>(&self, source: View<T>, columns: usize, depth: usize, out: &mut [f32]) {
            pack_panel(Isa::Avx2, source, columns, depth, COLUMNS, out);
        }

        fn multiply(
            &mut self,
            a: &[f32],
            b: &[f32],
            c: &mut [f32],
            stride: usize,
            live: [usize; 2],
            add: bool,
        ) {
            // SAFETY: a pool takes a path only when `Isa::available` has found its instructions.
            unsafe { multiply_avx2(a, b, c, stride, live, add) }
        }

        fn finish<O, S: Store<O>>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &S) {
            // SAFETY: as above.
            unsafe { finish_avx2(sums, at, out, store) }
        }
    }
}
