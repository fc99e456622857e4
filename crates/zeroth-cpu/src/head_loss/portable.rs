//! The head on any instruction set. Logits of a vocabulary block exist for a band of rows at a time; kept are
//! e^(logit - block maximum) in the type of the gradient, and for each row the block's maximum and sum. Once all blocks of a
//! slice are known, each is turned into its gradient in range and consumed by dw and dx while it is in cache.

use std::sync::atomic::Ordering;

use half::bf16;

use super::rounded_grad::{Gradients, WeightGrad};
use crate::gemm::{self, MatrixView, gemm_row_bands, gemm_with};
use crate::isa::each_isa;
use crate::math;
use crate::pool::Pool;
use crate::work_partition::{Chunks, Optional};
use zeroth_kernel::Element;
use zeroth_kernel::HeadLossDims;

/// Vocabulary entries of a block.
const BLOCK: usize = 512;
/// Rows of a block's gradient per rounding task.
const BAND: usize = 64;

/// Statistics of a row in one block: maximum logit, sum of exponentials, and the label's logit if the block has it.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
struct RowStats {
    max: f32,
    sum: f32,
    label_logit: f32,
}

/// f32 elements of the exponentials, row statistics, factors and dx accumulators of a slice.
fn slice_scratch<E: Element>(dims: HeadLossDims) -> [usize; 4] {
    let rows = dims.slice_rows::<E>();
    [
        (rows * dims.vocab * size_of::<E>()).div_ceil(size_of::<f32>()),
        3 * rows * dims.vocab.div_ceil(BLOCK),
        rows,
        rows * dims.hidden,
    ]
}

/// f32 elements of scratch that [`run`] needs with a pool of `threads`; `rounds` for a rounded dw.
pub(super) fn scratch(dims: HeadLossDims, threads: usize, rounds: bool) -> usize {
    let HeadLossDims { hidden, vocab, .. } = dims;
    let (rows, block) = (dims.slice_rows::<bf16>(), BLOCK.min(vocab));
    let gemm = (threads * gemm::band_scratch(block, hidden))
        .max(gemm::scratch(rows, hidden, block, threads))
        .max(gemm::scratch(block, hidden, rows, threads));
    let slice = |parts: [usize; 4]| parts.iter().sum::<usize>();
    let rounded = if rounds { block * hidden } else { 0 };
    slice(slice_scratch::<bf16>(dims)).max(slice(slice_scratch::<f32>(dims))) + gemm + rounded
}

/// One slice of rows.
struct Slice<'a, T> {
    pool: &'a Pool,
    dims: HeadLossDims,
    x: &'a [T],
    /// Row stride of x and dx.
    row_stride: usize,
    w: &'a [T],
    labels: &'a [i32],
}

pub(super) fn run<T: Element, E: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    x: &[T],
    w: &[T],
    labels: &[i32],
    mut gradients: Option<Gradients<T>>,
    scratch: &mut [f32],
) -> f64 {
    let [exps, row_stats, factors, sums] = slice_scratch::<E>(dims);
    let (exps, scratch) = scratch.split_at_mut(exps);
    let (row_stats, scratch) = scratch.split_at_mut(row_stats);
    let (factors, scratch) = scratch.split_at_mut(factors);
    let (sums, scratch) = scratch.split_at_mut(sums);
    let (exps, row_stats) = (bytemuck::cast_slice_mut::<f32, E>(exps), bytemuck::cast_slice_mut(row_stats));
    let row_stride = dims.row_stride;
    let mut total = 0.0;
    for first in (0..dims.rows).step_by(dims.slice_rows::<E>().max(1)) {
        let rows = dims.slice_rows::<E>().min(dims.rows - first);
        let range = first * row_stride..(first + rows) * row_stride;
        let slice =
            Slice { pool, dims, x: &x[range.clone()], row_stride, w, labels: &labels[first..first + rows] };
        let exps = &mut exps[..rows * dims.vocab];
        let row_stats = &mut row_stats[..rows * dims.vocab.div_ceil(BLOCK)];
        let exps_parts = gradients.is_some().then(|| Chunks::new(exps, rows * BLOCK));
        let parts = (Optional::new(exps_parts, dims.vocab.div_ceil(BLOCK)), Chunks::new(row_stats, rows));
        pool.each_with(parts, scratch, |block, (mut exps, row_stats), scratch| {
            slice.block(block, row_stats, exps.as_deref_mut(), scratch);
        });
        for (row, factor) in factors[..rows].iter_mut().enumerate() {
            let (loss, max, sum) = slice.loss(row, row_stats);
            total += f64::from(loss);
            // The factor of a block is e^(block maximum - row maximum) times this one.
            *factor = gradients.as_ref().map_or(0.0, |gradients| gradients.scale) / sum;
            row_stats.iter_mut().skip(row).step_by(rows).for_each(|stats| stats.max -= max);
        }
        if let Some(Gradients { scale, dx, dw }) = &mut gradients {
            let dx = dx.as_deref_mut().map(|dx| &mut dx[range]);
            slice.gradients(exps, row_stats, factors, *scale, dx, dw.as_mut(), sums, scratch);
        }
    }
    total
}

