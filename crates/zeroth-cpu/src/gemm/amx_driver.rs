//! A task's part of a product on tiles. The sums of a tile are stored while the next one is multiplied: tile instructions
//! leave the rest of the processor idle.
#![allow(unsafe_code, reason = "sums are read and written by turns through one pointer")]

use super::amx::Tiles;
use super::blocking::{PANEL, TILE};
use super::driver::{
    BEAT, Between, Job, Kernel, Place, aligned, back_and_forth, finish_rows, no_terms, panels,
};
use super::epilogue::{LINE, Store};
use super::prefetch::Ahead;
use crate::work_partition::{Beside, Tile};
use zeroth_kernel::Element;

/// Computes the task's part.
pub(super) fn run_task<A: Element, B: Element, O, S: Store<O>>(
    job: Job<'_, A, B>,
    out: Tile<O>,
    scratch: &mut [f32],
    store: &S,
) {
    // SAFETY: a machine with tiles has AVX-512; `Isa::available` has looked.
    unsafe {
        // Sums are added to what is stored, or to those of the block before.
        if S::READS || job.k > Tiles::SIZES.seen(job.a.turned()).depth(job.k) {
            task::<A, B, O, S, true>(job, out, scratch, store);
        } else {
            task::<A, B, O, S, false>(job, out, scratch, store);
        }
    }
}

/// [`run_task`] with what it does between the steps of tiles in vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn task<A: Element, B: Element, O, S: Store<O>, const ADDS: bool>(
    job: Job<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    store: &S,
) {
    let (k, sizes) = (job.k, Tiles::SIZES.seen(job.a.turned()));
    let (rows, columns) = (out.rows(), out.columns());
    let (sums, pack) = aligned(scratch).split_at_mut(sizes.sums(rows, columns, k));
    if k == 0 {
        return no_terms::<Tiles, O, S>(&mut sums[..TILE], &mut out, store);
    }
    // Where sums are complete after one block of terms, all tiles use the same place in turn: it stays in the first-level cache,
    // and what stands there is taken before the next sums are written. Else each tile has its own.
    let (tiles_of_sums, sums) = (sums.len() / TILE, sums.as_mut_ptr());
    let mut tiles = Tiles::ready();
    let (a, b) = (job.a.from(out.first_row(), 0), job.b.transposed().from(out.first_column(), 0));
    let (across, group_rows) = (columns.div_ceil(PANEL), sizes.panels * PANEL);
    // Where rows follow each other, every panel of b asks for a share of the next ones.
    let share = PANEL.div_ceil(across.max(1));
    // Where columns of b lie side by side, all are packed together: the further the processor reads along a row, the more it reads
    // ahead by itself. With two panels at a time a product of 512 rows took up to a quarter longer.
    let packed_together = if b.turned() { across } else { sizes.panels };
    let in_one = k <= sizes.depth(k);
    let mut waiting = Waiting { corner: [0, 0], rows: 0, slot: 0 };
    for first in (0..k).step_by(sizes.depth(k)) {
        let depth = sizes.depth(k).min(k - first);
        let last = first + depth == k;
        let (a_pack, b_pack) = panels::<Tiles>(pack, group_rows, columns, depth);
        let panel_len = sizes.panel(PANEL, depth);
        let each = PANEL.div_ceil(depth.div_ceil(BEAT));
        for group in (0..rows).step_by(group_rows) {
            let packed = tiles.pack_rows(a.from(group, first), group_rows.min(rows - group), depth, a_pack);
            for row in (group..rows.min(group + group_rows)).step_by(PANEL) {
                let a_panel = Tiles::panel(packed, (row - group) / PANEL);
                let (band, term) = if row + PANEL < rows { (row + PANEL, first) } else { (0, first + depth) };
                // Rows of a matrix that is seen the other way round come by themselves: they are packed one after the other.
                let next =
                    (term < k && !a.turned()).then(|| a.data.as_ptr().wrapping_add(band * a.row + term));
                for turn in 0..across {
                    let panel = back_and_forth(row / PANEL, turn, across);
                    let at = Place::of(&out, [row, panel * PANEL], [PANEL; 2]);
                    if row == 0 && panel.is_multiple_of(packed_together) {
                        let together = packed_together.min(across - panel);
                        let out = &mut b_pack[panel * panel_len..][..together * panel_len];
                        let columns = (together * PANEL).min(columns - at.column);
                        tiles.pack_columns(b.from(at.column, first), columns, depth, out);
                    }
                    let b_panel = &b_pack[panel * panel_len..][..panel_len];
                    let mut ahead = Ahead::<A, ADDS>::nothing(b_panel.as_ptr().cast());
                    if let Some(next) = next {
                        ahead.read(next.wrapping_add(turn * share * a.row), a.row);
                    }
                    let slot = if in_one { 0 } else { row / PANEL * across + panel };
                    assert!(slot < tiles_of_sums);
                    if last && S::READS {
                        let stride = out.stride();
                        ahead.add(out.row(row)[at.column..].as_ptr(), at.columns, stride);
                    } else if !in_one {
                        // The next tile's sums, which have left the cache since the block before. After the last panel of a
                        // band comes the same panel of the next.
                        let next = match turn + 1 {
                            end if end == across => slot + across,
                            turn => row / PANEL * across + back_and_forth(row / PANEL, turn, across),
                        };
                        ahead.add(sums.wrapping_add(next * TILE), PANEL, PANEL);
                    }
                    let (sums, earlier) =
                        (sums.wrapping_add(slot * TILE), sums.wrapping_add(waiting.slot * TILE));
                    let first_column = out.first_column() + waiting.corner[1];
                    let lines = out.lines(waiting.corner, waiting.rows);
                    // SAFETY: sums of a whole tile, written when it was put to wait. They are read until `end`, before the
                    // same memory is written: nobody else has it, and all pointers come from one.
                    unsafe {
                        let rows = lines.beside(earlier.cast_const().cast());
                        let mut meanwhile = Meanwhile { ahead, each, first_column, rows, store };
                        let live = [at.rows, at.columns];
                        tiles.multiply_to(a_panel, b_panel, sums, PANEL, live, first > 0, &mut meanwhile);
                    }
                    waiting = Waiting { corner: [at.row, at.column], rows: 0, slot };
                    if last && at.columns == LINE {
                        waiting.rows = at.rows;
                    } else if last {
                        // SAFETY: the tile that was just written.
                        let sums = unsafe { std::slice::from_raw_parts(sums.cast_const(), TILE) };
                        finish_rows::<LINE, O>(sums, at, &mut out, store);
                    }
                }
            }
        }
    }
    let (first_column, lines) =
        (out.first_column() + waiting.corner[1], out.lines(waiting.corner, waiting.rows));
    // SAFETY: as above.
    let rows = unsafe { lines.beside(sums.wrapping_add(waiting.slot * TILE).cast_const().cast()) };
    Meanwhile { ahead: Ahead::<A, ADDS>::nothing(std::ptr::null()), each: 0, first_column, rows, store }
        .end();
}

