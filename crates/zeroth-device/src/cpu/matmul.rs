//! The matrix product under `linear`, `attention` and `head_loss`: blocked, packed to f32, a register tile a path.
//!
//! An element of the result is a sum over k in blocks of 256: inside a block one multiply-add after another, blocks
//! added in order. That order depends on k alone, so where a tile begins or who computes it changes nothing.

use super::cut::Grid;
use super::element::Element;
use super::path::{Path, each_path};
use super::pool::Pool;

/// Rows, columns and depth of what one task holds in its second-level cache.
const BLOCK_ROWS: usize = 192;
const BLOCK_COLUMNS: usize = 256;
const BLOCK_DEPTH: usize = 256;
/// The largest register tile of any path; smaller ones divide it.
const TILE_ROWS: usize = 12;
const TILE_COLUMNS: usize = 32;

/// A matrix in a slice: element (i, j) at `i * row + j * column`, one of which is 1.
pub(super) struct View<'a, T> {
    pub(super) data: &'a [T],
    pub(super) row: usize,
    pub(super) column: usize,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<'a, T> View<'a, T> {
    /// A matrix stored row by row, `width` elements from one row to the next.
    pub(super) fn rows(data: &'a [T], width: usize) -> Self {
        Self { data, row: width, column: 1 }
    }

    /// The same numbers seen with rows and columns exchanged.
    pub(super) fn transposed(self) -> Self {
        Self { data: self.data, row: self.column, column: self.row }
    }

    /// The part that begins at row `i`, column `j`.
    fn from(self, i: usize, j: usize) -> Self {
        Self { data: &self.data[i * self.row + j * self.column..], ..self }
    }
}

/// f32 elements that [`block`] needs for packing.
pub(super) const fn pack_len(m: usize, n: usize, k: usize) -> usize {
    let depth = if k < BLOCK_DEPTH { k } else { BLOCK_DEPTH };
    (m.next_multiple_of(TILE_ROWS) + n.next_multiple_of(TILE_COLUMNS)) * depth
}

/// f32 elements that [`matmul`] needs on each thread.
const fn thread_scratch(m: usize, n: usize, k: usize) -> usize {
    let m = if m < BLOCK_ROWS { m } else { BLOCK_ROWS };
    let n = if n < BLOCK_COLUMNS { n } else { BLOCK_COLUMNS };
    m * n + pack_len(m, n, k)
}

/// f32 elements of scratch that [`matmul`] needs.
pub(super) const fn scratch(m: usize, n: usize, k: usize, threads: usize) -> usize {
    thread_scratch(m, n, k) * threads
}

/// Computes a[m, k] · b[k, n] and gives each piece of a row to `store(first column, sums, out)`.
pub(super) fn matmul<A: Element, B: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: View<A>,
    b: View<B>,
    out: &mut [O],
    scratch: &mut [f32],
    store: impl Fn(usize, &[f32], &mut [O]) + Sync,
) {
    super::check_len("out", out.len(), m * n);
    super::check_scratch(scratch.len(), self::scratch(m, n, k, pool.threads()));
    let grid = Grid::new(out, n, BLOCK_ROWS, BLOCK_COLUMNS);
    pool.each_with(grid, scratch, |_, mut tile, scratch| {
        let (rows, columns) = (tile.rows(), tile.columns());
        let (sums, pack) = scratch.split_at_mut(rows * columns);
        sums.fill(0.0);
        if k > 0 {
            let (a, b) = (a.from(tile.first_row(), 0), b.from(0, tile.first_column()));
            block(pool.path(), [rows, columns, k], a, b, sums, columns, pack);
        }
        let first = tile.first_column();
        for (row, sums) in sums.chunks_exact(columns).enumerate() {
            store(first, sums, tile.row(row));
        }
    });
}

/// Adds a[m, k] · b[k, n] to `c`, whose rows are `width` apart, on the calling thread.
pub(super) fn block<A: Element, B: Element>(
    path: Path,
    [m, n, k]: [usize; 3],
    a: View<A>,
    b: View<B>,
    c: &mut [f32],
    width: usize,
    pack: &mut [f32],
) {
    let (tile_rows, tile_columns) = match path {
        Path::Avx512 => (12, 32),
        Path::Avx2 | Path::Portable => (6, 16),
    };
    for first in (0..k).step_by(BLOCK_DEPTH) {
        let depth = BLOCK_DEPTH.min(k - first);
        let (a_pack, b_pack) = pack.split_at_mut(m.next_multiple_of(tile_rows) * depth);
        let b_pack = &mut b_pack[..n.next_multiple_of(tile_columns) * depth];
        pack_panels(path, a.from(0, first), m, depth, tile_rows, a_pack);
        pack_panels(path, b.transposed().from(0, first), n, depth, tile_columns, b_pack);
        for (across, b_panel) in b_pack.chunks_exact(tile_columns * depth).enumerate() {
            let column = across * tile_columns;
            let columns = tile_columns.min(n - column);
            for (down, a_panel) in a_pack.chunks_exact(tile_rows * depth).enumerate() {
                let row = down * tile_rows;
                let rows = tile_rows.min(m - row);
                let mut tile = [0.0; TILE_ROWS * TILE_COLUMNS];
                multiply(path, a_panel, b_panel, &mut tile);
                for (i, sums) in tile.chunks_exact(tile_columns).enumerate().take(rows) {
                    let start = (row + i) * width + column;
                    for (c, sum) in c[start..start + columns].iter_mut().zip(sums) {
                        *c += sum;
                    }
                }
            }
        }
    }
}

