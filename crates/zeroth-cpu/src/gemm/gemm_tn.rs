//! Products that sum over rows of both factors, as gradients of weights do, on AMX tiles.
//!
//! Neither factor stands as tiles want the rows of a product: one has to be turned over, which costs four times what packing
//! the other does. The narrower one is turned, once, and stays in the second-level cache; if it is the right one, tiles of
//! the result are turned as they are stored. The wider one is packed some panels at a time. Tiles follow each other along the
//! rows of the result, some or all: down its columns, a single line of each row at a time, sums of 512 terms took up to 1.9
//! times as long. The packed rows that come next are asked for; what is still to be packed is not: tiles from the second level
//! and lines from the memory wait for the same few buffers.
//!
//! The bits are those of the product in blocks: each sum has the same terms in the same order.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::_mm512_storeu_si512;

use super::View;
use super::amx::{NEAR, Tiles};
use super::amx_pack::{Side, pack};
use super::blocking::{OverRows, PANEL, TILE};
use super::driver::{Between, Place, finish_rows};
use super::epilogue::Store;
use super::prefetch::ask_to_read_later;
use super::transpose::transpose_from;
use crate::avx512::Room;
use crate::pool::Pool;
use crate::work_partition::{Chunks, Grid, Lines, Tile};
use zeroth_kernel::Element;

/// Quarters that a tile is turned in.
const QUARTERS: usize = 4;
const SIDE: usize = 16;
/// Panels of the wider factor that are packed at the same time.
const TOGETHER: usize = 8;
/// Panels of the narrower factor that are multiplied with one of the wider before the next, where tiles are turned and a
/// panel is more than the first-level cache keeps.
const STRIPE: usize = 4;

/// Computes a[k, m]ᵀ · b[k, n] and gives each piece of a row to `store`.
pub(super) fn run<T: Element, O: Send>(
    pool: &Pool,
    cut: OverRows,
    [m, n, k]: [usize; 3],
    a: View<T>,
    b: View<T>,
    out: &mut [O],
    scratch: &mut [f32],
    store: &(impl Store<O> + Sync),
) {
    let ((narrow, width), (wide, across)) = if m > n { ((b, n), (a, m)) } else { ((a, m), (b, n)) };
    let (shared, own) = scratch.split_at_mut(cut.shared());
    let packed = Room::new(shared).bf16(cut.narrow * cut.steps * TILE);
    pool.each(Chunks::new(packed, 2 * cut.steps * TILE), |pair, out| {
        let first = 2 * pair * PANEL;
        let view = narrow.from(0, first).transposed();
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
        let view = wide.from(0, group * part).transposed();
        // Some at a time: what is packed together should not be driven out by its own pieces.
        for (at, out) in columns.chunks_mut(TOGETHER * cut.steps * TILE).enumerate() {
            let first = at * TOGETHER * PANEL;
            let lines = (TOGETHER * PANEL).min(part.min(across - group * part) - first);
            pack(Side::Columns, view.from(first, 0), lines, k, out);
        }
        // SAFETY: a machine with tiles has AVX-512; `Isa::available` has looked.
        unsafe {
            match (m > n, cut.resident() || m > n && stays_near(cut)) {
                (true, true) => task::<true, false, O>(cut, packed, columns, out, room, store),
                (true, false) => task::<true, true, O>(cut, packed, columns, out, room, store),
                (false, true) => task::<false, false, O>(cut, packed, columns, out, room, store),
                (false, false) => task::<false, true, O>(cut, packed, columns, out, room, store),
            }
        }
    });
}

/// Whether the first-level cache keeps a panel.
const fn stays_near(cut: OverRows) -> bool {
    cut.steps <= NEAR
}

/// Some panels of the wider factor with all of the narrower, whose `rows` are asked for a band ahead if `ASK`. What is decided
/// here and not in the loops is part of the type: they have no registers for it.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn task<const TURNED: bool, const ASK: bool, O>(
    cut: OverRows,
    rows: &[u16],
    columns: &[u16],
    mut out: Tile<O>,
    mut room: Room,
    store: &impl Store<O>,
) {
    let mut tiles = Tiles::ready();
    let (mut next, mut sums, over) = (room.f32(TILE), room.f32(TILE), room.f32(TILE));
    let place = |row: usize, column: usize, out: &Tile<O>| Place {
        row,
        column,
        rows: PANEL.min(out.rows() - row),
        columns: PANEL.min(out.columns() - column),
    };
    let mut waiting = None;
    let panel = cut.steps * TILE;
    let count = columns.len() / panel;
    let stripe = match (TURNED, stays_near(cut)) {
        (false, _) => panel,
        (true, false) => STRIPE * panel,
        (true, true) => rows.len(),
    };
    for (band, band_rows) in rows.chunks(stripe).enumerate() {
        // After the last rows the next task begins with the first ones.
        let mut next_rows =
            rows.get((band + 1) * stripe..).filter(|next| !next.is_empty()).unwrap_or(rows).as_ptr();
        for turn in 0..count {
            // Back and forth: what the cache has let go by the end of a band is what the next one needs last.
            let right = if band.is_multiple_of(2) { turn } else { count - 1 - turn };
            for (down, panel_rows) in band_rows.chunks_exact(panel).enumerate() {
                let mut storing = Storing::<_, _, TURNED, ASK>::new(
                    &*sums, &mut *over, waiting, next_rows, &mut out, store,
                );
                tiles.woven::<TURNED>(panel_rows, &columns[right * panel..][..panel], next, &mut storing);
                storing.finish();
                store_edge(if TURNED { over } else { sums }, waiting, &mut out, store);
                let down = band * (stripe / panel) + down;
                let [row, column] = if TURNED { [right, down] } else { [down, right] };
                waiting = Some(place(row * PANEL, column * PANEL, &out));
                (next, sums) = (sums, next);
                next_rows = next_rows.wrapping_add(panel / count);
            }
        }
    }
    Storing::<_, _, TURNED, false>::new(sums, &mut *over, waiting, rows.as_ptr(), &mut out, store).finish();
    store_edge(if TURNED { over } else { sums }, waiting, &mut out, store);
}