/// A tile whose sums are complete and not yet stored: where it stands, rows of it, and where the sums are.
struct Waiting {
    corner: [usize; 2],
    rows: usize,
    slot: usize,
}

/// What is done while a task multiplies two panels: asking for what comes next, and storing the sums of the tile before.
struct Meanwhile<'a, A, O, S, const ADDS: bool> {
    ahead: Ahead<A, ADDS>,
    /// Rows stored at a beat.
    each: usize,
    /// The column of the matrix that they begin with.
    first_column: usize,
    rows: Beside<'a, O, LINE>,
    store: &'a S,
}

impl<A, O, S: Store<O>, const ADDS: bool> Between for Meanwhile<'_, A, O, S, ADDS> {
    #[inline(always)]
    fn beat(&mut self) {
        self.ahead.step();
        self.store();
    }

    #[inline(always)]
    fn end(&mut self) {
        let Self { first_column, rows, store, .. } = self;
        while rows.take::<1>(|sums, out| store.line(*first_column, sums, out)) {}
    }
}

impl<A, O, S: Store<O>, const ADDS: bool> Meanwhile<'_, A, O, S, ADDS> {
    /// Stores the rows of one beat.
    #[inline(always)]
    fn store(&mut self) {
        let Self { first_column, rows, store, .. } = self;
        let mut to = |sums: &[f32; LINE], out: &mut [O; LINE]| store.line(*first_column, sums, out);
        if self.each == 1 {
            rows.take::<1>(to);
            return;
        }
        for _ in 0..self.each.div_ceil(2) {
            rows.take::<2>(&mut to);
        }
    }
}
