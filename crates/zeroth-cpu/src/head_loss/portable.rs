//! The head on every path: a block's logits live for a band of rows at a time; what is kept of them is e^(logit - the block's
//! largest) in the type of the gradient, and for each row the block's largest and the sum. When all blocks of a slice are
//! known, each becomes its own gradient in place and is used up, by dw and by dx, while it is in the cache.

use std::sync::atomic::Ordering;

use half::bf16;

use super::{Gradients, Weights, x_pitch};
use crate::gemm::{self, View, in_bands, matmul};
use crate::isa::each_isa;
use crate::math;
use crate::pool::Pool;
use crate::work_partition::{Chunks, Optional};
use zeroth_kernel::Element;
use zeroth_kernel::HeadLossDims;

/// Tokens of the vocabulary of a block.
const BLOCK: usize = 512;
/// Rows of a block's gradient that one task rounds.
const BAND: usize = 64;

/// What a block knows of a row: its largest logit, the sum of its exponentials, and the label's logit if it has it.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
struct Mark {
    peak: f32,
    sum: f32,
    chosen: f32,
}

/// f32 elements of the exponentials, the marks, the factors and the sums of dx of a slice.
fn slice_scratch<E: Element>(dims: HeadLossDims) -> [usize; 4] {
    let rows = dims.slice_rows::<E>();
    [
        (rows * dims.vocab * size_of::<E>()).div_ceil(size_of::<f32>()),
        3 * rows * dims.vocab.div_ceil(BLOCK),
        rows,
        rows * dims.hidden,
    ]
}

/// f32 elements of scratch that [`run`] needs with a pool of `threads`, for a gradient of w that is rounded or not.
pub(super) fn scratch(dims: HeadLossDims, threads: usize, rounds: bool) -> usize {
    let HeadLossDims { hidden, vocab, .. } = dims;
    let (rows, block) = (dims.slice_rows::<bf16>(), BLOCK.min(vocab));
    let product = (threads * gemm::band_scratch(block, hidden))
        .max(gemm::scratch(rows, hidden, block, threads))
        .max(gemm::scratch(block, hidden, rows, threads));
    let slice = |parts: [usize; 4]| parts.iter().sum::<usize>();
    let rounded = if rounds { block * hidden } else { 0 };
    slice(slice_scratch::<bf16>(dims)).max(slice(slice_scratch::<f32>(dims))) + product + rounded
}

/// The rows of one slice.
struct Slice<'a, T> {
    pool: &'a Pool,
    dims: HeadLossDims,
    x: &'a [T],
    /// Elements from one row of x, and of dx, to the next.
    pitch: usize,
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
    let [exps, marks, factors, sums] = slice_scratch::<E>(dims);
    let (exps, scratch) = scratch.split_at_mut(exps);
    let (marks, scratch) = scratch.split_at_mut(marks);
    let (factors, scratch) = scratch.split_at_mut(factors);
    let (sums, scratch) = scratch.split_at_mut(sums);
    let (exps, marks) = (bytemuck::cast_slice_mut::<f32, E>(exps), bytemuck::cast_slice_mut(marks));
    let pitch = x_pitch(dims, x);
    let mut total = 0.0;
    for first in (0..dims.rows).step_by(dims.slice_rows::<E>().max(1)) {
        let rows = dims.slice_rows::<E>().min(dims.rows - first);
        let place = first * pitch..(first + rows) * pitch;
        let slice =
            Slice { pool, dims, x: &x[place.clone()], pitch, w, labels: &labels[first..first + rows] };
        let exps = &mut exps[..rows * dims.vocab];
        let marks = &mut marks[..rows * dims.vocab.div_ceil(BLOCK)];
        let exps_parts = gradients.is_some().then(|| Chunks::new(exps, rows * BLOCK));
        let parts = (Optional::new(exps_parts, dims.vocab.div_ceil(BLOCK)), Chunks::new(marks, rows));
        pool.each_with(parts, scratch, |block, (mut exps, marks), scratch| {
            slice.block(block, marks, exps.as_deref_mut(), scratch);
        });
        for (row, factor) in factors[..rows].iter_mut().enumerate() {
            let (loss, peak, sum) = slice.loss(row, marks);
            total += f64::from(loss);
            // A block's own factor is e^(its peak - the row's) times this one.
            *factor = gradients.as_ref().map_or(0.0, |gradients| gradients.scale) / sum;
            marks.iter_mut().skip(row).step_by(rows).for_each(|mark| mark.peak -= peak);
        }
        if let Some(Gradients { scale, dx, dw }) = &mut gradients {
            slice.gradients(exps, marks, factors, *scale, &mut dx[place], dw, sums, scratch);
        }
    }
    total
}

