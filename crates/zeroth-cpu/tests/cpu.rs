//! The CPU kernels against PyTorch, against finite differences, and against themselves on other numbers of threads.
#![allow(
    clippy::many_single_char_names,
    clippy::similar_names,
    reason = "names of the formulas: q, k and v; dx and dw"
)]
#![allow(clippy::unwrap_used, reason = "a panic is the report of a test, in its helpers too")]

#[path = "cpu/allocation.rs"]
mod allocation;
#[path = "cpu/bf16.rs"]
mod bf16_rounding;
#[path = "cpu/encoder_decoder.rs"]
mod encoder_decoder;
#[path = "cpu/everything.rs"]
mod everything;
#[path = "cpu/experts.rs"]
mod experts;
#[path = "cpu/golden.rs"]
mod golden;
#[path = "cpu/gradients.rs"]
mod gradients;
#[path = "cpu/matmuls.rs"]
mod matmuls;
#[path = "cpu/mixture.rs"]
mod mixture;
#[path = "cpu/nf4.rs"]
mod nf4;
#[path = "cpu/optional_gradients.rs"]
mod optional_gradients;
#[path = "cpu/rank_sum.rs"]
mod rank_sum;
#[path = "cpu/self_test.rs"]
mod self_test;
#[path = "cpu/threads.rs"]
mod threads;
#[path = "cpu/tied_head.rs"]
mod tied_head;
