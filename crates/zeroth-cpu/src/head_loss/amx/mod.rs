//! The head on AMX tiles, for bf16: two passes over the vocabulary.
//!
//! The first computes logits and, beside the next ones, their powers relative to the logit of the row's label. Powers are
//! rounded to bf16 once: a panel of rows takes them to its sums of dx at once, and keeps them as columns of the
//! second product. Rows are divided by their totals where that costs least: the sums of dx when all of the
//! vocabulary is in them, and x before the second pass multiplies it with the powers to dw. What the label itself
//! takes away is subtracted in f32.
//!
//! A row whose label is so unlikely that powers might overflow does the first pass again, relative to its largest logit.
//!
//! Every element is one sum over tokens of the vocabulary, or over rows, in steps of 32: no cut into blocks changes it.
#![allow(unsafe_code, reason = "vector instructions take pointers, and are for machines that have them")]

mod dw;
mod exps;

use std::f32::consts::{LN_2, LOG2_E};
use std::sync::atomic::Ordering;

use half::bf16;
use zeroth_base::DType;

use super::blocking::{LANES, MARK, Panels};
use super::{Gradients, Weights, x_pitch};
use crate::avx512::Room;
use crate::gemm::{Nothing, PANEL, Side, TILE, Tiles, View, pack_bf16};
use crate::isa::{Isa, each_isa};
use crate::math;
use crate::pool::Pool;
use crate::work_partition::{Chunks, Grid, Optional};
use zeroth_kernel::Element;
use zeroth_kernel::HeadLossDims;

/// What a row's powers of 2 may reach beyond the reference: sums of them, and products with numbers of bf16, stay finite.
const SLACK: f32 = 64.0;

/// What is known of a row.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
struct Mark {
    /// What its powers are relative to, as an exponent of 2.
    reference: f32,
    /// The logit of its label, as an exponent of 2.
    chosen: f32,
    /// All bits where it is trained, none where it is not or is no row.
    live: u32,
    /// The sum of its powers.
    sum: f32,
}

const _: () = assert!(size_of::<Mark>() == MARK * size_of::<f32>());

/// Whether tiles take a head of this type and size on this path.
pub(super) fn fit<T: Element>(path: Isa, dims: HeadLossDims) -> bool {
    path == Isa::Amx && T::DTYPE == DType::Bf16 && Panels::of(dims).is_some()
}

/// One slice of rows.
struct Slice<'a, T> {
    pool: &'a Pool,
    dims: HeadLossDims,
    panels: Panels,
    x: &'a [T],
    /// Elements from one row of x, and of dx, to the next.
    pitch: usize,
    w: &'a [T],
    labels: &'a [i32],
}

/// What all threads share of a slice.
struct Shared<'a> {
    /// Columns of dw's product: [panels of the vocabulary, steps of rows].
    exps: &'a mut [u16],
    /// x as rows: [panels of rows, steps of hidden]. Later x over its totals, as it stands.
    x: &'a mut [u16],
    /// x over its totals as rows of dw's product: [panels of hidden, steps of rows].
    terms: &'a mut [u16],
    /// A block of w as columns of logits, [panels of the block, steps of hidden], and of dx, [panels of hidden, steps of the block].
    w: [&'a mut [u16]; 2],
    /// Sums of dx: [panels of rows, panels of hidden, 32, 32].
    sums: &'a mut [f32],
    /// Of each row 16 lanes of its powers' sum and 16 of its largest exponent.
    lanes: &'a mut [f32],
    marks: &'a mut [Mark],
    /// Of each panel of rows, 1 where it has to be done.
    open: &'a mut [u32],
}

impl<'a> Shared<'a> {
    fn new(panels: Panels, scratch: &'a mut [f32]) -> Self {
        let Panels { rows, hidden, vocab, block } = panels;
        let mut room = Room::new(scratch);
        Self {
            exps: room.bf16(rows * vocab * TILE),
            x: room.bf16(rows * hidden * TILE),
            terms: room.bf16(rows * hidden * TILE),
            w: [0; 2].map(|_| room.bf16(block * hidden * TILE)),
            sums: room.f32(rows * hidden * TILE),
            lanes: room.f32(rows * PANEL * 2 * LANES),
            marks: bytemuck::cast_slice_mut(room.f32(rows * PANEL * MARK)),
            open: bytemuck::cast_slice_mut(room.f32(rows)),
        }
    }

