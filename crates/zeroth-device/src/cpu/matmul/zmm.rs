//! The f32 kernel of AVX-512: 12 by 32 sums in 24 of the 32 registers.
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
use super::blocks::{Between, Job, Kernel, Nothing, Place, finish_rows};
use super::sizes::{self, Sizes};
use super::store::Store;
use super::transpose::{transpose, transpose_from};
use super::woven;
use super::zmm_rows::{Filling, Panel};
use crate::cpu::cut::Tile;
use crate::cpu::element::Element;

pub(super) const ROWS: usize = 12;
const COLUMNS: usize = 32;
/// Lanes of a register.
pub(super) const LANES: usize = 16;
/// Terms of a row that lie side by side in a panel of a.
pub(super) const FOUR: usize = 4;
/// Elements of b that are asked for before they are needed: 32 terms.
const AHEAD: usize = 32 * COLUMNS;

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
    const SIZES: Sizes = sizes::ZMM;

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
        Filling::new((source, rows, depth), out).finish();
        Panel { numbers: out, depth, turned: source.turned() }
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
        // SAFETY: `Path::available` has found AVX-512.
        unsafe { finish_avx512(sums, at, out, store) }
    }

    fn run_task<A: Element, B: Element, O>(
        job: Job<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        store: &impl Store<O>,
    ) {
        woven::task(job, out, scratch, store);
    }
}

/// The product of two panels, as [`Kernel::multiply`] says; a beat is 16 terms.
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
    assert!(a.numbers.len() >= ROWS * a.depth.next_multiple_of(FOUR) && b.len() >= COLUMNS * a.depth);
    // Fewer rows than a panel's take as much less time.
    let kernel = match (a.turned, rows) {
        (false, 0..=4) => few::<false, 4>,
        (false, 5..=8) => few::<false, 8>,
        (false, _) => all::<false>,
        (true, 0..=4) => few::<true, 4>,
        (true, 5..=8) => few::<true, 8>,
        (true, _) => all::<true>,
    };
    // SAFETY: `Path::available` has found AVX-512; the panels have as many terms, and the live part of c is in the slice.
    unsafe { kernel(a, b.as_ptr(), c.as_mut_ptr(), stride, live, add, between) }
}

/// [`multiply`] for at most `LIVE` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn few<const TURNED: bool, const LIVE: usize>(
    a: Panel<'_>,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    live: [usize; 2],
    add: bool,
    between: &mut impl Between,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; LIVE];
    for first in (0..a.depth).step_by(LANES) {
        between.beat();
        for term in first..a.depth.min(first + LANES) {
            // SAFETY: the caller has panels of as many terms.
            unsafe { one::<TURNED, LIVE>(&mut sums, a.numbers.as_ptr(), b, term) };
        }
    }
    // SAFETY: the caller has the live part of c.
    unsafe { put(&sums, c, stride, live, add) };
}

/// Adds one term to the sums.
#[inline(always)]
unsafe fn one<const TURNED: bool, const LIVE: usize>(
    sums: &mut [[__m512; 2]; LIVE],
    a: *const f32,
    b: *const f32,
    term: usize,
) {
    // SAFETY: the caller has that term of both panels, and AVX-512.
    unsafe {
        let (a, b) = (
            a.add(if TURNED { term * ROWS } else { term / FOUR * FOUR * ROWS + term % FOUR }),
            b.add(term * COLUMNS),
        );
        let (left, right) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(LANES)));
        for (i, sums) in sums.iter_mut().enumerate() {
            let a = _mm512_set1_ps(*a.add(if TURNED { i } else { i * FOUR }));
            sums[0] = _mm512_fmadd_ps(a, left, sums[0]);
            sums[1] = _mm512_fmadd_ps(a, right, sums[1]);
        }
    }
}