impl<T: Element> Slice<'_, T> {
    /// Computes a block's logits and their row statistics, and keeps their exponentials in `exps`.
    fn block<E: Element>(
        &self,
        block: usize,
        row_stats: &mut [RowStats],
        mut exps: Option<&mut [E]>,
        scratch: &mut [f32],
    ) {
        let HeadLossDims { hidden, vocab, .. } = self.dims;
        let first = block * BLOCK;
        let columns = BLOCK.min(vocab - first);
        let x = MatrixView::row_major(self.x, self.row_stride);
        let w = MatrixView::row_major(&self.w[first * hidden..], hidden).transposed();
        let isa = self.pool.isa();
        let fma = math::has_fma(isa);
        gemm_row_bands(isa, [self.labels.len(), columns, hidden], x, w, scratch, |first_row, sums| {
            for (i, logits) in sums.chunks_exact_mut(columns).enumerate() {
                let row = first_row + i;
                let label = usize::try_from(self.labels[row]).ok().and_then(|label| label.checked_sub(first));
                let label_logit =
                    label.and_then(|label| logits.get(label)).copied().unwrap_or(f32::NEG_INFINITY);
                let exps = exps.as_deref_mut().map(|exps| &mut exps[row * columns..][..columns]);
                let (max, sum) = exponentiate(isa, fma, logits, exps);
                row_stats[row] = RowStats { max, sum, label_logit };
            }
        });
    }

    /// A row's loss, its maximum logit, and the sum of its exponentials relative to that.
    fn loss(&self, row: usize, row_stats: &[RowStats]) -> (f32, f32, f32) {
        let blocks = || row_stats.iter().skip(row).step_by(self.labels.len());
        let max_over_blocks =
            |value: fn(&RowStats) -> f32| blocks().map(value).fold(f32::NEG_INFINITY, f32::max);
        let (max, label_logit) =
            (max_over_blocks(|stats| stats.max), max_over_blocks(|stats| stats.label_logit));
        let sum: f32 = blocks().map(|stats| stats.sum * math::exp(stats.max - max)).sum();
        let loss = if self.labels[row] < 0 { 0.0 } else { sum.ln() - (label_logit - max) };
        (loss, max, sum)
    }

    /// Turns exponentials into gradients of logits, block by block, and multiplies them into dw and dx.
    fn gradients<E: Element>(
        &self,
        exps: &mut [E],
        row_stats: &[RowStats],
        factors: &[f32],
        scale: f32,
        dx: Option<&mut [T]>,
        mut dw: Option<&mut WeightGrad<T>>,
        sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let HeadLossDims { hidden, .. } = self.dims;
        let (pool, rows) = (self.pool, self.labels.len());
        let sums = &mut sums[..rows * hidden];
        sums.fill(0.0);
        let blocks = exps.chunks_mut(rows * BLOCK).zip(row_stats.chunks_exact(rows)).enumerate();
        for ((block, (exps, row_stats)), w) in blocks.zip(self.w.chunks(BLOCK * hidden)) {
            let columns = exps.len() / rows;
            pool.each(Chunks::new(exps, columns), |row, exps| {
                if self.labels[row] < 0 {
                    return exps.fill(E::default());
                }
                let factor = factors[row] * math::exp(row_stats[row].max);
                let label =
                    usize::try_from(self.labels[row]).ok().and_then(|label| label.checked_sub(block * BLOCK));
                let label_logit =
                    label.and_then(|label| exps.get(label)).map(|exp| exp.to_f32() * factor - scale);
                multiply(pool.isa(), exps, factor);
                if let (Some(label), Some(label_logit)) = (label, label_logit) {
                    exps[label] = E::from_f32(label_logit);
                }
            });
            let grads = MatrixView::row_major(&*exps, columns);
            match &mut dw {
                None => {}
                Some(WeightGrad::F32 { dw, add }) => {
                    self.block_dw(grads, &mut dw[block * BLOCK * hidden..][..w.len()], *add, scratch);
                }
                Some(WeightGrad::Rounded(rounded)) => {
                    let (sums, scratch) = scratch.split_at_mut(w.len());
                    self.block_dw(grads, sums, false, scratch);
                    let (first, found_inf) = (block * BLOCK, rounded.found_inf);
                    let bands = rounded.bands(first..first + columns, BAND, hidden);
                    pool.each(bands, |band, rows| {
                        let sums = &sums[band * BAND * hidden..][..rows.len()];
                        if rows.finish(pool.isa(), sums) {
                            found_inf.store(true, Ordering::Relaxed);
                        }
                    });
                }
            }
            if dx.is_none() {
                continue;
            }
            gemm_with(
                pool,
                [rows, hidden, columns],
                grads,
                MatrixView::row_major(w, hidden),
                sums,
                scratch,
                |_, sums, dx| {
                    for (dx, sum) in dx.iter_mut().zip(sums) {
                        *dx += sum;
                    }
                },
            );
        }
        if let Some(WeightGrad::F32 { add, .. }) = dw {
            *add = true;
        }
        if let Some(dx) = dx {
            pool.each((Chunks::new(dx, self.row_stride), Chunks::new(sums, hidden)), |_, (dx, sums)| {
                round(pool.isa(), sums, &mut dx[..hidden]);
            });
        }
    }

    /// Computes a block's dw; with `add` accumulates.
    fn block_dw<E: Element>(&self, grads: MatrixView<E>, dw: &mut [f32], add: bool, scratch: &mut [f32]) {
        let (hidden, rows) = (self.dims.hidden, self.labels.len());
        let (shape, x) = ([dw.len() / hidden, hidden, rows], MatrixView::row_major(self.x, self.row_stride));
        gemm_with(self.pool, shape, grads.transposed(), x, dw, scratch, |_, sums, dw| {
            for (dw, sum) in dw.iter_mut().zip(sums) {
                *dw = if add { *dw } else { 0.0 } + sum;
            }
        });
    }
}