    /// Takes the sums of rows from their lanes. Panels stay open that have a row whose powers went too far; such rows get
    /// another reference.
    fn look(&mut self) {
        let marks = self.marks.chunks_exact_mut(PANEL).zip(self.lanes.chunks_exact(PANEL * 2 * LANES));
        for ((marks, lanes), open) in marks.zip(&mut *self.open) {
            if *open == 0 {
                continue;
            }
            *open = 0;
            for (mark, lanes) in marks.iter_mut().zip(lanes.chunks_exact(2 * LANES)) {
                mark.sum = math::sum_of(&lanes[..LANES], |lane| lane);
                let most = math::largest(&lanes[LANES..]);
                if mark.live != 0 && most > SLACK {
                    mark.reference += most;
                    *open = 1;
                }
            }
        }
    }
}

pub(super) fn run<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    mut gradients: Option<Gradients<T>>,
    scratch: &mut [f32],
) -> f64 {
    let pitch = x_pitch(dims, x);
    let mut total = 0.0;
    let most = Panels::of(dims).expect("`fit` has said yes");
    let (shared, own) = scratch.split_at_mut(most.shared());
    for first in (0..dims.rows).step_by(dims.slice_rows::<bf16>().max(1)) {
        let rows = dims.slice_rows::<bf16>().min(dims.rows - first);
        let place = first * pitch..(first + rows) * pitch;
        let labels = &labels[first..first + rows];
        let panels = Panels { rows: rows.div_ceil(PANEL), ..most };
        let dims = HeadLossDims { rows, ..dims };
        let slice = Slice { pool, dims, panels, x: &x[place.clone()], pitch, w, labels };
        let mut shared = Shared::new(panels, shared);
        total += slice.losses(&mut shared, gradients.is_some(), own);
        if let Some(Gradients { scale, dx, dw }) = &mut gradients {
            slice.finish_dx(&shared, *scale, &mut dx[place]);
            slice.dw(&mut shared, *scale, dw, own);
        }
    }
    total
}

