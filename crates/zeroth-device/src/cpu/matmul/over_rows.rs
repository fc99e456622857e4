//! Products that sum over rows of both factors, as gradients of weights do, on AMX tiles.
//!
//! Neither factor stands as tiles want the rows of a product: one has to be turned over, which costs four times what packing
//! the other does. The narrower one is turned, once, and stays in the second-level cache; if it is the right one, tiles of
//! the result are turned as they are stored. The wider one is packed some panels at a time. Nothing is asked for ahead:
//! tiles from the second level and lines from the memory wait for the same few buffers.
//!
//! The bits are those of the product in blocks: each sum has the same terms in the same order.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::_mm512_storeu_si512;

use super::View;
use super::bf16_panels::{Side, pack};
use super::blocks::{Between, Place};
use super::sizes::{OverRows, PANEL, TILE};
use super::store::Store;
use super::tiles::Tiles;
use super::transpose::transpose_from;
use crate::cpu::cut::{Chunks, Grid, Tile};
use crate::cpu::element::Element;
use crate::cpu::panels::Room;
use crate::cpu::pool::Pool;

/// Rows of a tile, which are stored one by one.
const STORES: usize = PANEL;
/// Quarters that a tile is turned in.
const QUARTERS: usize = 4;
const SIDE: usize = 16;

