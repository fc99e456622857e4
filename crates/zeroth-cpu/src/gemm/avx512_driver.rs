//! A task of an f32 product with AVX-512. The multiplications leave most of the processor idle: while one panel of rows is
//! multiplied, the next one is asked for, or copied if it does not stand as the kernel can take it, and so are the places of the
//! sums, some lines a beat.

use super::avx512::{LANES, ROWS, Zmm, multiply};
use super::avx512_pack::{Filling, GROUP, Panel, panel_len, stands};
use super::driver::{BEAT, Between, Job, Kernel, Place, aligned};
use super::epilogue::Store;
use super::prefetch::{LINE, ask_to_read_later, ask_to_write};
use crate::work_partition::Tile;
use zeroth_kernel::Element;

/// What is done while two panels are multiplied.
struct Meanwhile<'a, 'f, T> {
    /// The panels of rows that come next, if they are copied.
    next: Option<&'a mut Filling<'f, T>>,
    /// Else where some of their rows stand, and elements from one to the next.
    ask: *const T,
    pitch: usize,
    /// Lines that are copied, or rows that are asked for, at a beat.
    each: usize,
    /// Rows that will be written: the sums, and the result.
    writes: [Rows; 2],
    /// Beats to come.
    beats: usize,
}

/// Rows of a tile, in bytes: where they begin, from one to the next, and the last of each.
#[derive(Clone, Copy)]
struct Rows {
    start: *const u8,
    stride: usize,
    last: usize,
}

impl Rows {
    fn new<O>(start: *const O, stride: usize, columns: usize) -> Self {
        let [stride, width] = [stride, columns].map(|count| count * size_of::<O>());
        Self { start: start.cast(), stride, last: width.saturating_sub(1) }
    }
}

impl<T: Element> Between for Meanwhile<'_, '_, T> {
    #[inline(always)]
    fn beat(&mut self) {
        if let Some(next) = &mut self.next {
            next.step(self.each);
        } else {
            for row in 0..self.each {
                let row = self.ask.wrapping_add(row * self.pitch);
                for line in (0..BEAT).step_by(LANES) {
                    ask_to_read_later(row.wrapping_add(line).cast());
                }
            }
            self.ask = self.ask.wrapping_add(BEAT);
        }
        self.beats -= 1;
        // A row at each of the last beats.
        if self.beats < ROWS {
            for rows in self.writes {
                let row = rows.start.wrapping_add(self.beats * rows.stride);
                for at in [0, LINE.min(rows.last), (2 * LINE).min(rows.last), rows.last] {
                    ask_to_write(row.wrapping_add(at));
                }
            }
        }
    }
}

/// As [`super::driver::task`].
pub(super) fn task<A: Element, B: Element, O>(
    job: Job<'_, A, B>,
    mut out: Tile<O>,
    scratch: &mut [f32],
    store: &impl Store<O>,
) {
    let (k, sizes) = (job.k, Zmm::SIZES);
    let (rows, columns) = (out.rows(), out.columns());
    let across = columns.div_ceil(sizes.columns);
    let (sums, pack) = aligned(scratch).split_at_mut(sizes.sums(rows, columns, k));
    let place = |row: usize, column: usize| Place {
        row,
        column,
        rows: ROWS.min(rows - row),
        columns: sizes.columns.min(columns - column),
    };
    if k == 0 {
        sums.fill(0.0);
        for at in (0..rows).step_by(ROWS).flat_map(|row| (0..across).map(move |number| [row, number])) {
            Zmm::finish(sums, place(at[0], at[1] * sizes.columns), &mut out, store);
        }
        return;
    }
    let longest = sizes.depth(k);
    let (groups, b_pack) = pack.split_at_mut(sizes.panel(sizes.panels * ROWS, longest));
    let (mut here, mut there) = groups.split_at_mut(sizes.panel(GROUP * ROWS, longest));
    let (a, b) = (job.a.from(out.first_row(), 0), job.b.transposed().from(out.first_column(), 0));
    let (tile, height) = (ROWS * sizes.columns, GROUP * ROWS);
    let lines =
        |row: usize, first: usize| (a.from(row, first), height.min(rows - row), longest.min(k - first));
    let copies = !stands(a);
    if copies {
        Filling::new(lines(0, 0), here).finish();
    }
    for first in (0..k).step_by(longest) {
        let (depth, last) = (longest.min(k - first), first + longest >= k);
        let (beats, b_len) = (depth.div_ceil(BEAT), sizes.panel(sizes.columns, depth));
        for top in (0..rows).step_by(height) {
            let bottom = rows.min(top + height);
            let (below, term) = if bottom < rows { (bottom, first) } else { (0, first + depth) };
            let mut next = (copies && term < k).then(|| Filling::new(lines(below, term), there));
            let all = (bottom - top).div_ceil(ROWS) * across * beats;
            let copied = next.as_ref().map_or(0, |next| next.lines().div_ceil(all));
            for (row, numbers) in (top..bottom).step_by(ROWS).zip(here.chunks_exact(panel_len(depth))) {
                let down = row / ROWS;
                let panel = Panel::in_place(a.from(row, first), ROWS.min(rows - row), depth)
                    .unwrap_or_else(|| Panel::packed(numbers, depth, a.turned()));
                let (below, term) = if row + ROWS < rows { (row + ROWS, first) } else { (0, first + depth) };
                let coming = a.data.as_ptr().wrapping_add(below * a.row + term);
                // None of either where nothing follows.
                let each = if copies || term >= k { copied } else { ROWS.div_ceil(across) };
                // In order: the processor reads ahead beyond the end of a panel of b, and that is the next one.
                for number in 0..across {
                    let at = place(row, number * sizes.columns);
                    let b_panel = &mut b_pack[number * b_len..][..b_len];
                    if row == 0 {
                        Zmm.pack_columns(b.from(at.column, first), at.columns, depth, b_panel);
                    }
                    let slot = if k <= longest { 0 } else { down * across + number };
                    let sums = &mut sums[slot * tile..][..tile];
                    let kept = Rows::new(sums.as_ptr(), sizes.columns, at.columns);
                    let stride = out.stride();
                    let written = Rows::new(out.row(row)[at.column..].as_ptr(), stride, at.columns);
                    let writes = [kept, if last { written } else { kept }];
                    let ask = coming.wrapping_add(number * each * a.row);
                    let mut meanwhile =
                        Meanwhile { next: next.as_mut(), ask, pitch: a.row, each, writes, beats };
                    let live = [at.rows, at.columns];
                    multiply(panel, b_panel, sums, sizes.columns, live, first > 0, &mut meanwhile);
                    if last {
                        Zmm::finish(sums, at, &mut out, store);
                    }
                }
            }
            if let Some(next) = next {
                next.finish();
                std::mem::swap(&mut here, &mut there);
            }
        }
    }
}
