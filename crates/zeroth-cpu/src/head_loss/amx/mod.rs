//! The head on AMX, for bf16: two passes over the vocabulary.
//!
//! The first pass computes logits and, interleaved with the next ones, their exponentials relative to the logit of the row's
//! label, rounded to bf16 once. Each panel of rows multiplies them by w into the accumulators of dx at once, and keeps them
//! packed for the second pass, which computes dw. Rows are divided by their sums where that is cheapest: dx after the whole
//! vocabulary, and x before the second pass multiplies it by the exponentials. The label's own term is subtracted in f32.
//!
//! If a label is so unlikely that exponentials could overflow, its panel repeats the first pass relative to the largest logit.
//!
//! Every element is one sum over the vocabulary, or over rows, in tile steps of 32: blocking does not change it.
#![allow(unsafe_code, reason = "vector instructions take pointers, and are for machines that have them")]

mod dw;
mod exps;

use std::f32::consts::{LN_2, LOG2_E};
use std::sync::atomic::Ordering;

use half::bf16;
use zeroth_base::DType;

use super::blocking::{LANES, Panels, ROW_STATS_LEN};
use super::rounded_grad::{Gradients, WeightGrad};
use crate::gemm::{AmxKernel, MatrixView, NoInterleave, Operand, PANEL, TILE, pack_bf16};
use crate::isa::{Isa, each_isa};
use crate::math;
use crate::pool::Pool;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{Chunks, Grid, Optional};
use zeroth_kernel::Element;
use zeroth_kernel::HeadLossDims;

/// Largest exponent of 2 relative to the reference: sums of exponentials, and their products with bf16, stay finite.
const MAX_EXPONENT: f32 = 64.0;

/// Statistics of a row.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
struct RowStats {
    /// Reference of its exponentials, as an exponent of 2.
    reference: f32,
    /// Logit of its label, as an exponent of 2.
    label_logit: f32,
    /// All bits set if the row is trained, else 0.
    trained_mask: u32,
    /// Sum of its exponentials.
    sum: f32,
}

const _: () = assert!(size_of::<RowStats>() == ROW_STATS_LEN * size_of::<f32>());

/// Whether AMX runs a head of this type and size on this instruction set.
pub(super) fn supports<T: Element>(isa: Isa, dims: HeadLossDims) -> bool {
    isa == Isa::Amx && T::DTYPE == DType::Bf16 && Panels::of(dims).is_some()
}

/// One slice of rows.
struct Slice<'a, T> {
    pool: &'a Pool,
    dims: HeadLossDims,
    panels: Panels,
    x: &'a [T],
    /// Row stride of x and dx.
    row_stride: usize,
    w: &'a [T],
    labels: &'a [i32],
}

/// Buffers of a slice that all threads share.
struct Shared<'a> {
    /// B operand of dw: [panels of vocabulary, tile steps of rows].
    exps: &'a mut [u16],
    /// A operand of logits: x as [panels of rows, tile steps of hidden]. Later x over its row sums, unpacked.
    x: &'a mut [u16],
    /// A operand of dw: x over its row sums as [panels of hidden, tile steps of rows].
    x_transposed: &'a mut [u16],
    /// A block of w as B operand of logits, [panels of the block, tile steps of hidden], and of dx, [panels of hidden, tile steps
    /// of the block].
    w: [&'a mut [u16]; 2],
    /// Accumulators of dx: [panels of rows, panels of hidden, 32, 32].
    sums: &'a mut [f32],
    /// For each row, 16 lanes of its sum and 16 of its largest exponent.
    lanes: &'a mut [f32],
    row_stats: &'a mut [RowStats],
    /// For each panel of rows, 1 if the first pass has to process it.
    pending: &'a mut [u32],
}