/// Computes a[k, m]ᵀ · b[k, n] and gives each piece of a row to `store`.
pub(super) fn run<T: Element, O: Send>(
    pool: &Pool,
    cut: OverRows,
    [m, n, k]: [usize; 3],
    a: &[T],
    b: &[T],
    out: &mut [O],
    scratch: &mut [f32],
    store: &(impl Store<O> + Sync),
) {
    let ((narrow, width), (wide, across)) = if m > n { ((b, n), (a, m)) } else { ((a, m), (b, n)) };
    let (shared, own) = scratch.split_at_mut(cut.shared());
    let packed = Room::new(shared).bf16(cut.narrow * cut.steps * TILE);
    pool.each(Chunks::new(packed, 2 * cut.steps * TILE), |pair, out| {
        let first = 2 * pair * PANEL;
        let view = View::rows(&narrow[first..], width).transposed();
        pack(Side::Rows, view, (2 * PANEL).min(width - first), k, out);
    });
    let packed = &*packed;
    let together = cut.group(pool.threads());
    let part = together * PANEL;
    let grid = if m > n { Grid::new(out, n, part, n) } else { Grid::new(out, n, m, part) };
    pool.each_with(grid, own, |group, out, scratch| {
        let mut room = Room::new(scratch);
        let panels = (across - group * part).div_ceil(PANEL).min(together);
        let columns = room.bf16(panels * cut.steps * TILE);
        let view = View::rows(&wide[group * part..], across).transposed();
        pack(Side::Columns, view, part.min(across - group * part), k, columns);
        // SAFETY: a machine with tiles has AVX-512; `Path::available` has looked.
        unsafe { task(packed, columns, cut.steps, m > n, out, room, store) }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn task<O>(
    rows: &[u16],
    columns: &[u16],
    steps: usize,
    turned: bool,
    mut out: Tile<O>,
    mut room: Room,
    store: &impl Store<O>,
) {
    let mut tiles = Tiles::ready();
    let (mut next, mut sums, over) = (room.f32(TILE), room.f32(TILE), room.f32(TILE));
    let units = if turned { QUARTERS + STORES } else { STORES };
    let each = units.div_ceil(2 * steps);
    let place = |row: usize, column: usize, out: &Tile<O>| Place {
        row,
        column,
        rows: PANEL.min(out.rows() - row),
        columns: PANEL.min(out.columns() - column),
    };
    let mut waiting = None;
    for (down, rows) in rows.chunks_exact(steps * TILE).enumerate() {
        for (right, columns) in columns.chunks_exact(steps * TILE).enumerate() {
            let mut storing = Storing {
                sums: &*sums,
                turned: turned.then_some(&mut *over),
                at: waiting,
                unit: if turned { 0 } else { QUARTERS },
                each,
                out: &mut out,
                store,
            };
            tiles.woven(rows, columns, next, &mut storing);
            storing.finish();
            let [row, column] = if turned { [right, down] } else { [down, right] };
            waiting = Some(place(row * PANEL, column * PANEL, &out));
            (next, sums) = (sums, next);
        }
    }
    let unit = if turned { 0 } else { QUARTERS };
    let turned = turned.then_some(over);
    Storing { sums, turned, at: waiting, unit, each, out: &mut out, store }.finish();
}

/// A tile that is stored while the next one is multiplied.
struct Storing<'a, 'o, O, S> {
    sums: &'a [f32],
    /// Where it is turned to, if it has to be.
    turned: Option<&'a mut [f32]>,
    at: Option<Place>,
    /// What comes next: quarters to turn first, then rows to store.
    unit: usize,
    each: usize,
    out: &'a mut Tile<'o, O>,
    store: &'a S,
}

impl<O, S: Store<O>> Between for Storing<'_, '_, O, S> {
    #[inline(always)]
    fn beat(&mut self) {
        for _ in 0..self.each {
            self.next();
        }
    }
}

impl<O, S: Store<O>> Storing<'_, '_, O, S> {
    #[inline(always)]
    fn next(&mut self) {
        let (Some(at), true) = (self.at, self.unit < QUARTERS + STORES) else { return };
        // SAFETY: a machine with tiles has AVX-512.
        unsafe {
            if self.unit < QUARTERS {
                if let Some(turned) = &mut self.turned {
                    turn(self.sums, turned, self.unit);
                }
            } else {
                let row = self.unit - QUARTERS;
                if row < at.rows {
                    let sums = self.turned.as_deref().unwrap_or(self.sums);
                    let first = self.out.first_column() + at.column;
                    let sums = &sums.as_chunks::<PANEL>().0[row];
                    let out = &mut self.out.row(at.row + row)[at.column..][..at.columns];
                    match out.as_chunks_mut::<PANEL>() {
                        ([out], _) => self.store.line(first, sums, out),
                        (_, out) => self.store.row(first, &sums[..at.columns], out),
                    }
                }
            }
        }
        self.unit += 1;
    }

    #[inline(always)]
    fn finish(&mut self) {
        while self.at.is_some() && self.unit < QUARTERS + STORES {
            self.next();
        }
    }
}

/// Turns a quarter of a tile.
#[inline]
#[target_feature(enable = "avx512f")]
fn turn(sums: &[f32], out: &mut [f32], quarter: usize) {
    assert!(sums.len() >= TILE && out.len() >= TILE && quarter < QUARTERS);
    let (down, right) = (quarter / 2 * SIDE, quarter % 2 * SIDE);
    // SAFETY: 16 lines of 16 numbers, within the tiles.
    unsafe {
        let lines = transpose_from(sums.as_ptr().add(down * PANEL + right).cast(), PANEL * size_of::<f32>());
        for (i, line) in lines.into_iter().enumerate() {
            _mm512_storeu_si512(out.as_mut_ptr().add((right + i) * PANEL + down).cast(), line);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::{matmul, over_rows, over_rows_scratch};
    use super::*;
    use crate::cpu::{Path, normal};

    struct Copied;

    impl Store<f32> for Copied {
        fn row(&self, _: usize, sums: &[f32], out: &mut [f32]) {
            out.copy_from_slice(sums);
        }
    }

    #[test]
    fn the_bits_are_those_of_the_product_in_blocks() {
        let Some(pool) = Pool::on_path(2, Path::Amx) else { return };
        for [m, n, k] in
            [[32, 32, 32], [70, 33, 100], [33, 300, 1], [300, 40, 1024], [1, 1, 31], [256, 96, 513]]
        {
            assert!(OverRows::of([m, n, k]).is_some());
            let (mut a, mut b) = (vec![bf16::ZERO; k * m], vec![bf16::ZERO; k * n]);
            normal(&pool, 1, 1, 0, 1.0, &mut a);
            normal(&pool, 1, 2, 0, 1.0, &mut b);
            let mut scratch = vec![f32::NAN; over_rows_scratch(m, n, k, 2)];
            let (mut expected, mut found) = (vec![0.0f32; m * n], vec![f32::NAN; m * n]);
            let (left, right) = (View::rows(&a, m).transposed(), View::rows(&b, n));
            matmul(&pool, [m, n, k], left, right, &mut expected, &mut scratch, |_, sums, out| {
                out.copy_from_slice(sums);
            });
            scratch.fill(f32::NAN);
            over_rows(&pool, [m, n, k], &a, &b, &mut found, &mut scratch, &Copied);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&expected), "{m} x {n} over {k} rows");
        }
    }
}
