//! Scratch sizes of the CPU kernels, from dimensions and threads alone: a memory plan is exact before a run.

use super::attention::{attention_backward_scratch, attention_scratch, cached_attention_scratch};
use super::gated_rows::gated_rows_scratch;
use super::grouped::grouped_linear_scratch;
use super::head_loss::{
    distill_loss_scratch, head_loss_rounded_scratch, head_loss_scratch, top_log_probs_scratch,
};
use super::head_norm_rope::head_norm_rope_scratch;
use super::linear::linear_scratch;
use super::logits::logits_scratch;
use super::rms_norm::rms_norm_scratch;
use super::route::{route_backward_scratch, route_scratch};
use zeroth_kernel::BLOCK;
use zeroth_kernel::{GradStore, HeadLossDw, Kernel};

/// Bytes of scratch of a kernel on a pool of `threads`.
pub fn scratch_bytes(kernel: &Kernel, threads: usize) -> u64 {
    let floats = |elements: usize| 4 * elements as u64;
    match kernel {
        Kernel::Linear { dims, .. }
        | Kernel::LinearAdd { dims, .. }
        | Kernel::LinearDx { dims, .. }
        | Kernel::LinearDw { dims, .. }
        | Kernel::LinearDb { dims, .. } => floats(linear_scratch(*dims, threads)),
        Kernel::RmsNormBackward { dw: None, .. } | Kernel::HeadNormRopeBackward { dw: None, .. } => 0,
        Kernel::RmsNormBackward { dims, .. } => floats(rms_norm_scratch(*dims)),
        Kernel::HeadNormRopeBackward { dims, .. } => floats(head_norm_rope_scratch(*dims)),
        Kernel::Attention { dims, .. } => floats(attention_scratch(dims, threads)),
        Kernel::AttentionBackward { dims, .. } => floats(attention_backward_scratch(dims, threads)),
        Kernel::CachedAttention { dims, .. } => floats(cached_attention_scratch(dims, threads)),
        Kernel::HeadLossBackward {
            dims,
            dw: Some(HeadLossDw { store: GradStore::Round { .. }, .. }),
            ..
        } => floats(head_loss_rounded_scratch(*dims, threads)),
        Kernel::HeadLoss { dims, .. } | Kernel::HeadLossBackward { dims, .. } => {
            floats(head_loss_scratch(*dims, threads))
        }
        Kernel::DistillLossBackward { dims, teacher, dw, .. } => {
            let rounds = matches!(dw, Some(HeadLossDw { store: GradStore::Round { .. }, .. }));
            floats(distill_loss_scratch(*dims, teacher.into(), threads, rounds))
        }
        Kernel::TopLogProbs { dims, k, .. } => floats(top_log_probs_scratch(*dims, *k, threads)),
        Kernel::GroupedLinear { dims, .. }
        | Kernel::GroupedLinearAdd { dims, .. }
        | Kernel::GroupedLinearDx { dims, .. }
        | Kernel::GroupedLinearDw { dims, .. } => floats(grouped_linear_scratch(*dims, threads)),
        Kernel::Route { dims, .. } => floats(route_scratch(*dims, threads)),
        Kernel::RouteBackward { dims, .. } => floats(route_backward_scratch(*dims, threads)),
        Kernel::GatedRowsBackward { dims, .. } => floats(gated_rows_scratch(*dims)),
        Kernel::Logits { dims, .. } => floats(logits_scratch(*dims, threads)),
        Kernel::Squares { values, value_type, .. } => {
            8 * (values.bytes / value_type.bytes()).div_ceil(BLOCK as u64)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use zeroth_kernel::{AttentionDims, GroupedLinearDims, HeadLossDims, LinearDims, LogitsDims, RouteDims};

    use super::*;

    /// Ranks plan memory for the threads of rank 0, and those with fewer compute with fewer.
    #[test]
    fn scratch_for_some_threads_is_enough_for_fewer() {
        for rows in [1, 40, 300, 2048] {
            let linears = [(64, 48), (128, 4096), (24, 8), (1024, 32)].map(|(inputs, outputs)| {
                let dims = LinearDims::new(rows, inputs, outputs);
                Box::new(move |threads| linear_scratch(dims, threads)) as Box<dyn Fn(usize) -> usize>
            });
            let head = HeadLossDims::new(rows, 64, 500);
            let attention = AttentionDims::new(rows, 4, 2, 32, None, 1.0);
            let grouped = GroupedLinearDims::new(rows, 4, 64, 48);
            let route = RouteDims::new(rows, 8, 2, true);
            let logits = LogitsDims::new(rows, 3, 64, 500);
            let others: [Box<dyn Fn(usize) -> usize>; 9] = [
                Box::new(move |threads| head_loss_scratch(head, threads)),
                Box::new(move |threads| head_loss_rounded_scratch(head, threads)),
                Box::new(move |threads| top_log_probs_scratch(head, 7, threads)),
                Box::new(move |threads| attention_scratch(&attention, threads)),
                Box::new(move |threads| attention_backward_scratch(&attention, threads)),
                Box::new(move |threads| cached_attention_scratch(&attention, threads)),
                Box::new(move |threads| grouped_linear_scratch(grouped, threads)),
                Box::new(move |threads| {
                    route_scratch(route, threads) + route_backward_scratch(route, threads)
                }),
                Box::new(move |threads| logits_scratch(logits, threads)),
            ];
            for (kernel, scratch) in linears.into_iter().chain(others).enumerate() {
                let by_threads: Vec<usize> = (1..=17).map(scratch).collect();
                assert!(by_threads.is_sorted(), "kernel {kernel}, {rows} rows: {by_threads:?}");
            }
        }
    }
}
