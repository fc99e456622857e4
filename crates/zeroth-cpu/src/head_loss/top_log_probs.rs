//! The most likely tokens of each row and their log-probabilities.

use std::cmp::Ordering;

use zeroth_base::DType;

use super::distill::logits;
use super::distill::rows::log_softmax;
use crate::gemm;
use crate::isa::each_isa;
use crate::math;
use crate::pool::Pool;
use crate::rows::{check_rows, row_stride};
use crate::work_partition::Chunks;
use crate::{check_len, check_scratch};
use zeroth_kernel::{Element, HeadLossDims};

/// Largest k that is found by insertion: a scan that compares most logits with the smallest one found so far.
const FEW: usize = 256;
/// Logits that are compared at once.
const SCANNED: usize = 64;

/// f32 elements of a slice's logits.
fn slice_scratch(dims: HeadLossDims) -> usize {
    dims.distill_slice_rows(0) * row_stride(dims.vocab, DType::F32)
}

/// f32 elements of scratch that [`top_log_probs`] needs with a pool of `threads`.
pub fn top_log_probs_scratch(dims: HeadLossDims, k: usize, threads: usize) -> usize {
    let HeadLossDims { hidden, vocab, .. } = dims;
    let order = if k > FEW { vocab } else { 0 };
    slice_scratch(dims)
        + gemm::scratch(dims.distill_slice_rows(0), vocab, hidden, threads).max(threads * order)
}

/// The `k` largest of each row of x · wᵀ, descending, the lowest id first among equals: their ids and their log-probabilities
/// [rows, k] at a temperature. A row whose log-sum-exp is not finite gives the ids from 0 on, and NaN.
///
/// # Panics
/// If `k` is 0 or larger than the vocabulary.
pub fn top_log_probs<T: Element>(
    pool: &Pool,
    dims: HeadLossDims,
    k: usize,
    temperature: f32,
    x: &[T],
    w: &[T],
    ids: &mut [i32],
    log_probs: &mut [f32],
    scratch: &mut [f32],
) {
    let HeadLossDims { rows, hidden, vocab, row_stride: x_stride } = dims;
    assert!((1..=vocab).contains(&k), "{k} of a vocabulary of {vocab}");
    check_rows("x", x.len(), [rows, hidden], x_stride);
    check_len("w", w.len(), vocab * hidden);
    check_len("ids", ids.len(), rows * k);
    check_len("log_probs", log_probs.len(), rows * k);
    check_scratch(scratch.len(), top_log_probs_scratch(dims, k, pool.threads()));
    let (of_slice, scratch) = scratch.split_at_mut(slice_scratch(dims));
    let (most, stride) = (dims.distill_slice_rows(0), row_stride(vocab, DType::F32));
    for first in (0..rows).step_by(most.max(1)) {
        let rows = most.min(rows - first);
        let of_slice = &mut of_slice[..rows * stride];
        let x = &x[first * x_stride..][..rows * x_stride];
        logits(pool, [rows, vocab, hidden], x, x_stride, w, of_slice, scratch);
        let slots = first * k..(first + rows) * k;
        let parts = (
            Chunks::new(of_slice, stride),
            Chunks::new(&mut ids[slots.clone()], k),
            Chunks::new(&mut log_probs[slots], k),
        );
        pool.each_with(parts, scratch, |_, (logits, ids, log_probs), scratch| {
            let logits = &logits[..vocab];
            let softmax = log_softmax(pool.isa(), math::has_fma(pool.isa()), logits, 1.0 / temperature);
            if !softmax.is_finite() {
                ids.iter_mut().zip(0..).for_each(|(to, id)| *to = id);
                log_probs.fill(f32::NAN);
                return;
            }
            if k > FEW {
                let order = bytemuck::cast_slice_mut(&mut scratch[..vocab]);
                select(logits, order, ids);
            } else {
                scan(pool.isa(), logits, ids, log_probs);
            }
            for (to, id) in log_probs.iter_mut().zip(&*ids) {
                *to = softmax.at(logits[*id as usize]);
            }
        });
    }
}

/// Sorts all ids; no logit is NaN.
fn select(logits: &[f32], order: &mut [u32], ids: &mut [i32]) {
    order.iter_mut().zip(0..).for_each(|(to, id)| *to = id);
    let compare = |a: &u32, b: &u32| {
        let of_logits = logits[*b as usize].partial_cmp(&logits[*a as usize]).unwrap_or(Ordering::Equal);
        of_logits.then(a.cmp(b))
    };
    if ids.len() < order.len() {
        order.select_nth_unstable_by(ids.len() - 1, compare);
    }
    let chosen = &mut order[..ids.len()];
    chosen.sort_unstable_by(compare);
    ids.iter_mut().zip(chosen).for_each(|(to, id)| *to = *id as i32);
}

each_isa! {
    /// Inserts each logit that is larger than the smallest of those found; `found` are their logits.
    fn scan(logits: &[f32], ids: &mut [i32], found: &mut [f32]) {
        let mut count = 0;
        for (block, logits) in logits.chunks(SCANNED).enumerate() {
            let least = if count == ids.len() { found[count - 1] } else { f32::NEG_INFINITY };
            if count == ids.len() && math::max_of(logits) <= least {
                continue;
            }
            for (place, &logit) in logits.iter().enumerate() {
                if count == ids.len() {
                    if logit <= found[count - 1] {
                        continue;
                    }
                    count -= 1;
                }
                // Behind those that are equal, whose ids are lower.
                let at = found[..count].partition_point(|there| *there >= logit);
                found.copy_within(at..count, at + 1);
                ids.copy_within(at..count, at + 1);
                found[at] = logit;
                ids[at] = (block * SCANNED + place) as i32;
                count += 1;
            }
        }
    }
}