each_path! {
    /// Writes rows of `source` as panels of `tile` rows, one column of a panel after the other, zeros below the last row.
    fn pack_panels<T>(source: View<'_, T>, rows: usize, depth: usize, tile: usize, out: &mut [f32]) {
        for (panel, out) in out.chunks_exact_mut(tile * depth).enumerate() {
            let first = panel * tile;
            let live = tile.min(rows - first);
            if live < tile {
                out.fill(0.0);
            }
            if source.row == 1 {
                for (k, out) in out.chunks_exact_mut(tile).enumerate() {
                    let start = first + k * source.column;
                    for (out, value) in out.iter_mut().zip(&source.data[start..start + live]) {
                        *out = value.to_f32();
                    }
                }
            } else {
                // Four rows at a time: one store of four numbers instead of four far apart.
                let row = |i: usize| &source.data[(first + i) * source.row..][..depth];
                let fours = live / 4 * 4;
                for i in (0..fours).step_by(4) {
                    let (a, b, c, d) = (row(i), row(i + 1), row(i + 2), row(i + 3));
                    for (k, out) in out.chunks_exact_mut(tile).enumerate() {
                        out[i..i + 4].copy_from_slice(&[a[k].to_f32(), b[k].to_f32(), c[k].to_f32(), d[k].to_f32()]);
                    }
                }
                for i in fours..live {
                    for (out, value) in out.chunks_exact_mut(tile).zip(row(i)) {
                        out[i] = value.to_f32();
                    }
                }
            }
        }
    }
}

/// One register tile: the sum over k of a panel's column times b panel's row.
#[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
fn multiply(path: Path, a: &[f32], b: &[f32], out: &mut [f32; TILE_ROWS * TILE_COLUMNS]) {
    match path {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a pool takes a path only when `Path::available` has found its instructions.
        Path::Avx512 => unsafe { x86::multiply_avx512(a, b, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Path::Avx2 => unsafe { x86::multiply_avx2(a, b, out) },
        _ => multiply_plain::<{ cfg!(target_arch = "aarch64") }>(a, b, out),
    }
}

/// A tile of 6 by 16 that the compiler turns into vector code; `FUSED` where a multiply-add is one instruction.
#[inline(always)]
fn multiply_plain<const FUSED: bool>(a: &[f32], b: &[f32], out: &mut [f32; TILE_ROWS * TILE_COLUMNS]) {
    let mut sums = [[0.0f32; 16]; 6];
    for (a, b) in a.as_chunks::<6>().0.iter().zip(b.as_chunks::<16>().0) {
        for (sums, &a) in sums.iter_mut().zip(a) {
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = if FUSED { a.mul_add(b, *sum) } else { a * b + *sum };
            }
        }
    }
    out[..6 * 16].copy_from_slice(sums.as_flattened());
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(unsafe_code, reason = "vector loads and stores take pointers")]

    use std::arch::x86_64::{
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::{TILE_COLUMNS, TILE_ROWS};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn multiply_avx2(a: &[f32], b: &[f32], out: &mut [f32; TILE_ROWS * TILE_COLUMNS]) {
        super::multiply_plain::<true>(a, b, out);
    }

    /// A tile of 12 by 32: 24 accumulators of the 32 registers.
    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_avx512(a: &[f32], b: &[f32], out: &mut [f32; TILE_ROWS * TILE_COLUMNS]) {
        let mut sums = [[_mm512_setzero_ps(); 2]; 12];
        for (a, b) in a.as_chunks::<12>().0.iter().zip(b.as_chunks::<32>().0) {
            // SAFETY: b has 32 elements.
            let (low, high) = unsafe { (_mm512_loadu_ps(b.as_ptr()), _mm512_loadu_ps(b.as_ptr().add(16))) };
            for (sums, &a) in sums.iter_mut().zip(a) {
                let a = _mm512_set1_ps(a);
                sums[0] = _mm512_fmadd_ps(a, low, sums[0]);
                sums[1] = _mm512_fmadd_ps(a, high, sums[1]);
            }
        }
        for (sums, out) in sums.iter().zip(out.as_chunks_mut::<32>().0) {
            // SAFETY: out has 32 elements.
            unsafe {
                _mm512_storeu_ps(out.as_mut_ptr(), sums[0]);
                _mm512_storeu_ps(out.as_mut_ptr().add(16), sums[1]);
            }
        }
    }
}
