//! The f32 kernel of AVX-512: 9 by 48 sums in 27 of the 32 registers. No other shape loads as little for a multiplication.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm256_maskz_loadu_epi16, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_storeu_ps,
};

use zeroth_base::DType;

use super::View;
use super::avx512_driver;
use super::avx512_pack::{Filling, Panel};
use super::blocking::{self, Sizes};
use super::driver::{BEAT, Between, Job, Kernel, Nothing, Place, finish_rows};
use super::epilogue::Store;
use super::transpose::{transpose, transpose_from};
use crate::work_partition::Tile;
use zeroth_kernel::Element;

pub(super) const ROWS: usize = 9;
const COLUMNS: usize = 48;
/// Lanes of a register.
pub(super) const LANES: usize = 16;
/// Registers of a row of sums.
const WIDTH: usize = COLUMNS / LANES;
/// Terms of a turn of the loop.
const FOUR: usize = 4;

/// [`finish_rows`] compiled with AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn finish_avx512<O>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &impl Store<O>) {
    finish_rows::<COLUMNS, O>(sums, at, out, store);
}

/// The kernel; it has no state.
pub(super) struct Zmm;

impl Kernel for Zmm {
    type Packed = f32;
    const SIZES: Sizes = blocking::ZMM;

    fn start() -> Self {
        Self
    }

    type Rows<'a> = Panel<'a>;

    fn pack_rows<'a, T: Element>(
        &self,
        source: View<'a, T>,
        rows: usize,
        depth: usize,
        out: &'a mut [f32],
    ) -> Panel<'a> {
        if let Some(panel) = Panel::in_place(source, rows, depth) {
            return panel;
        }
        Filling::new((source, rows, depth), out).finish();
        Panel::packed(out, depth, source.turned())
    }

    fn pack_columns<T: Element>(&self, source: View<T>, columns: usize, depth: usize, out: &mut [f32]) {
        pack(source, columns, depth, out);
    }

    fn multiply(
        &mut self,
        a: Panel<'_>,
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        live: [usize; 2],
        add: bool,
    ) {
        multiply(a, b, c, stride, live, add, &mut Nothing);
    }

    fn finish<O, S: Store<O>>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &S) {
        // SAFETY: `Isa::available` has found AVX-512.
        unsafe { finish_avx512(sums, at, out, store) }
    }

    fn run_task<A: Element, B: Element, O>(
        job: Job<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        store: &impl Store<O>,
    ) {
        avx512_driver::task(job, out, scratch, store);
    }
}

/// The product of two panels, as [`Kernel::multiply`] says.
pub(super) fn multiply(
    a: Panel<'_>,
    b: &[f32],
    c: &mut [f32],
    stride: usize,
    live: [usize; 2],
    add: bool,
    between: &mut impl Between,
) {
    let [rows, columns] = live;
    assert!(rows <= ROWS && columns <= COLUMNS && (rows - 1) * stride + columns <= c.len());
    assert!(rows <= a.rows && b.len() >= COLUMNS * a.depth);
    // Fewer rows or columns than a panel's take as much less time.
    let kernel = match (columns.div_ceil(LANES), rows) {
        (WIDTH, ROWS) if a.turned() => all::<{ ROWS * size_of::<f32>() }>,
        (WIDTH, ROWS) => all::<{ size_of::<f32>() }>,
        (WIDTH, 0..=3) => few::<WIDTH, 3>,
        (WIDTH, 4..=6) => few::<WIDTH, 6>,
        (WIDTH, _) => few::<WIDTH, ROWS>,
        (1, _) => few::<1, ROWS>,
        (_, _) => few::<2, ROWS>,
    };
    // SAFETY: `Isa::available` has found AVX-512; the panels have as many terms, and the live part of c is in the slice.
    unsafe { kernel(a, b.as_ptr(), c.as_mut_ptr(), stride, live, add, between) }
}

/// [`multiply`] for at most `LIVE` rows and `WIDE` registers of columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn few<const WIDE: usize, const LIVE: usize>(
    a: Panel<'_>,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    live: [usize; 2],
    add: bool,
    between: &mut impl Between,
) {
    let mut sums = [[_mm512_setzero_ps(); WIDE]; LIVE];
    let rows = a.starts();
    for first in (0..a.depth).step_by(BEAT) {
        between.beat();
        for term in first..a.depth.min(first + BEAT) {
            // SAFETY: the caller has panels of as many terms.
            unsafe { one(&mut sums, &rows, a.term, b, term) };
        }
    }
    // SAFETY: the caller has the live part of c.
    unsafe { put(&sums, c, stride, live, add) };
}