impl<T: Element> Slice<'_, T> {
    /// The sum of the losses; with gradients also the powers and, not yet divided, the sums of dx.
    fn losses(&self, shared: &mut Shared, gradients: bool, own: &mut [f32]) -> f64 {
        self.begin(shared, own);
        shared.open.fill(1);
        self.powers(shared, gradients, own);
        shared.look();
        if shared.open.contains(&1) {
            self.powers(shared, gradients, own);
            shared.look();
        }
        let mut total = 0.0;
        for (mark, _) in shared.marks.iter().zip(self.labels).filter(|(_, label)| **label >= 0) {
            total += f64::from(mark.sum.ln() - (mark.chosen - mark.reference) * LN_2);
        }
        total
    }

    /// Packs x and marks each row with the logit of its label: the same bits as among all logits.
    fn begin(&self, shared: &mut Shared, own: &mut [f32]) {
        let (hidden, steps) = (self.dims.hidden, self.panels.hidden);
        let parts = (Chunks::new(shared.x, steps * TILE), Chunks::new(shared.marks, PANEL));
        self.pool.each_with(parts, own, |panel, (x, marks), scratch| {
            let first = panel * PANEL;
            let labels = &self.labels[first..self.labels.len().min(first + PANEL)];
            let rows = View::rows(&self.x[first * self.pitch..], self.pitch);
            pack_bf16(Side::Rows, rows, labels.len(), hidden, x);
            let mut room = Room::new(scratch);
            let (tile, weights, packed) = (room.f32(TILE), room.bf16(steps * TILE), room.bf16(steps * TILE));
            let weights = &mut bytemuck::cast_slice_mut::<u16, T>(weights)[..labels.len() * hidden];
            for (weights, &label) in weights.chunks_exact_mut(hidden).zip(labels) {
                weights.copy_from_slice(&self.w[usize::try_from(label).unwrap_or(0) * hidden..][..hidden]);
            }
            pack_bf16(Side::Columns, View::rows(weights, hidden), labels.len(), hidden, packed);
            Tiles::ready().whole(x, packed, tile, false, &mut Nothing);
            for (row, mark) in marks.iter_mut().enumerate() {
                let trained = labels.get(row).is_some_and(|&label| label >= 0);
                let chosen = if trained { tile[row * PANEL + row] * LOG2_E } else { 0.0 };
                let live = if trained { u32::MAX } else { 0 };
                *mark = Mark { reference: chosen, chosen, live, sum: 0.0 };
            }
        });
    }

    /// The first pass, for the panels of rows that are open.
    fn powers(&self, shared: &mut Shared, gradients: bool, own: &mut [f32]) {
        let (HeadLossDims { hidden, vocab, .. }, panels) = (self.dims, self.panels);
        let Shared { exps, x, w: [columns_packed, terms_packed], sums, lanes, marks, open, .. } = shared;
        let (x, marks, open) = (&**x, &**marks, &**open);
        for first in (0..panels.vocab).step_by(panels.block) {
            let taken = panels.block.min(panels.vocab - first);
            let columns = (taken * PANEL).min(vocab - first * PANEL);
            let w = &self.w[first * PANEL * hidden..][..columns * hidden];
            let packed = &mut columns_packed[..taken * panels.hidden * TILE];
            self.pool.each(Chunks::new(packed, panels.hidden * TILE), |panel, out| {
                let lines = PANEL.min(columns - panel * PANEL);
                pack_bf16(
                    Side::Columns,
                    View::rows(&w[panel * PANEL * hidden..], hidden),
                    lines,
                    hidden,
                    out,
                );
            });
            let terms = &mut terms_packed[..taken * panels.hidden * TILE];
            if gradients {
                self.pool.each(Chunks::new(terms, 2 * taken * TILE), |pair, out| {
                    let column = 2 * pair * PANEL;
                    let (lines, w) = ((2 * PANEL).min(hidden - column), View::rows(&w[column..], hidden));
                    pack_bf16(Side::Columns, w.transposed(), lines, columns, out);
                });
            }
            let block = exps::Block { is_first: first == 0, columns, w: [&*packed, &*terms] };
            let exps = &mut exps[first * panels.rows * TILE..][..taken * panels.rows * TILE];
            let exps = gradients.then(|| Grid::new(exps, panels.rows * TILE, taken, TILE));
            let parts = (
                Optional::new(exps, panels.rows),
                Chunks::new(sums, panels.hidden * TILE),
                Chunks::new(lanes, PANEL * 2 * LANES),
            );
            self.pool.each_with(parts, own, |panel, (mut exps, sums, lanes), scratch| {
                if open[panel] == 1 {
                    let x = &x[panel * panels.hidden * TILE..][..panels.hidden * TILE];
                    let rows = exps::Rows { x, marks: &marks[panel * PANEL..][..PANEL], lanes };
                    exps::advance(&block, rows, exps.as_mut().map(|exps| (exps, sums)), scratch);
                }
            });
        }
    }

    /// Rounds the sums of dx, each row's share of the scale of it, less what its label takes away.
    fn finish_dx(&self, shared: &Shared, scale: f32, dx: &mut [T]) {
        let (hidden, panels, path) = (self.dims.hidden, self.panels.hidden, self.pool.isa());
        self.pool.each(Chunks::new(dx, self.pitch), |row, dx| {
            let dx = &mut dx[..hidden];
            let Ok(label) = usize::try_from(self.labels[row]) else { return dx.fill(T::default()) };
            let (w, total) = (&self.w[label * hidden..][..hidden], shared.marks[row].sum);
            let sums = &shared.sums[row / PANEL * panels * TILE..][..panels * TILE];
            let pieces = dx.chunks_mut(PANEL).zip(w.chunks(PANEL)).zip(sums.chunks_exact(TILE));
            for ((dx, w), sums) in pieces {
                take_away(path, &sums[row % PANEL * PANEL..][..dx.len()], w, total, scale / total, dx);
            }
        });
    }

    /// The second pass: dw.
    fn dw(&self, shared: &mut Shared, scale: f32, dw: &mut Weights<T>, own: &mut [f32]) {
        let (HeadLossDims { rows, hidden, vocab }, panels) = (self.dims, self.panels);
        let Shared { exps, x, terms, marks, .. } = shared;
        let scaled = &mut bytemuck::cast_slice_mut::<u16, T>(x)[..rows * hidden];
        self.pool.each(Chunks::new(scaled, hidden), |row, scaled| {
            if marks[row].live == 0 {
                return scaled.fill(T::default());
            }
            let x = &self.x[row * self.pitch..][..hidden];
            multiply(self.pool.isa(), x, scale / marks[row].sum, scaled);
        });
        let (exps, scaled, marks) = (&**exps, &*scaled, &**marks);
        self.pool.each(Chunks::new(terms, 2 * panels.rows * TILE), |pair, out| {
            let column = 2 * pair * PANEL;
            let view = View::rows(&scaled[column..], hidden).transposed();
            pack_bf16(Side::Rows, view, (2 * PANEL).min(hidden - column), rows, out);
        });
        let second = Second { slice: self, exps, terms, scaled, marks };
        let chunk_rows = panels.chunk() * PANEL;
        match dw {
            Weights::Wide { dw, add } => {
                self.pool.each_with(Chunks::new(dw, chunk_rows * hidden), own, |chunk, dw, scratch| {
                    second.chunk(chunk, dw, *add, scratch);
                });
                *add = true;
            }
            Weights::Rounded(rounded) => {
                let broken = rounded.broken;
                let bands = rounded.bands(0..vocab, chunk_rows, hidden);
                self.pool.each_with(bands, own, |chunk, band, scratch| {
                    let (scratch, sums) = scratch.split_at_mut(panels.thread());
                    let sums = Room::new(sums).f32(band.len());
                    second.chunk(chunk, sums, false, scratch);
                    if band.finish(self.pool.isa(), sums) {
                        broken.store(true, Ordering::Relaxed);
                    }
                });
            }
        }
    }
}

