//! The CPU kernels against PyTorch, against finite differences, and against themselves on other numbers of threads.
#![allow(
    clippy::many_single_char_names,
    clippy::similar_names,
    reason = "names of the formulas: q, k and v; dx and dw"
)]

mod allocation;
mod bf16_rounding;
mod encoder_decoder;
mod everything;
mod experts;
mod golden;
mod gradients;
mod matmuls;
mod mixture;
mod nf4;
mod optional_gradients;
mod rank_sum;
mod self_test;
mod threads;
mod tied_head;
