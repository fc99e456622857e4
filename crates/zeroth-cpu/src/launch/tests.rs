//! Scratch of the kernels.

use crate::attention::{attention_backward_scratch, attention_scratch, cached_attention_scratch};
use crate::grouped::grouped_linear_scratch;
use crate::head_loss::{head_loss_rounded_scratch, head_loss_scratch, top_log_probs_scratch};
use crate::linear::linear_scratch;
use crate::logits::logits_scratch;
use crate::route::{route_backward_scratch, route_scratch};
use zeroth_kernel::{AttentionDims, GroupedLinearDims, HeadLossDims, LinearDims, LogitsDims, RouteDims};

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
            Box::new(move |threads| route_scratch(route, threads) + route_backward_scratch(route, threads)),
            Box::new(move |threads| logits_scratch(logits, threads)),
        ];
        for (kernel, scratch) in linears.into_iter().chain(others).enumerate() {
            let by_threads: Vec<usize> = (1..=17).map(scratch).collect();
            assert!(by_threads.is_sorted(), "kernel {kernel}, {rows} rows: {by_threads:?}");
        }
    }
}