impl<'a> Shared<'a> {
    fn new(panels: Panels, scratch: &'a mut [f32]) -> Self {
        let Panels { rows, hidden, vocab, block } = panels;
        let mut scratch = ScratchSplitter::new(scratch);
        Self {
            exps: scratch.bf16(rows * vocab * TILE),
            x: scratch.bf16(rows * hidden * TILE),
            x_transposed: scratch.bf16(rows * hidden * TILE),
            w: [0; 2].map(|_| scratch.bf16(block * hidden * TILE)),
            sums: scratch.f32(rows * hidden * TILE),
            lanes: scratch.f32(rows * PANEL * 2 * LANES),
            row_stats: bytemuck::cast_slice_mut(scratch.f32(rows * PANEL * ROW_STATS_LEN)),
            pending: bytemuck::cast_slice_mut(scratch.f32(rows)),
        }
    }

    /// Reduces the lanes of each row. Panels with a row whose exponents exceed the limit stay pending, with a new reference for
    /// that row.
    fn reduce_lanes(&mut self) {
        let row_stats =
            self.row_stats.chunks_exact_mut(PANEL).zip(self.lanes.chunks_exact(PANEL * 2 * LANES));
        for ((row_stats, lanes), pending) in row_stats.zip(&mut *self.pending) {
            if *pending == 0 {
                continue;
            }
            *pending = 0;
            for (stats, lanes) in row_stats.iter_mut().zip(lanes.chunks_exact(2 * LANES)) {
                stats.sum = math::sum_of(&lanes[..LANES], |lane| lane);
                let max = math::max_of(&lanes[LANES..]);
                if stats.trained_mask != 0 && max > MAX_EXPONENT {
                    stats.reference += max;
                    *pending = 1;
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
    let row_stride = dims.row_stride;
    let mut total = 0.0;
    let all_panels = Panels::of(dims).expect("checked by `supports`");
    let (shared, thread_scratch) = scratch.split_at_mut(all_panels.shared());
    for first in (0..dims.rows).step_by(dims.slice_rows::<bf16>().max(1)) {
        let rows = dims.slice_rows::<bf16>().min(dims.rows - first);
        let range = first * row_stride..(first + rows) * row_stride;
        let labels = &labels[first..first + rows];
        let panels = Panels { rows: rows.div_ceil(PANEL), ..all_panels };
        let dims = HeadLossDims { rows, ..dims };
        let slice = Slice { pool, dims, panels, x: &x[range.clone()], row_stride, w, labels };
        let mut shared = Shared::new(panels, shared);
        let kept = match &gradients {
            None => Kept::Nothing,
            Some(Gradients { dx: None, .. }) => Kept::Exps,
            Some(_) => Kept::ExpsAndDx,
        };
        total += slice.losses(&mut shared, kept, thread_scratch);
        if let Some(Gradients { scale, dx, dw }) = &mut gradients {
            if let Some(dx) = dx {
                slice.finish_dx(&shared, *scale, &mut dx[range]);
            }
            if let Some(dw) = dw {
                slice.dw(&mut shared, *scale, dw, thread_scratch);
            }
        }
    }
    total
}

/// What the first pass leaves for gradients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    Nothing,
    /// The exponentials, for dw.
    Exps,
    /// The exponentials and the undivided accumulators of dx.
    ExpsAndDx,
}

impl<T: Element> Slice<'_, T> {
    /// The sum of the losses.
    fn losses(&self, shared: &mut Shared, kept: Kept, thread_scratch: &mut [f32]) -> f64 {
        self.pack_x_and_label_logits(shared, thread_scratch);
        shared.pending.fill(1);
        self.first_pass(shared, kept, thread_scratch);
        shared.reduce_lanes();
        if shared.pending.contains(&1) {
            self.first_pass(shared, kept, thread_scratch);
            shared.reduce_lanes();
        }
        let mut total = 0.0;
        for (stats, _) in shared.row_stats.iter().zip(self.labels).filter(|(_, label)| **label >= 0) {
            total += f64::from(stats.sum.ln() - (stats.label_logit - stats.reference) * LN_2);
        }
        total
    }

    /// Packs x, and computes the logit of each row's label with the bits of the full logits.
    fn pack_x_and_label_logits(&self, shared: &mut Shared, thread_scratch: &mut [f32]) {
        let (hidden, steps) = (self.dims.hidden, self.panels.hidden);
        let parts = (Chunks::new(shared.x, steps * TILE), Chunks::new(shared.row_stats, PANEL));
        self.pool.each_with(parts, thread_scratch, |panel, (x, row_stats), scratch| {
            let first = panel * PANEL;
            let labels = &self.labels[first..self.labels.len().min(first + PANEL)];
            let rows = MatrixView::row_major(&self.x[first * self.row_stride..], self.row_stride);
            pack_bf16(Operand::A, rows, labels.len(), hidden, x);
            let mut scratch = ScratchSplitter::new(scratch);
            let (tile, weights, packed) =
                (scratch.f32(TILE), scratch.bf16(steps * TILE), scratch.bf16(steps * TILE));
            let weights = &mut bytemuck::cast_slice_mut::<u16, T>(weights)[..labels.len() * hidden];
            for (weights, &label) in weights.chunks_exact_mut(hidden).zip(labels) {
                weights.copy_from_slice(&self.w[usize::try_from(label).unwrap_or(0) * hidden..][..hidden]);
            }
            pack_bf16(Operand::B, MatrixView::row_major(weights, hidden), labels.len(), hidden, packed);
            AmxKernel::configured().matmul_panels(x, packed, tile, false, &mut NoInterleave);
            for (row, stats) in row_stats.iter_mut().enumerate() {
                let trained = labels.get(row).is_some_and(|&label| label >= 0);
                let label_logit = if trained { tile[row * PANEL + row] * LOG2_E } else { 0.0 };
                let trained_mask = if trained { u32::MAX } else { 0 };
                *stats = RowStats { reference: label_logit, label_logit, trained_mask, sum: 0.0 };
            }
        });
    }

    /// The first pass, for the pending panels of rows.
    fn first_pass(&self, shared: &mut Shared, kept: Kept, thread_scratch: &mut [f32]) {
        let (HeadLossDims { hidden, vocab, .. }, panels) = (self.dims, self.panels);
        let Shared { exps, x, w: [w_logits, w_dx], sums, lanes, row_stats, pending, .. } = shared;
        let (x, row_stats, pending) = (&**x, &**row_stats, &**pending);
        for first in (0..panels.vocab).step_by(panels.block) {
            let count = panels.block.min(panels.vocab - first);
            let columns = (count * PANEL).min(vocab - first * PANEL);
            let w = &self.w[first * PANEL * hidden..][..columns * hidden];
            let packed = &mut w_logits[..count * panels.hidden * TILE];
            self.pool.each(Chunks::new(packed, panels.hidden * TILE), |panel, out| {
                let lines = PANEL.min(columns - panel * PANEL);
                pack_bf16(
                    Operand::B,
                    MatrixView::row_major(&w[panel * PANEL * hidden..], hidden),
                    lines,
                    hidden,
                    out,
                );
            });
            let packed_dx = &mut w_dx[..count * panels.hidden * TILE];
            if kept == Kept::ExpsAndDx {
                self.pool.each(Chunks::new(packed_dx, 2 * count * TILE), |pair, out| {
                    let column = 2 * pair * PANEL;
                    let (lines, w) =
                        ((2 * PANEL).min(hidden - column), MatrixView::row_major(&w[column..], hidden));
                    pack_bf16(Operand::B, w.transposed(), lines, columns, out);
                });
            }
            let block = exps::Block { is_first: first == 0, columns, w: [&*packed, &*packed_dx] };
            let exps = &mut exps[first * panels.rows * TILE..][..count * panels.rows * TILE];
            let exps = (kept != Kept::Nothing).then(|| Grid::new(exps, panels.rows * TILE, count, TILE));
            let parts = (
                Optional::new(exps, panels.rows),
                Chunks::new(sums, panels.hidden * TILE),
                Chunks::new(lanes, PANEL * 2 * LANES),
            );
            self.pool.each_with(parts, thread_scratch, |panel, (mut exps, sums, lanes), scratch| {
                if pending[panel] == 1 {
                    let x = &x[panel * panels.hidden * TILE..][..panels.hidden * TILE];
                    let rows = exps::Rows { x, row_stats: &row_stats[panel * PANEL..][..PANEL], lanes };
                    let sums = if kept == Kept::ExpsAndDx { sums } else { &mut [] };
                    exps::advance(&block, rows, exps.as_mut().map(|exps| (exps, sums)), scratch);
                }
            });
        }
    }

    /// Scales the accumulators of dx, subtracts the label's row of w, and rounds.
    fn finish_dx(&self, shared: &Shared, scale: f32, dx: &mut [T]) {
        let (hidden, panels, isa) = (self.dims.hidden, self.panels.hidden, self.pool.isa());
        self.pool.each(Chunks::new(dx, self.row_stride), |row, dx| {
            let dx = &mut dx[..hidden];
            let Ok(label) = usize::try_from(self.labels[row]) else { return dx.fill(T::default()) };
            let (w, total) = (&self.w[label * hidden..][..hidden], shared.row_stats[row].sum);
            let sums = &shared.sums[row / PANEL * panels * TILE..][..panels * TILE];
            let tiles = dx.chunks_mut(PANEL).zip(w.chunks(PANEL)).zip(sums.chunks_exact(TILE));
            for ((dx, w), sums) in tiles {
                subtract_label(isa, &sums[row % PANEL * PANEL..][..dx.len()], w, total, scale / total, dx);
            }
        });
    }

    /// The second pass: dw.
    fn dw(&self, shared: &mut Shared, scale: f32, dw: &mut WeightGrad<T>, thread_scratch: &mut [f32]) {
        let (HeadLossDims { rows, hidden, vocab, .. }, panels) = (self.dims, self.panels);
        let Shared { exps, x, x_transposed, row_stats, .. } = shared;
        let scaled = &mut bytemuck::cast_slice_mut::<u16, T>(x)[..rows * hidden];
        self.pool.each(Chunks::new(scaled, hidden), |row, scaled| {
            if row_stats[row].trained_mask == 0 {
                return scaled.fill(T::default());
            }
            let x = &self.x[row * self.row_stride..][..hidden];
            multiply(self.pool.isa(), x, scale / row_stats[row].sum, scaled);
        });
        let (exps, scaled, row_stats) = (&**exps, &*scaled, &**row_stats);
        self.pool.each(Chunks::new(x_transposed, 2 * panels.rows * TILE), |pair, out| {
            let column = 2 * pair * PANEL;
            let view = MatrixView::row_major(&scaled[column..], hidden).transposed();
            pack_bf16(Operand::A, view, (2 * PANEL).min(hidden - column), rows, out);
        });
        let pass = DwPass { slice: self, exps, x_transposed, scaled, row_stats };
        let chunk_rows = panels.chunk() * PANEL;
        match dw {
            WeightGrad::F32 { dw, add } => {
                self.pool.each_with(
                    Chunks::new(dw, chunk_rows * hidden),
                    thread_scratch,
                    |chunk, dw, scratch| {
                        pass.chunk(chunk, dw, *add, scratch);
                    },
                );
                *add = true;
            }
            WeightGrad::Rounded(rounded) => {
                let found_inf = rounded.found_inf;
                let bands = rounded.bands(0..vocab, chunk_rows, hidden);
                self.pool.each_with(bands, thread_scratch, |chunk, band, scratch| {
                    let (scratch, sums) = scratch.split_at_mut(panels.thread());
                    let sums = ScratchSplitter::new(sums).f32(band.len());
                    pass.chunk(chunk, sums, false, scratch);
                    if band.finish(self.pool.isa(), sums) {
                        found_inf.store(true, Ordering::Relaxed);
                    }
                });
            }
        }
    }
}

/// Inputs of the second pass.
struct DwPass<'a, T> {
    slice: &'a Slice<'a, T>,
    /// Packed B and A operands.
    exps: &'a [u16],
    x_transposed: &'a [u16],
    /// x over its row sums, unpacked.
    scaled: &'a [T],
    row_stats: &'a [RowStats],
}

impl<T: Element> DwPass<'_, T> {
    /// Computes a chunk of dw; with `add` accumulates.
    fn chunk(&self, chunk: usize, dw: &mut [f32], add: bool, scratch: &mut [f32]) {
        let Self { slice, exps, x_transposed, scaled, row_stats } = *self;
        let (hidden, panels) = (slice.dims.hidden, slice.panels);
        let first = chunk * panels.chunk();
        let count = panels.chunk().min(panels.vocab - first);
        let exps = &exps[first * panels.rows * TILE..][..count * panels.rows * TILE];
        dw::chunk(exps, x_transposed, panels.rows, hidden, dw, add, scratch);
        let labels = first * PANEL..first * PANEL + dw.len() / hidden;
        for ((x, stats), &label) in scaled.chunks_exact(hidden).zip(row_stats).zip(slice.labels) {
            if let Ok(label) = usize::try_from(label)
                && labels.contains(&label)
            {
                // From the rounded x: where a label is almost certain, this cancels nearly all of the label's own contribution.
                let dw = &mut dw[(label - labels.start) * hidden..][..hidden];
                subtract(slice.pool.isa(), x, stats.sum, dw);
            }
        }
    }
}

