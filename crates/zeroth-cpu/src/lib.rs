//! Kernels of the llama family on the CPU, in f32, bf16 and f16 storage with f32 arithmetic.
//!
//! A kernel is a plain function over slices: sizes, the [`Pool`] it runs on, inputs, outputs, scratch. Buffers are the
//! caller's, so a kernel allocates nothing; where it needs scratch, a function beside it says how much, and what the
//! scratch holds before and after means nothing. Activations and their gradients are [`Element`] slices of
//! [rows, width], whose rows may be further apart than they are long ([`row_stride`]): a matrix fills its slice, so that its length
//! says how far. Gradients of weights are added to f32 slices, because all uses of a parameter in a micro-batch add
//! in f32.
//!
//! Same bits for any number of threads: work is cut by shape, each task writes its own part, every sum has a fixed
//! order, and no number passes through an atomic (a flag that only ever becomes true may). A slice of the wrong length is a mistake of the program and panics.
//!
//! Beside each kernel stands a plain version in f64 ([`mod@reference`]); [`self_test()`] compares them on the machine at hand.
#![allow(
    clippy::many_single_char_names,
    clippy::similar_names,
    reason = "names of the formulas: m, n and k; p, m and v; dx and dw; cos and sin"
)]
#![allow(clippy::too_many_arguments, reason = "the arguments of a kernel are its buffers")]
#![allow(
    clippy::inline_always,
    reason = "a body must be compiled with the instructions of the path that calls it"
)]

mod arena;
mod attention;
mod columns;
mod convert;
mod cut;
mod device;
mod dropout;
mod embedding;
mod head_loss;
mod head_norm_rope;
mod instruction_sets;
mod isa;
mod linear;
#[cfg(target_arch = "x86_64")]
mod lines;
mod logits;
mod math;
mod matmul;
mod norm;
mod optimizer;
#[cfg(target_arch = "x86_64")]
mod panels;
mod pool;
mod affinity;
mod random;
mod rank_sum;
pub mod reference;
mod rms_norm;
mod rope;
mod rows;
mod scratch;
mod self_test;
mod stream;
mod swiglu;

pub use arena::{Arena, LARGE_PAGE};
pub use attention::{
    AttentionSaved, attention, attention_backward, attention_backward_scratch, attention_scratch,
};
pub use convert::{convert, convert_and_check_finite, copy, fill, look, sum, sum_ranks};
pub use cut::{Chunks, Grid, Optional, Parts, Tile};
pub use device::CpuDevice;
pub use dropout::{Dropout, dropout};
pub use embedding::{embedding, embedding_backward, embedding_backward_tied};
pub use head_loss::{
    OwnRows, head_loss, head_loss_backward, head_loss_backward_once, head_loss_once_scratch,
    head_loss_scratch,
};
pub use head_norm_rope::{head_norm_rope, head_norm_rope_backward, head_norm_rope_scratch};
pub use instruction_sets::{InstructionSets, KernelIsa};
pub use isa::{Isa, IsaError};
pub use linear::{linear, linear_db, linear_dw, linear_dw_once, linear_dx, linear_scratch};
pub use logits::{logits, logits_scratch};
pub use norm::block_squares;
pub use optimizer::{Master, Moments, optimize};
pub use pool::Pool;
pub use affinity::CpuAffinity;
pub use random::normal;
pub use rank_sum::sum_parts;
pub use rms_norm::{rms_norm, rms_norm_backward, rms_norm_residual, rms_norm_scratch};
pub use rope::{RopeTable, rope, rope_angles, rope_backward, rope_from};
pub use rows::row_stride;
pub use scratch::scratch_bytes;
pub use self_test::{self_test, self_test_on};
pub use swiglu::{swiglu, swiglu_backward};

/// Refuses a buffer whose length does not follow from the sizes.
#[track_caller]
fn check_len(name: &str, found: usize, expected: usize) {
    assert!(found == expected, "`{name}` has {found} elements; the sizes given need {expected}");
}

/// Refuses scratch that is too short.
#[track_caller]
fn check_scratch(found: usize, needed: usize) {
    assert!(found >= needed, "scratch has {found} elements; the sizes given need {needed}");
}
