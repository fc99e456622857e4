//! The AVX-512 f32 micro-kernel: a 9 × 48 C tile in 27 of the 32 vector registers, the shape with the fewest loads per FMA.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

use super::MatrixView;
use super::avx512_driver;
use super::avx512_pack::{APanel, LANES, MR, NR, PanelPacker, lane_mask, pack_b};
use super::blocking::{self, Blocking};
use super::epilogue::Epilogue;
use super::micro_kernel::{Interleaved, K_STEP, MicroKernel, NoInterleave, Operands, TileRect, store_rows};
use crate::work_partition::Tile;
use zeroth_kernel::Element;

/// Vector registers of a row of the C tile.
const NR_VECTORS: usize = NR / LANES;
/// Unroll factor of the k loop.
const UNROLL: usize = 4;

/// [`store_rows`] compiled for AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn store_tile_avx512<O>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &impl Epilogue<O>) {
    store_rows::<NR, O>(acc, rect, out, epilogue);
}

/// The micro-kernel.
pub(super) struct Avx512Kernel;

impl MicroKernel for Avx512Kernel {
    type Packed = f32;
    const BLOCKING: Blocking = blocking::AVX512;

    fn setup() -> Self {
        Self
    }

    type PackedA<'a> = APanel<'a>;

    fn pack_a<'a, T: Element>(
        &self,
        source: MatrixView<'a, T>,
        rows: usize,
        kc: usize,
        out: &'a mut [f32],
    ) -> APanel<'a> {
        if let Some(panel) = APanel::in_place(source, rows, kc) {
            return panel;
        }
        PanelPacker::new((source, rows, kc), out).finish();
        APanel::packed(out, kc, source.is_transposed())
    }

    fn pack_b<T: Element>(&self, source: MatrixView<T>, columns: usize, kc: usize, out: &mut [f32]) {
        pack_b(source, columns, kc, out);
    }

    fn multiply(
        &mut self,
        a: APanel<'_>,
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        extent: [usize; 2],
        add: bool,
    ) {
        multiply(a, b, c, stride, extent, add, &mut NoInterleave);
    }

    fn store_tile<O, E: Epilogue<O>>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &E) {
        // SAFETY: `Isa::available` has found AVX-512.
        unsafe { store_tile_avx512(acc, rect, out, epilogue) }
    }

    fn run_task<A: Element, B: Element, O>(
        operands: Operands<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        epilogue: &impl Epilogue<O>,
    ) {
        avx512_driver::run_task(operands, out, scratch, epilogue);
    }
}

/// [`MicroKernel::multiply`] with interleaved work.
pub(super) fn multiply(
    a: APanel<'_>,
    b: &[f32],
    c: &mut [f32],
    stride: usize,
    extent: [usize; 2],
    add: bool,
    interleave: &mut impl Interleaved,
) {
    let [rows, columns] = extent;
    assert!(rows <= MR && columns <= NR && (rows - 1) * stride + columns <= c.len());
    assert!(rows <= a.rows && b.len() >= NR * a.kc);
    // Edge tiles cost in proportion to their rows or columns.
    let kernel = match (columns.div_ceil(LANES), rows) {
        (NR_VECTORS, MR) if a.is_k_major() => full_tile::<{ MR * size_of::<f32>() }>,
        (NR_VECTORS, MR) => full_tile::<{ size_of::<f32>() }>,
        (NR_VECTORS, 0..=3) => edge_tile::<NR_VECTORS, 3>,
        (NR_VECTORS, 4..=6) => edge_tile::<NR_VECTORS, 6>,
        (NR_VECTORS, _) => edge_tile::<NR_VECTORS, MR>,
        (1, _) => edge_tile::<1, MR>,
        (_, _) => edge_tile::<2, MR>,
    };
    // SAFETY: `Isa::available` has found AVX-512. The panels have the same depth, and the extent is inside `c`.
    unsafe { kernel(a, b.as_ptr(), c.as_mut_ptr(), stride, extent, add, interleave) }
}