/// Stores a tile that has not all columns.
#[inline(always)]
fn store_edge<O>(sums: &[f32], at: Option<Place>, out: &mut Tile<O>, store: &impl Store<O>) {
    if let Some(at) = at.filter(|at| at.columns < PANEL) {
        finish_rows::<PANEL, O>(sums, at, out, store);
    }
}

/// A tile that is stored while the next one is multiplied: first it is turned, if it has to be, then whole rows are stored.
struct Storing<'a, O, S, const TURNED: bool, const ASK: bool> {
    sums: &'a [f32],
    /// Room for the turned one.
    over: &'a mut [f32],
    /// Quarters that were turned, and rows that were stored.
    quarters: usize,
    rows: usize,
    lines: Lines<'a, O, PANEL>,
    /// The column of the matrix that they begin with.
    first: usize,
    /// Rows that will be multiplied later.
    ask: *const u16,
    store: &'a S,
}

impl<O, S: Store<O>, const TURNED: bool, const ASK: bool> Between for Storing<'_, O, S, TURNED, ASK> {
    #[inline(always)]
    fn beat(&mut self) {
        if ASK {
            ask_to_read_later(self.ask.cast());
            self.ask = self.ask.wrapping_add(PANEL);
        }
        self.next();
    }
}

impl<'a, O, S: Store<O>, const TURNED: bool, const ASK: bool> Storing<'a, O, S, TURNED, ASK> {
    #[inline(always)]
    fn new(
        sums: &'a [f32],
        over: &'a mut [f32],
        at: Option<Place>,
        ask: *const u16,
        out: &'a mut Tile<O>,
        store: &'a S,
    ) -> Self {
        let corner = at.map_or([0, 0], |at| [at.row, at.column]);
        let quarters = if at.is_some() { 0 } else { QUARTERS };
        let first = out.first_column() + corner[1];
        let lines = out.lines(corner, at.map_or(0, |at| at.rows));
        Self { sums, over, quarters, rows: 0, lines, first, ask, store }
    }

    /// Does the next piece; whether there was one.
    #[inline(always)]
    fn next(&mut self) -> bool {
        if TURNED && self.quarters < QUARTERS {
            // SAFETY: a machine with tiles has AVX-512.
            unsafe { turn(self.sums, self.over, self.quarters) };
            self.quarters += 1;
            return true;
        }
        let Some(out) = self.lines.next() else { return false };
        let sums = if TURNED { &*self.over } else { self.sums };
        self.store.line(self.first, &sums.as_chunks().0[self.rows], out);
        self.rows += 1;
        true
    }

    #[inline(always)]
    fn finish(&mut self) {
        while self.next() {}
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
    use crate::{Isa, normal};

    struct Copied;

    impl Store<f32> for Copied {
        fn row(&self, _: usize, sums: &[f32], out: &mut [f32]) {
            out.copy_from_slice(sums);
        }
    }

    #[test]
    fn the_bits_are_those_of_the_product_in_blocks() {
        let Some(pool) = Pool::on_isa(2, Isa::Amx) else { return };
        for [m, n, k] in [
            [32, 32, 32],
            [70, 33, 100],
            [33, 300, 1],
            [300, 40, 1024],
            [1, 1, 31],
            [256, 96, 513],
            // More than the second-level cache keeps, both ways round.
            [290, 610, 1024],
            [610, 290, 1000],
            [800, 600, 500],
        ] {
            assert!(OverRows::of([m, n, k]).is_some());
            // Rows that follow each other, and rows that are further apart than they are long.
            let [a_pitch, b_pitch] = if k.is_multiple_of(2) { [m, n] } else { [m + 3, n + 32] };
            let (mut a, mut b) = (vec![bf16::ZERO; k * a_pitch], vec![bf16::ZERO; k * b_pitch]);
            normal(&pool, 1, 1, 0, 1.0, &mut a);
            normal(&pool, 1, 2, 0, 1.0, &mut b);
            let mut scratch = vec![f32::NAN; over_rows_scratch(m, n, k, 2)];
            let (mut expected, mut found) = (vec![0.0f32; m * n], vec![f32::NAN; m * n]);
            let (a, b) = (View::rows(&a, a_pitch), View::rows(&b, b_pitch));
            matmul(&pool, [m, n, k], a.transposed(), b, &mut expected, &mut scratch, |_, sums, out| {
                out.copy_from_slice(sums);
            });
            scratch.fill(f32::NAN);
            over_rows(&pool, [m, n, k], a, b, &mut found, &mut scratch, &Copied);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&expected), "{m} x {n} over {k} rows");
        }
    }
}