each_isa! {
    /// Stores e^(logit - maximum) to `exps`, if given; returns the maximum and the sum.
    fn exponentiate<E>(fma: bool, logits: &mut [f32], exps: Option<&mut [E]>) -> (f32, f32) {
        if fma {
            exponentiate_with::<E, true>(logits, exps)
        } else {
            exponentiate_with::<E, false>(logits, exps)
        }
    }
}

#[inline(always)]
fn exponentiate_with<E: Element, const FMA: bool>(logits: &mut [f32], exps: Option<&mut [E]>) -> (f32, f32) {
    let max = math::max_of(logits);
    for logit in logits.iter_mut() {
        *logit = math::exp2::<FMA>((*logit - max) * std::f32::consts::LOG2_E);
    }
    if let Some(exps) = exps {
        for (exp, &logit) in exps.iter_mut().zip(&*logits) {
            *exp = E::from_f32(logit);
        }
    }
    (max, math::sum_of(logits, |exp| exp))
}

each_isa! {
    fn multiply<E>(values: &mut [E], factor: f32) {
        for value in values {
            *value = E::from_f32(value.to_f32() * factor);
        }
    }
}

each_isa! {
    fn round<E>(values: &[f32], out: &mut [E]) {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = E::from_f32(value);
        }
    }
}