/// What the second pass reads.
struct Second<'a, T> {
    slice: &'a Slice<'a, T>,
    /// Columns and rows of its product.
    exps: &'a [u16],
    terms: &'a [u16],
    /// x over its totals, as it stands.
    scaled: &'a [T],
    marks: &'a [Mark],
}

impl<T: Element> Second<'_, T> {
    /// Writes a chunk of dw, or adds to it.
    fn chunk(&self, chunk: usize, dw: &mut [f32], add: bool, scratch: &mut [f32]) {
        let Self { slice, exps, terms, scaled, marks } = *self;
        let (hidden, panels) = (slice.dims.hidden, slice.panels);
        let first = chunk * panels.chunk();
        let taken = panels.chunk().min(panels.vocab - first);
        let exps = &exps[first * panels.rows * TILE..][..taken * panels.rows * TILE];
        dw::chunk(exps, terms, panels.rows, hidden, dw, add, scratch);
        let labels = first * PANEL..first * PANEL + dw.len() / hidden;
        for ((x, mark), &label) in scaled.chunks_exact(hidden).zip(marks).zip(slice.labels) {
            if let Ok(label) = usize::try_from(label)
                && labels.contains(&label)
            {
                // Of the rounded x: where a label is all but certain, nearly all of what it brought goes again.
                let dw = &mut dw[(label - labels.start) * hidden..][..hidden];
                subtract(slice.pool.isa(), x, mark.sum, dw);
            }
        }
    }
}

each_isa! {
    /// out = factor · (sums - total · w), rounded.
    fn take_away<T>(sums: &[f32], w: &[T], total: f32, factor: f32, out: &mut [T]) {
        for ((out, sum), w) in out.iter_mut().zip(sums).zip(w) {
            *out = T::from_f32(factor * (sum - total * w.to_f32()));
        }
    }
}

each_isa! {
    /// out = x · factor, rounded.
    fn multiply<T>(x: &[T], factor: f32, out: &mut [T]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = T::from_f32(x.to_f32() * factor);
        }
    }
}