/// [`multiply`] for at most `ROWS` rows and `VECTORS` vectors of columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn edge_tile<const VECTORS: usize, const ROWS: usize>(
    a: APanel<'_>,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    extent: [usize; 2],
    add: bool,
    interleave: &mut impl Interleaved,
) {
    let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let rows = a.row_ptrs();
    for first in (0..a.kc).step_by(K_STEP) {
        interleave.k_step();
        for k in first..a.kc.min(first + K_STEP) {
            // SAFETY: the caller guarantees panels of this depth.
            unsafe { rank1_update(&mut acc, &rows, a.k_stride, b, k) };
        }
    }
    // SAFETY: the caller guarantees the extent of `c`.
    unsafe { store_acc(&acc, c, stride, extent, add) };
}

/// Adds one term of k to the accumulators.
#[inline(always)]
unsafe fn rank1_update<const VECTORS: usize, const ROWS: usize>(
    acc: &mut [[__m512; VECTORS]; ROWS],
    rows: &[*const f32; ROWS],
    k_stride: usize,
    b: *const f32,
    k: usize,
) {
    // SAFETY: the caller guarantees this term of both panels, and AVX-512.
    unsafe {
        let b = b.add(k * NR);
        let b: [__m512; VECTORS] = std::array::from_fn(|part| _mm512_loadu_ps(b.add(part * LANES)));
        for (acc, row) in acc.iter_mut().zip(rows) {
            let a = _mm512_set1_ps(*row.add(k * k_stride));
            for (sum, b) in acc.iter_mut().zip(b) {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
    }
}

/// Stores the accumulators to the extent of `c`, or adds them.
#[inline(always)]
unsafe fn store_acc<const VECTORS: usize>(
    acc: &[[__m512; VECTORS]],
    c: *mut f32,
    stride: usize,
    [rows, columns]: [usize; 2],
    add: bool,
) {
    let masks: [u16; VECTORS] = std::array::from_fn(|part| lane_mask(columns.saturating_sub(part * LANES)));
    for (i, acc) in acc.iter().enumerate().take(rows) {
        for (part, (&sum, mask)) in acc.iter().zip(masks).enumerate() {
            let at = c.wrapping_add(i * stride + part * LANES);
            // SAFETY: the caller guarantees the extent of `c`, and AVX-512; the rest is masked.
            unsafe {
                let sum = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum) } else { sum };
                if columns == VECTORS * LANES {
                    // Unmasked stores can be forwarded to later loads.
                    _mm512_storeu_ps(at, sum);
                } else {
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}

/// One row of the C tile: broadcasts an element of A, then three FMAs with the row of B.
macro_rules! broadcast_fma {
    ($addr:literal, $term:literal, $row:literal, $broadcast:literal) => {
        concat!(
            "vbroadcastss ",
            $broadcast,
            ", dword ptr [",
            $addr,
            " + {k_stride}*",
            $term,
            "]\n",
            "vfmadd231ps {s",
            $row,
            "}, ",
            $broadcast,
            ", zmm29\n",
            "vfmadd231ps {m",
            $row,
            "}, ",
            $broadcast,
            ", zmm30\n",
            "vfmadd231ps {r",
            $row,
            "}, ",
            $broadcast,
            ", zmm31\n",
        )
    };
}

/// The same with embedded broadcasts: one instruction less, two loads more.
macro_rules! memory_fma {
    ($addr:literal, $term:literal, $row:literal) => {
        concat!(
            "vfmadd231ps {s",
            $row,
            "}, zmm29, dword ptr [",
            $addr,
            " + {k_stride}*",
            $term,
            "]{{1to16}}\n",
            "vfmadd231ps {m",
            $row,
            "}, zmm30, dword ptr [",
            $addr,
            " + {k_stride}*",
            $term,
            "]{{1to16}}\n",
            "vfmadd231ps {r",
            $row,
            "}, zmm31, dword ptr [",
            $addr,
            " + {k_stride}*",
            $term,
            "]{{1to16}}\n",
        )
    };
}

/// One term of k. Rows are addressed from every third one. One of nine rows uses embedded broadcasts: none or three of nine
/// are 1 to 2 % faster on one machine, and up to 7 % slower on another.
macro_rules! k_iteration {
    ($term:literal) => {
        concat!(
            "vmovups zmm29, [{b} + 192*",
            $term,
            "]\n",
            "vmovups zmm30, [{b} + 192*",
            $term,
            " + 64]\n",
            "vmovups zmm31, [{b} + 192*",
            $term,
            " + 128]\n",
            broadcast_fma!("{upper}", $term, 0, "zmm27"),
            broadcast_fma!("{upper} + {row}", $term, 1, "zmm28"),
            broadcast_fma!("{upper} + 2*{row}", $term, 2, "zmm27"),
            memory_fma!("{middle}", $term, 3),
            broadcast_fma!("{middle} + {row}", $term, 4, "zmm28"),
            broadcast_fma!("{middle} + 2*{row}", $term, 5, "zmm27"),
            broadcast_fma!("{lower}", $term, 6, "zmm28"),
            broadcast_fma!("{lower} + {row}", $term, 7, "zmm27"),
            broadcast_fma!("{lower} + 2*{row}", $term, 8, "zmm28"),
        )
    };
}

/// The unrolled k loop. All 27 accumulators are operands, so that each stays in its register.
macro_rules! k_loop {
    ($acc:ident, $rows:ident, $row:ident, $k_stride:ident, $b:ident, $count:ident,
        $($left:ident $middle:ident $right:ident $i:literal),*) => {
        asm!(
            "2:",
            k_iteration!(0),
            k_iteration!(1),
            k_iteration!(2),
            k_iteration!(3),
            "add {b}, 768",
            "add {upper}, 4*{k_stride}",
            "add {middle}, 4*{k_stride}",
            "add {lower}, 4*{k_stride}",
            "dec {count}",
            "jnz 2b",
            upper = inout(reg) $rows[0] => _,
            middle = inout(reg) $rows[1] => _,
            lower = inout(reg) $rows[2] => _,
            row = in(reg) $row,
            b = inout(reg) $b => _,
            count = inout(reg) $count => _,
            $(
                $left = inout(zmm_reg) $acc[$i][0],
                $middle = inout(zmm_reg) $acc[$i][1],
                $right = inout(zmm_reg) $acc[$i][2],
            )*
            k_stride = const $k_stride,
            out("zmm27") _,
            out("zmm28") _,
            out("zmm29") _,
            out("zmm30") _,
            out("zmm31") _,
            options(nostack, readonly),
        )
    };
}

/// [`multiply`] for a full tile; `K_STRIDE` is the bytes between terms of a row of A. In assembly to minimise the
/// instruction count: with a busy sibling thread the compiler's loop ran at four fifths of the speed.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn full_tile<const K_STRIDE: usize>(
    a: APanel<'_>,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    extent: [usize; 2],
    add: bool,
    interleave: &mut impl Interleaved,
) {
    let mut acc = [[_mm512_setzero_ps(); NR_VECTORS]; MR];
    let whole = a.kc / UNROLL * UNROLL;
    let row = a.row_stride * size_of::<f32>();
    for first in (0..a.kc).step_by(K_STEP) {
        interleave.k_step();
        let count = K_STEP.min(whole - first) / UNROLL;
        let (start, b) = (a.start.wrapping_add(first * a.k_stride), b.wrapping_add(first * NR));
        let rows = [start, start.wrapping_add(3 * a.row_stride), start.wrapping_add(6 * a.row_stride)];
        if count > 0 {
            // SAFETY: the caller guarantees panels of this depth.
            unsafe {
                k_loop!(acc, rows, row, K_STRIDE, b, count,
                    s0 m0 r0 0, s1 m1 r1 1, s2 m2 r2 2, s3 m3 r3 3, s4 m4 r4 4, s5 m5 r5 5, s6 m6 r6 6, s7 m7 r7 7, s8 m8 r8 8);
            }
        }
    }
    for k in whole..a.kc {
        // SAFETY: as above.
        unsafe { rank1_update(&mut acc, &a.row_ptrs(), a.k_stride, b, k) };
    }
    // SAFETY: the caller guarantees the extent of `c`.
    unsafe { store_acc(&acc, c, stride, extent, add) };
}