/// Adds one term to the sums.
#[inline(always)]
unsafe fn one<const WIDE: usize, const LIVE: usize>(
    sums: &mut [[__m512; WIDE]; LIVE],
    rows: &[*const f32; LIVE],
    next: usize,
    b: *const f32,
    term: usize,
) {
    // SAFETY: the caller has that term of both panels, and AVX-512.
    unsafe {
        let b = b.add(term * COLUMNS);
        let b: [__m512; WIDE] = std::array::from_fn(|part| _mm512_loadu_ps(b.add(part * LANES)));
        for (sums, row) in sums.iter_mut().zip(rows) {
            let a = _mm512_set1_ps(*row.add(term * next));
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
    }
}

/// Writes or adds the sums to the live part of c.
#[inline(always)]
unsafe fn put<const WIDE: usize>(
    sums: &[[__m512; WIDE]],
    c: *mut f32,
    stride: usize,
    [rows, columns]: [usize; 2],
    add: bool,
) {
    let masks: [u16; WIDE] = std::array::from_fn(|part| mask(columns.saturating_sub(part * LANES)));
    for (i, sums) in sums.iter().enumerate().take(rows) {
        for (part, (&sum, mask)) in sums.iter().zip(masks).enumerate() {
            let at = c.wrapping_add(i * stride + part * LANES);
            // SAFETY: the caller has the live part of c, and AVX-512; the rest is masked.
            unsafe {
                let sum = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum) } else { sum };
                if columns == WIDE * LANES {
                    // What is stored whole can be read again at once.
                    _mm512_storeu_ps(at, sum);
                } else {
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}

/// A row of a times a row of b: its number is spread over a register first.
macro_rules! spread {
    ($at:literal, $term:literal, $row:literal, $number:literal) => {
        concat!(
            "vbroadcastss ",
            $number,
            ", dword ptr [",
            $at,
            " + {next}*",
            $term,
            "]\n",
            "vfmadd231ps {s",
            $row,
            "}, ",
            $number,
            ", zmm29\n",
            "vfmadd231ps {m",
            $row,
            "}, ",
            $number,
            ", zmm30\n",
            "vfmadd231ps {r",
            $row,
            "}, ",
            $number,
            ", zmm31\n",
        )
    };
}

/// The same with the number loaded three times, which is one instruction less.
macro_rules! direct {
    ($at:literal, $term:literal, $row:literal) => {
        concat!(
            "vfmadd231ps {s",
            $row,
            "}, zmm29, dword ptr [",
            $at,
            " + {next}*",
            $term,
            "]{{1to16}}\n",
            "vfmadd231ps {m",
            $row,
            "}, zmm30, dword ptr [",
            $at,
            " + {next}*",
            $term,
            "]{{1to16}}\n",
            "vfmadd231ps {r",
            $row,
            "}, zmm31, dword ptr [",
            $at,
            " + {next}*",
            $term,
            "]{{1to16}}\n",
        )
    };
}

/// One of four terms. Rows are reached from every third one. One number is loaded by the multiplications: none or three of nine
/// are 1 to 2 % better on one machine and as much worse on another, three up to 7 % worse.
macro_rules! term {
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
            spread!("{upper}", $term, 0, "zmm27"),
            spread!("{upper} + {row}", $term, 1, "zmm28"),
            spread!("{upper} + 2*{row}", $term, 2, "zmm27"),
            direct!("{middle}", $term, 3),
            spread!("{middle} + {row}", $term, 4, "zmm28"),
            spread!("{middle} + 2*{row}", $term, 5, "zmm27"),
            spread!("{lower}", $term, 6, "zmm28"),
            spread!("{lower} + {row}", $term, 7, "zmm27"),
            spread!("{lower} + 2*{row}", $term, 8, "zmm28"),
        )
    };
}

/// Four terms, again and again. All sums are named, so that each stays in its register.
macro_rules! loop_of_fours {
    ($sums:ident, $rows:ident, $row:ident, $next:ident, $b:ident, $count:ident,
        $($left:ident $middle:ident $right:ident $i:literal),*) => {
        asm!(
            "2:",
            term!(0),
            term!(1),
            term!(2),
            term!(3),
            "add {b}, 768",
            "add {upper}, 4*{next}",
            "add {middle}, 4*{next}",
            "add {lower}, 4*{next}",
            "dec {count}",
            "jnz 2b",
            upper = inout(reg) $rows[0] => _,
            middle = inout(reg) $rows[1] => _,
            lower = inout(reg) $rows[2] => _,
            row = in(reg) $row,
            b = inout(reg) $b => _,
            count = inout(reg) $count => _,
            $(
                $left = inout(zmm_reg) $sums[$i][0],
                $middle = inout(zmm_reg) $sums[$i][1],
                $right = inout(zmm_reg) $sums[$i][2],
            )*
            next = const $next,
            out("zmm27") _,
            out("zmm28") _,
            out("zmm29") _,
            out("zmm30") _,
            out("zmm31") _,
            options(nostack, readonly),
        )
    };
}

/// [`multiply`] for a whole panel; `NEXT` bytes from one term of a row to the next. In assembly, for as few instructions as
/// there can be: on a processor that is shared a compiler's loop ran at four fifths of the speed.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn all<const NEXT: usize>(
    a: Panel<'_>,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    live: [usize; 2],
    add: bool,
    between: &mut impl Between,
) {
    let mut sums = [[_mm512_setzero_ps(); WIDTH]; ROWS];
    let whole = a.depth / FOUR * FOUR;
    let row = a.row * size_of::<f32>();
    for first in (0..a.depth).step_by(BEAT) {
        between.beat();
        let count = BEAT.min(whole - first) / FOUR;
        let (start, b) = (a.start.wrapping_add(first * a.term), b.wrapping_add(first * COLUMNS));
        let rows = [start, start.wrapping_add(3 * a.row), start.wrapping_add(6 * a.row)];
        if count > 0 {
            // SAFETY: the caller has panels of as many terms.
            unsafe {
                loop_of_fours!(sums, rows, row, NEXT, b, count,
                    s0 m0 r0 0, s1 m1 r1 1, s2 m2 r2 2, s3 m3 r3 3, s4 m4 r4 4, s5 m5 r5 5, s6 m6 r6 6, s7 m7 r7 7, s8 m8 r8 8);
            }
        }
    }
    for term in whole..a.depth {
        // SAFETY: as above.
        unsafe { one(&mut sums, &a.starts(), a.term, b, term) };
    }
    // SAFETY: the caller has the live part of c.
    unsafe { put(&sums, c, stride, live, add) };
}