/// Writes or adds the sums to the live part of c.
#[inline(always)]
unsafe fn put(sums: &[[__m512; 2]], c: *mut f32, stride: usize, [rows, columns]: [usize; 2], add: bool) {
    let masks = [mask(columns), mask(columns.saturating_sub(LANES))];
    for (i, sums) in sums.iter().enumerate().take(rows) {
        for (half, (&sum, mask)) in sums.iter().zip(masks).enumerate() {
            let at = c.wrapping_add(i * stride + half * LANES);
            // SAFETY: the caller has the live part of c, and AVX-512; the rest is masked.
            unsafe {
                let sum = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum) } else { sum };
                if columns == COLUMNS {
                    // What is stored whole can be read again at once.
                    _mm512_storeu_ps(at, sum);
                } else {
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}

/// A row of a times both halves of a row of b: its number is spread over a register first.
macro_rules! spread {
    ($a:expr, $row:literal) => {
        concat!(
            "vbroadcastss zmm29, dword ptr [{at} + ",
            $a,
            "]\n",
            "vfmadd231ps {s",
            $row,
            "}, zmm29, zmm30\n",
            "vfmadd231ps {r",
            $row,
            "}, zmm29, zmm31\n",
        )
    };
}

/// The same with the number loaded twice, which is one instruction less.
macro_rules! direct {
    ($a:expr, $row:literal) => {
        concat!(
            "vfmadd231ps {s",
            $row,
            "}, zmm30, dword ptr [{at} + ",
            $a,
            "]{{1to16}}\n",
            "vfmadd231ps {r",
            $row,
            "}, zmm31, dword ptr [{at} + ",
            $a,
            "]{{1to16}}\n",
        )
    };
}

/// One of four terms; bytes of a from one row to the next, and from one term to the next.
macro_rules! term {
    ($term:literal, $row:literal, $next:literal) => {
        concat!(
            "vmovups zmm30, [{b} + 128*",
            $term,
            "]\n",
            "vmovups zmm31, [{b} + 128*",
            $term,
            " + 64]\n",
            "prefetcht0 [{b} + 128*",
            $term,
            " + {ahead}]\n",
            "prefetcht0 [{b} + 128*",
            $term,
            " + {ahead} + 64]\n",
            spread!(concat!($next, "*", $term, " + 0*", $row), 0),
            direct!(concat!($next, "*", $term, " + 1*", $row), 1),
            spread!(concat!($next, "*", $term, " + 2*", $row), 2),
            direct!(concat!($next, "*", $term, " + 3*", $row), 3),
            spread!(concat!($next, "*", $term, " + 4*", $row), 4),
            direct!(concat!($next, "*", $term, " + 5*", $row), 5),
            spread!(concat!($next, "*", $term, " + 6*", $row), 6),
            direct!(concat!($next, "*", $term, " + 7*", $row), 7),
            spread!(concat!($next, "*", $term, " + 8*", $row), 8),
            direct!(concat!($next, "*", $term, " + 9*", $row), 9),
            spread!(concat!($next, "*", $term, " + 10*", $row), 10),
            direct!(concat!($next, "*", $term, " + 11*", $row), 11),
        )
    };
}

/// Four terms, again and again. All sums are named, so that each stays in its register.
macro_rules! loop_of_fours {
    ($sums:ident, $a:ident, $b:ident, $count:ident, $row:literal, $next:literal) => {
        loop_of_fours!(@rows $sums, $a, $b, $count, $row, $next,
            s0 r0 0, s1 r1 1, s2 r2 2, s3 r3 3, s4 r4 4, s5 r5 5, s6 r6 6, s7 r7 7, s8 r8 8, s9 r9 9, s10 r10 10,
            s11 r11 11)
    };
    (@rows $sums:ident, $a:ident, $b:ident, $count:ident, $row:literal, $next:literal,
        $($left:ident $right:ident $i:literal),*) => {
        asm!(
            "2:",
            term!(0, $row, $next),
            term!(1, $row, $next),
            term!(2, $row, $next),
            term!(3, $row, $next),
            "add {b}, 512",
            "add {at}, 192",
            "dec {count}",
            "jnz 2b",
            at = inout(reg) $a => _,
            b = inout(reg) $b => _,
            count = inout(reg) $count => _,
            $($left = inout(zmm_reg) $sums[$i][0], $right = inout(zmm_reg) $sums[$i][1],)*
            ahead = const AHEAD * size_of::<f32>(),
            out("zmm29") _,
            out("zmm30") _,
            out("zmm31") _,
            options(nostack, readonly),
        )
    };
}

/// [`multiply`] for all rows of a panel. In assembly, for as few instructions as there can be: on a processor that is shared
/// the compiler's 45 a term ran at four fifths of the speed of these 36.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn all<const TURNED: bool>(
    a: Panel<'_>,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    live: [usize; 2],
    add: bool,
    between: &mut impl Between,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    let whole = a.depth / FOUR * FOUR;
    for first in (0..a.depth).step_by(LANES) {
        between.beat();
        let count = LANES.min(whole - first) / FOUR;
        let (a, b) = (a.numbers.as_ptr().wrapping_add(first * ROWS), b.wrapping_add(first * COLUMNS));
        if count > 0 {
            // SAFETY: the caller has panels of as many terms; what lies ahead is only asked for.
            unsafe {
                if TURNED {
                    loop_of_fours!(sums, a, b, count, 4, 48);
                } else {
                    loop_of_fours!(sums, a, b, count, 16, 4);
                }
            }
        }
    }
    for term in whole..a.depth {
        // SAFETY: as above.
        unsafe { one::<TURNED, ROWS>(&mut sums, a.numbers.as_ptr(), b, term) };
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
    // SAFETY: `Path::available` has found AVX-512, and all places were checked above.
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