impl<T: Element> Slice<'_, T> {
    /// Computes a block's logits, marks what they were, and keeps their exponentials where there is room for them.
    fn block<E: Element>(
        &self,
        block: usize,
        marks: &mut [Mark],
        mut exps: Option<&mut [E]>,
        scratch: &mut [f32],
    ) {
        let HeadLossDims { hidden, vocab, .. } = self.dims;
        let first = block * BLOCK;
        let columns = BLOCK.min(vocab - first);
        let x = View::rows(self.x, self.pitch);
        let w = View::rows(&self.w[first * hidden..], hidden).transposed();
        let path = self.pool.isa();
        let fused = math::has_fused(path);
        in_bands(path, [self.labels.len(), columns, hidden], x, w, scratch, |first_row, sums| {
            for (i, logits) in sums.chunks_exact_mut(columns).enumerate() {
                let row = first_row + i;
                let label = usize::try_from(self.labels[row]).ok().and_then(|label| label.checked_sub(first));
                let chosen = label.and_then(|label| logits.get(label)).copied().unwrap_or(f32::NEG_INFINITY);
                let exps = exps.as_deref_mut().map(|exps| &mut exps[row * columns..][..columns]);
                let (peak, sum) = exponentiate(path, fused, logits, exps);
                marks[row] = Mark { peak, sum, chosen };
            }
        });
    }

    /// A row's loss, its largest logit, and the sum of its exponentials relative to that.
    fn loss(&self, row: usize, marks: &[Mark]) -> (f32, f32, f32) {
        let blocks = || marks.iter().skip(row).step_by(self.labels.len());
        let largest = |value: fn(&Mark) -> f32| blocks().map(value).fold(f32::NEG_INFINITY, f32::max);
        let (peak, chosen) = (largest(|mark| mark.peak), largest(|mark| mark.chosen));
        let sum: f32 = blocks().map(|mark| mark.sum * math::exp(mark.peak - peak)).sum();
        let loss = if self.labels[row] < 0 { 0.0 } else { sum.ln() - (chosen - peak) };
        (loss, peak, sum)
    }

    /// Turns exponentials into gradients of logits, block by block, and uses them up.
    fn gradients<E: Element>(
        &self,
        exps: &mut [E],
        marks: &[Mark],
        factors: &[f32],
        weight: f32,
        dx: &mut [T],
        dw: &mut Weights<T>,
        sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let HeadLossDims { hidden, .. } = self.dims;
        let (pool, rows) = (self.pool, self.labels.len());
        let sums = &mut sums[..rows * hidden];
        sums.fill(0.0);
        let blocks = exps.chunks_mut(rows * BLOCK).zip(marks.chunks_exact(rows)).enumerate();
        for ((block, (exps, marks)), w) in blocks.zip(self.w.chunks(BLOCK * hidden)) {
            let columns = exps.len() / rows;
            pool.each(Chunks::new(exps, columns), |row, exps| {
                if self.labels[row] < 0 {
                    return exps.fill(E::default());
                }
                let factor = factors[row] * math::exp(marks[row].peak);
                let label =
                    usize::try_from(self.labels[row]).ok().and_then(|label| label.checked_sub(block * BLOCK));
                let chosen =
                    label.and_then(|label| exps.get(label)).map(|exp| exp.to_f32() * factor - weight);
                multiply(pool.isa(), exps, factor);
                if let (Some(label), Some(chosen)) = (label, chosen) {
                    exps[label] = E::from_f32(chosen);
                }
            });
            let grads = View::rows(&*exps, columns);
            match dw {
                Weights::Wide { dw, add } => {
                    self.weights(grads, &mut dw[block * BLOCK * hidden..][..w.len()], *add, scratch);
                }
                Weights::Rounded(rounded) => {
                    let (sums, scratch) = scratch.split_at_mut(w.len());
                    self.weights(grads, sums, false, scratch);
                    let (first, broken) = (block * BLOCK, rounded.broken);
                    let bands = rounded.bands(first..first + columns, BAND, hidden);
                    pool.each(bands, |band, rows| {
                        let sums = &sums[band * BAND * hidden..][..rows.len()];
                        if rows.finish(pool.isa(), sums) {
                            broken.store(true, Ordering::Relaxed);
                        }
                    });
                }
            }
            matmul(
                pool,
                [rows, hidden, columns],
                grads,
                View::rows(w, hidden),
                sums,
                scratch,
                |_, sums, dx| {
                    for (dx, sum) in dx.iter_mut().zip(sums) {
                        *dx += sum;
                    }
                },
            );
        }
        if let Weights::Wide { add, .. } = dw {
            *add = true;
        }
        pool.each((Chunks::new(dx, self.pitch), Chunks::new(sums, hidden)), |_, (dx, sums)| {
            round(pool.isa(), sums, &mut dx[..hidden]);
        });
    }

    /// Writes a block's dw, or adds to it.
    fn weights<E: Element>(&self, grads: View<E>, dw: &mut [f32], add: bool, scratch: &mut [f32]) {
        let (hidden, rows) = (self.dims.hidden, self.labels.len());
        let (sizes, x) = ([dw.len() / hidden, hidden, rows], View::rows(self.x, self.pitch));
        matmul(self.pool, sizes, grads.transposed(), x, dw, scratch, |_, sums, dw| {
            for (dw, sum) in dw.iter_mut().zip(sums) {
                *dw = if add { *dw } else { 0.0 } + sum;
            }
        });
    }
}

each_isa! {
    /// Writes e^(logit - the largest) to `exps`, or nowhere; returns the largest and the sum.
    fn exponentiate<E>(fused: bool, logits: &mut [f32], exps: Option<&mut [E]>) -> (f32, f32) {
        if fused {
            exponentiate_with::<E, true>(logits, exps)
        } else {
            exponentiate_with::<E, false>(logits, exps)
        }
    }
}

#[inline(always)]
fn exponentiate_with<E: Element, const FUSED: bool>(
    logits: &mut [f32],
    exps: Option<&mut [E]>,
) -> (f32, f32) {
    let peak = math::largest(logits);
    for logit in logits.iter_mut() {
        *logit = math::exp2::<FUSED>((*logit - peak) * std::f32::consts::LOG2_E);
    }
    if let Some(exps) = exps {
        for (exp, &logit) in exps.iter_mut().zip(&*logits) {
            *exp = E::from_f32(logit);
        }
    }
    (peak, math::sum_of(logits, |exp| exp))
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
