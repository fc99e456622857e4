//! Attention over packed sequences, causal or not, with grouped-query heads, an optional sliding window, biases by distance,
//! dropout of its weights and online softmax; and its gradient, which recomputes scores from q, k and the saved log-sum-exp.
//!
//! No [sequence, sequence] tensor exists. Tiles of keys start at the first row of a sequence, so a row's result does not
//! depend on the position of its sequence in the batch. Scores, softmax and all sums are f32; results are rounded once. With
//! AMX, softmax weights and score gradients are rounded to bf16 before they are multiplied.
//!
//! Softmax uses base 2: scores are scaled by scale · log2 e, which saves a multiplication per exponential.

#[cfg(target_arch = "x86_64")]
mod amx;
mod bias_grad;
mod blocking;
mod cached;
mod context;
mod dropout;
mod launch;
mod portable;
mod portable_backward;
mod segments;
mod tasks;
#[cfg(test)]
mod tests;

use zeroth_kernel::{AttentionDims, Element};

pub use bias_grad::BiasGradOut;
use bias_grad::{Diagonals, sum_sequences};
use blocking::diagonals;
pub use blocking::{attention_backward_scratch, attention_scratch};
pub use cached::{cached_attention, cached_attention_scratch, store_rows};
pub use context::ContextSlices;
pub use dropout::WeightDropout;
use segments::Segments;
pub use tasks::AttentionSaved;
use tasks::{BackwardTask, RowStrides};

use super::pool::Pool;
use super::work_partition::{Optional, Partition};
use super::{check_len, check_scratch};

/// out = softmax(scale · q · kᵀ + bias) · v within each sequence, with dropout of the softmax.
///
/// Rows of no sequence are padding and give zeros, and so do queries without a key. `lse` [heads, rows] receives the
/// log-sum-exp of each row, which backward needs.
pub fn attention<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    context.check(dims);
    let strides = RowStrides::new(dims, q.len(), k.len());
    check_len("v", v.len(), dims.kv_rows * strides.kv);
    check_len("out", out.len(), dims.rows * strides.q);
    check_len("lse", lse.len(), dims.heads * dims.rows);
    check_scratch(scratch.len(), attention_scratch(dims, pool.threads()));
    #[cfg(target_arch = "x86_64")]
    if amx::supports::<T>(pool.isa()) {
        amx::forward(pool, dims, strides, context, [q, k, v], out, lse, scratch);
        return;
    }
    portable::forward(pool, dims, strides, context, [q, k, v], out, lse, scratch);
}

/// Computes dq, dk and dv from dout, and the gradient of the biases where it has a destination. Padding rows get zeros.
///
/// A task is one kv head of one sequence: it computes all contributions to its dk and dv, and the dq of the heads that share
/// it.
pub fn attention_backward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    context: &ContextSlices<'_>,
    saved: AttentionSaved<T>,
    dout: &[T],
    dq: &mut [T],
    dk: &mut [T],
    dv: &mut [T],
    dbias: Option<BiasGradOut<'_>>,
    scratch: &mut [f32],
) {
    let AttentionDims { rows, kv_rows, kv_heads, head_dim, .. } = *dims;
    context.check(dims);
    let strides = RowStrides::new(dims, saved.q.len(), saved.k.len());
    check_len("v", saved.v.len(), kv_rows * strides.kv);
    check_len("out", saved.out.len(), rows * strides.q);
    check_len("lse", saved.lse.len(), dims.heads * rows);
    check_len("dout", dout.len(), rows * strides.q);
    check_len("dq", dq.len(), rows * strides.q);
    check_len("dk", dk.len(), kv_rows * strides.kv);
    check_len("dv", dv.len(), kv_rows * strides.kv);
    check_scratch(scratch.len(), attention_backward_scratch(dims, pool.threads()));
    let (sums, scratch) = scratch.split_at_mut(diagonals(dims));
    let dq = Segments::new(dq, context.starts, [rows, kv_heads, dims.group() * head_dim], strides.q);
    let parts = dq.count();
    let parts = (
        dq,
        Segments::new(dk, context.kv_starts(), [kv_rows, kv_heads, head_dim], strides.kv),
        Segments::new(dv, context.kv_starts(), [kv_rows, kv_heads, head_dim], strides.kv),
        Optional::new(dbias.is_some().then(|| Diagonals::new(&mut *sums, dims, *context)), parts),
    );
    pool.each_with(parts, scratch, |_, (mut dq, mut dk, mut dv, diagonals), scratch| {
        if !dk.is_sequence() {
            for part in [&mut dq, &mut dk, &mut dv] {
                part.clear();
            }
            return;
        }
        let grads = [dq, dk, dv];
        let task = BackwardTask { isa: pool.isa(), dims, strides, context, saved, dout, grads, diagonals };
        #[cfg(target_arch = "x86_64")]
        if amx::supports::<T>(pool.isa()) {
            amx::backward(task, scratch);
            return;
        }
        portable_backward::backward(task, scratch);
    });
    if let Some(dbias) = dbias {
        sum_sequences(pool, dims, context, sums, dbias);
    }
}