/// A mask of the lowest lanes.
pub(super) const fn mask(count: usize) -> u16 {
    if count >= LANES { u16::MAX } else { (1 << count) - 1 }
}

/// Up to 16 numbers as f32, zeros after them. Only for code that is compiled for AVX-512.
#[inline(always)]
pub(super) unsafe fn load<T: Element>(at: *const T, count: usize) -> __m512 {
    let mask = mask(count);
    // SAFETY: the caller has `count` elements there; the rest is masked.
    unsafe {
        match T::DTYPE {
            DType::F32 => _mm512_maskz_loadu_ps(mask, at.cast()),
            DType::Bf16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
                _mm256_maskz_loadu_epi16(mask, at.cast()),
            ))),
            DType::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast())),
        }
    }
}

/// Packs columns of b, given as the `lines` rows of its transpose: one term of every column after the other, zeros after the
/// last column.
fn pack<T: Element>(source: View<T>, lines: usize, depth: usize, out: &mut [f32]) {
    let start = source.checked(lines, depth);
    assert!(lines <= COLUMNS && out.len() >= COLUMNS * depth);
    // SAFETY: `Isa::available` has found AVX-512, and all places were checked above.
    unsafe {
        if source.column == 1 {
            pack_turned(start, source.row, lines, depth, out.as_mut_ptr());
        } else {
            pack_as_they_are(start, source.column, lines, depth, out.as_mut_ptr());
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_turned<T: Element>(start: *const T, stride: usize, lines: usize, depth: usize, out: *mut f32) {
    for first in (0..depth).step_by(LANES) {
        for part in (0..COLUMNS).step_by(LANES) {
            let (from, live) = (start.wrapping_add(part * stride + first), lines.saturating_sub(part));
            let whole = live >= LANES && depth - first >= LANES;
            let tile = if whole && T::DTYPE == DType::F32 {
                // SAFETY: the caller has checked all places.
                unsafe { transpose_from(from.cast(), stride * size_of::<T>()) }
            } else {
                let mut tile = [_mm512_setzero_si512(); LANES];
                // Lengths that the compiler knows keep the tile in registers.
                let [live, count] = if whole { [LANES; 2] } else { [live, depth - first] };
                for (i, tile) in tile.iter_mut().enumerate().take(live) {
                    // SAFETY: as above.
                    *tile = _mm512_castps_si512(unsafe { load(from.wrapping_add(i * stride), count) });
                }
                transpose(tile)
            };
            for (i, &line) in tile.iter().enumerate().take(depth - first) {
                // SAFETY: as above.
                unsafe { _mm512_storeu_ps(out.add((first + i) * COLUMNS + part), _mm512_castsi512_ps(line)) };
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_as_they_are<T: Element>(
    start: *const T,
    stride: usize,
    lines: usize,
    depth: usize,
    out: *mut f32,
) {
    for term in 0..depth {
        for part in (0..COLUMNS).step_by(LANES) {
            // SAFETY: the caller has checked all places; what lies beyond the last line is not read.
            unsafe {
                let line = load(start.wrapping_add(term * stride + part), lines.saturating_sub(part));
                _mm512_storeu_ps(out.add(term * COLUMNS + part), line);
            }
        }
    }
}