each_isa! {
    /// out = factor · (sums - total · w), rounded.
    fn subtract_label<T>(sums: &[f32], w: &[T], total: f32, factor: f32, out: &mut [T]) {
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

    const DIMS: HeadLossDims = HeadLossDims::new(70, 33, 1000);

    /// Random x and w, with x of some rows set to `times` the w of their label; the labels of all rows.
    fn inputs(pool: &Pool, rows: &[usize], times: f32) -> (Vec<bf16>, Vec<bf16>, Vec<i32>) {
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

    /// The loss, and the relative errors of the loss, dx and dw.
    fn compare_with_reference(pool: &Pool, x: &[bf16], w: &[bf16], labels: &[i32]) -> (f64, [f64; 3]) {
        assert!(supports::<bf16>(pool.isa(), DIMS));
        let (expected, [expected_dx, expected_dw]) =
            reference::head_loss(DIMS, &wide(x), &wide(w), labels, 0.125);
        let mut scratch = vec![f32::NAN; head_loss_scratch(DIMS, 2)];
        let (mut dx, mut dw) = (vec![bf16::NAN; x.len()], vec![f32::NAN; w.len()]);
        let grads = (Some(&mut dx[..]), Some(&mut dw[..]));
        let loss = head_loss_backward(pool, DIMS, x, w, labels, 0.125, grads.0, grads.1, false, &mut scratch);
        let dw: Vec<f64> = dw.into_iter().map(f64::from).collect();
        let of_loss = (loss - expected).abs() / expected;
        (expected, [of_loss, distance(&wide(&dx), &expected_dx), distance(&dw, &expected_dw)])
    }

    #[test]
    fn unlikely_labels_have_accurate_loss_and_gradients() {
        let Some(pool) = Pool::on_isa(2, Isa::Amx) else { return };
        // Rows 3 and 40 point away from their label.
        let (x, w, labels) = inputs(&pool, &[3, 40], -9.0);
        let alone: Vec<i32> =
            (0..70).map(|row| if [3, 40].contains(&row) { labels[row] } else { -100 }).collect();
        let (both, _) = reference::head_loss(DIMS, &wide(&x), &wide(&w), &alone, 0.125);
        assert!(both > 2.0 * 200.0, "{both}: the labels are not unlikely enough");
        let (_, [loss, dx, dw]) = compare_with_reference(&pool, &x, &w, &labels);
        assert!(loss < 1e-5 && dx < 4e-3 && dw < 4e-3, "{loss} {dx} {dw}");
    }

    #[test]
    fn nearly_certain_labels_have_accurate_small_gradients() {
        let Some(pool) = Pool::on_isa(2, Isa::Amx) else { return };
        // Every row points to its label: the gradient is a thousandth of its x_transposed.
        let rows: Vec<usize> = (0..70).filter(|row| row % 6 != 5).collect();
        let (x, w, labels) = inputs(&pool, &rows, 0.75);
        let (expected, [loss, dx, dw]) = compare_with_reference(&pool, &x, &w, &labels);
        assert!(expected < 59.0 * 0.02, "{expected}: the labels are not certain enough");
        assert!(loss < 1e-3 && dx < 1e-2 && dw < 1e-2, "{loss} {dx} {dw}");
    }
}
