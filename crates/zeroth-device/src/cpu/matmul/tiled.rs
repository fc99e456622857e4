//! A task's part of a product on tiles. The sums of a tile are stored while the next one is multiplied: tile instructions
//! leave the rest of the processor idle.
#![allow(unsafe_code, reason = "sums are read and written by turns through one pointer")]

use super::ahead::Ahead;
use super::blocks::{
    BEAT, Between, Job, Kernel, Place, aligned, back_and_forth, finish_rows, no_terms, panels,
};
use super::sizes::{PANEL, TILE};
use super::store::{LINE, Store};
use super::tiles::Tiles;
use crate::cpu::cut::{Beside, Tile};
use crate::cpu::element::Element;

/// Computes the task's part.
pub(super) fn run_task<A: Element, B: Element, O>(
    job: Job<'_, A, B>,
    out: Tile<O>,
    scratch: &mut [f32],
    store: &impl Store<O>,
) {
    // SAFETY: a machine with tiles has AVX-512; `Path::available` has looked.
    unsafe { task(job, out, scratch, store) }
}

/// [`run_task`] with what it does between the steps of tiles in vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn task<A: Element, B: Element, O, S: Store<O>>(
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
                let near = a_panel.near()[1] > 0;
                let (band, term) = if row + PANEL < rows { (row + PANEL, first) } else { (0, first + depth) };
                // Rows of a matrix that is seen the other way round come by themselves: they are packed one after the other.
                let next =
                    (term < k && !a.turned()).then(|| a.data.as_ptr().wrapping_add(band * a.row + term));
                for turn in 0..across {
                    let panel = back_and_forth(row / PANEL, turn, across);
                    let at = Place::of(&out, [row, panel * PANEL], [PANEL; 2]);
                    if row == 0 && panel.is_multiple_of(sizes.panels) {
                        let together = sizes.panels.min(across - panel);
                        let out = &mut b_pack[panel * panel_len..][..together * panel_len];
                        let columns = (together * PANEL).min(columns - at.column);
                        tiles.pack_columns(b.from(at.column, first), columns, depth, out);
                    }
                    let b_panel = &b_pack[panel * panel_len..][..panel_len];
                    let mut ahead = Ahead::nothing(b_panel.as_ptr().cast());
                    if let Some(next) = next {
                        ahead.read(next.wrapping_add(turn * share * a.row), a.row, near);
                    }
                    if last && S::READS {
                        let stride = out.stride();
                        ahead.add(out.row(row)[at.column..].as_ptr(), at.columns, stride);
                    }
                    let slot = if k <= sizes.depth(k) { 0 } else { row / PANEL * across + panel };
                    assert!(slot < tiles_of_sums);
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
    Meanwhile { ahead: Ahead::<A>::nothing(std::ptr::null()), each: 0, first_column, rows, store }.end();
}

/// A tile whose sums are complete and not yet stored: where it stands, rows of it, and where the sums are.
struct Waiting {
    corner: [usize; 2],
    rows: usize,
    slot: usize,
}

/// What is done while a task multiplies two panels: asking for what comes next, and storing the sums of the tile before.
struct Meanwhile<'a, A, O, S> {
    ahead: Ahead<A>,
    /// Rows stored at a beat.
    each: usize,
    /// The column of the matrix that they begin with.
    first_column: usize,
    rows: Beside<'a, O, LINE>,
    store: &'a S,
}

impl<A, O, S: Store<O>> Between for Meanwhile<'_, A, O, S> {
    #[inline(always)]
    fn beat(&mut self) {
        self.ahead.step();
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

    #[inline(always)]
    fn end(&mut self) {
        let Self { first_column, rows, store, .. } = self;
        while rows.take::<1>(|sums, out| store.line(*first_column, sums, out)) {}
    }
}
