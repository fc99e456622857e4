//! Kernels of the llama family on the CPU, in f32, bf16 and f16 storage with f32 arithmetic.
//!
//! A kernel is a function over slices: a [`Pool`], dimensions, inputs, outputs, scratch. The caller owns all buffers and a
//! kernel allocates nothing; where it needs scratch, a function beside it returns the size, and the contents do not matter.
//! Activations and their gradients are [`Element`](zeroth_kernel::Element) slices [rows, width] whose rows may be padded
//! ([`row_stride`]): a matrix fills its slice, so that the length determines the stride. Gradients of weights are accumulated
//! in f32.
//!
//! Results have the same bits for any number of threads: work is partitioned by shape, each task writes its own part, every
//! sum has a fixed order, and no number passes through an atomic (a flag that is only ever set may). A slice of the wrong length
//! panics.
//!
//! Every kernel has an f64 [`mod@reference`]; [`self_test()`] compares the two on the machine at hand.
#![allow(
    clippy::many_single_char_names,
    clippy::similar_names,
    reason = "names of the formulas: m, n and k; p, m and v; dx and dw; cos and sin"
)]
#![allow(clippy::too_many_arguments, reason = "the arguments of a kernel are its buffers")]
// Unit tests need neither the device nor the self-test, which would instantiate every kernel again.
#![cfg_attr(test, allow(dead_code, unused_imports, reason = "the device and the self-test are not compiled"))]
#![allow(
    clippy::inline_always,
    reason = "a body must be compiled with the instructions of the ISA that calls it"
)]

mod activation;
mod affinity;
mod arena;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod balance_loss;
mod columns;
mod control;
mod convert;
#[cfg(not(test))]
mod device;
mod dropout;
mod embedding;
mod expert_rows;
mod gated_activation;
mod gated_rows;
mod gemm;
mod grouped;
mod head_loss;
mod head_norm_rope;
mod instruction_sets;
mod isa;
mod launch;
mod linear;
mod logits;
mod math;
mod nf4;
mod norm;
mod optimizer;
mod pool;
mod position_bias;
mod random;
mod rank_sum;
pub mod reference;
mod rms_norm;
mod rope;
mod route;
mod rows;
mod scratch_splitter;
#[cfg(not(test))]
mod self_test;
mod stream;
#[cfg(not(test))]
mod target;
mod work_partition;

pub use activation::{activation, activation_backward, scale};
pub use affinity::CpuAffinity;
pub use arena::{Arena, LARGE_PAGE};
pub use attention::{
    AttentionSaved, BiasGradOut, ContextSlices, WeightDropout, attention, attention_backward,
    attention_backward_scratch, attention_scratch, cached_attention, cached_attention_scratch, store_rows,
};
pub use balance_loss::{balance_loss, balance_loss_backward};
pub use convert::{check_finite, convert, convert_and_check_finite, copy, fill, sum, sum_ranks};
#[cfg(not(test))]
pub use device::CpuDevice;
pub use dropout::{Dropout, dropout};
pub use embedding::{embedding, embedding_backward, embedding_backward_tied};
pub use expert_rows::{combine_rows, gather_rows};
pub use gated_activation::{gated_activation, gated_activation_backward};
pub use gated_rows::{gated_rows, gated_rows_backward, gated_rows_scratch};
pub use grouped::{
    grouped_linear, grouped_linear_add, grouped_linear_dw, grouped_linear_dw_rounded, grouped_linear_dx,
    grouped_linear_scratch,
};
pub use head_loss::{
    DistillDw, TeacherDims, TeacherSlices, TokenRows, distill_loss_backward, distill_loss_scratch, head_loss,
    head_loss_backward, head_loss_backward_rounded, head_loss_rounded_scratch, head_loss_scratch,
    top_log_probs, top_log_probs_scratch,
};
pub use head_norm_rope::{head_norm_rope, head_norm_rope_backward, head_norm_rope_scratch};
pub use instruction_sets::{InstructionSets, KernelIsa};
pub use isa::{Isa, IsaError};
pub use linear::{linear, linear_add, linear_db, linear_dw, linear_dw_rounded, linear_dx, linear_scratch};
pub use logits::{logits, logits_scratch};
pub use nf4::{quantize_nf4, unpack_nf4};
pub use norm::block_squares;
pub use optimizer::{Master, Moments, optimize};
pub use pool::Pool;
pub use position_bias::{position_bias, position_bias_backward};
pub use random::normal;
pub use rank_sum::sum_parts;
pub use rms_norm::{rms_norm, rms_norm_backward, rms_norm_residual, rms_norm_scratch};
pub use rope::{RopeTable, rope, rope_angles, rope_backward, rope_from};
pub use route::{BalanceSlices, RoutedSlices, route, route_backward, route_backward_scratch, route_scratch};
pub use rows::row_stride;
#[cfg(not(test))]
pub use self_test::{self_test, self_test_on};
#[cfg(not(test))]
pub use target::CpuTarget;
pub use work_partition::{Chunks, Grid, Optional, Partition, Tile};

/// Panics where a buffer's length does not match the dimensions.
#[track_caller]
fn check_len(name: &str, found: usize, expected: usize) {
    assert!(found == expected, "`{name}` has {found} elements; the sizes given need {expected}");
}

/// Panics where scratch is too short.
#[track_caller]
fn check_scratch(found: usize, needed: usize) {
    assert!(found >= needed, "scratch has {found} elements; the sizes given need {needed}");
}