each_isa! {
    /// out -= x · factor.
    fn subtract<T>(x: &[T], factor: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out -= x.to_f32() * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{head_loss_backward, head_loss_scratch, normal, reference};

    fn wide(values: &[bf16]) -> Vec<f64> {
        values.iter().map(|value| f64::from(value.to_f32())).collect()
    }

    fn distance(found: &[f64], expected: &[f64]) -> f64 {
        let off: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
        (off / expected.iter().map(|b| b * b).sum::<f64>()).sqrt()
    }

    const DIMS: HeadLossDims = HeadLossDims { rows: 70, hidden: 33, vocab: 1000 };

    /// Random x and w, but that x of some rows is `times` their label's w; the labels of all rows.
    fn numbers(pool: &Pool, rows: &[usize], times: f32) -> (Vec<bf16>, Vec<bf16>, Vec<i32>) {
        let (mut x, mut w) = (vec![bf16::ZERO; 70 * 33], vec![bf16::ZERO; 1000 * 33]);
        normal(pool, 1, 1, 0, 1.0, &mut x);
        normal(pool, 1, 2, 0, 1.0, &mut w);
        let labels: Vec<i32> = (0..70).map(|row| if row % 6 == 5 { -100 } else { row * 14 }).collect();
        for &row in rows {
            for column in 0..33 {
                let along = w[labels[row] as usize * 33 + column].to_f32();
                x[row * 33 + column] = bf16::from_f32(times * along);
            }
        }
        (x, w, labels)
    }

    /// The loss, and how far it and dx and dw are from the reference, of all of each.
    fn beside_reference(pool: &Pool, x: &[bf16], w: &[bf16], labels: &[i32]) -> (f64, [f64; 3]) {
        assert!(fit::<bf16>(pool.isa(), DIMS));
        let (expected, [expected_dx, expected_dw]) =
            reference::head_loss(DIMS, &wide(x), &wide(w), labels, 0.125);
        let mut scratch = vec![f32::NAN; head_loss_scratch(DIMS, 2)];
        let (mut dx, mut dw) = (vec![bf16::NAN; x.len()], vec![f32::NAN; w.len()]);
        let loss = head_loss_backward(pool, DIMS, x, w, labels, 0.125, &mut dx, &mut dw, false, &mut scratch);
        let dw: Vec<f64> = dw.into_iter().map(f64::from).collect();
        let of_loss = (loss - expected).abs() / expected;
        (expected, [of_loss, distance(&wide(&dx), &expected_dx), distance(&dw, &expected_dw)])
    }

    #[test]
    fn labels_far_below_the_largest_logit_have_their_loss_and_gradients() {
        let Some(pool) = Pool::on_isa(2, Isa::Amx) else { return };
        // Rows 3 and 40 point away from their own label.
        let (x, w, labels) = numbers(&pool, &[3, 40], -9.0);
        let alone: Vec<i32> =
            (0..70).map(|row| if [3, 40].contains(&row) { labels[row] } else { -100 }).collect();
        let (both, _) = reference::head_loss(DIMS, &wide(&x), &wide(&w), &alone, 0.125);
        assert!(both > 2.0 * 200.0, "{both}: the labels are not unlikely enough");
        let (_, [loss, dx, dw]) = beside_reference(&pool, &x, &w, &labels);
        assert!(loss < 1e-5 && dx < 4e-3 && dw < 4e-3, "{loss} {dx} {dw}");
    }

    #[test]
    fn labels_that_are_all_but_certain_have_small_gradients_all_the_same() {
        let Some(pool) = Pool::on_isa(2, Isa::Amx) else { return };
        // Every row points to its own label: what is left of the gradient is a thousandth of its parts.
        let rows: Vec<usize> = (0..70).filter(|row| row % 6 != 5).collect();
        let (x, w, labels) = numbers(&pool, &rows, 0.75);
        let (expected, [loss, dx, dw]) = beside_reference(&pool, &x, &w, &labels);
        assert!(expected < 59.0 * 0.02, "{expected}: the labels are not certain enough");
        assert!(loss < 1e-3 && dx < 1e-2 && dw < 1e-2, "{loss} {dx} {dw}");
    }
}
