//! GEMM for `linear`, `attention` and `head_loss`: cache blocking for L2, packed panels, and one micro-kernel per
//! instruction set.
//!
//! The summation order depends on k alone. The position of a tile, the size of the matrix around it and the thread that
//! computes it change no bit:
//! - f32 micro-kernels accumulate blocks of k in order (KC is 1024 with AVX-512, else 192), and inside a block one
//!   multiply-add after another.
//! - AMX accumulates 32 terms at a time, in order. Within the 32, even and odd terms are summed separately (16 fused
//!   multiply-adds each, rounded to nearest even), the two sums are added, and the result is added to the accumulator.
//!   Subnormals are flushed to zero. Intel's manual specifies TDPBF16PS that way, and a test checks it.
//!
//! AMX runs where at least one operand is bf16. An f32 operand (softmax weights and score gradients of attention,
//! gradients of logits) is rounded to bf16 as it is packed, as flash attention and PyTorch's bf16 head do.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_driver;
#[cfg(target_arch = "x86_64")]
mod amx_gemm_tn;
#[cfg(target_arch = "x86_64")]
mod amx_micro_kernel;
#[cfg(target_arch = "x86_64")]
mod amx_narrow_tn;
#[cfg(target_arch = "x86_64")]
mod amx_pack;
#[cfg(target_arch = "x86_64")]
mod amx_short_k;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_driver;
#[cfg(target_arch = "x86_64")]
mod avx512_pack;
mod blocking;
mod driver;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only AMX stores wide rows"))]
mod epilogue;
mod groups;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 drivers interleave work"))]
mod micro_kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod portable;
#[cfg(target_arch = "x86_64")]
mod prefetch;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod view;

#[cfg(target_arch = "x86_64")]
pub(super) use amx::AmxKernel;
#[cfg(target_arch = "x86_64")]
pub(super) use amx_pack::{Operand, interleave, pack as pack_bf16};
pub(super) use blocking::{PANEL, TILE, band_scratch, gemm_tn_scratch, pack_len, scratch};
pub(super) use driver::{gemm, gemm_row_bands, gemm_serial, gemm_tn, gemm_with};
pub(super) use epilogue::Epilogue;
#[cfg(target_arch = "x86_64")]
pub(super) use epilogue::{F32x32, WIDE_ROW};
pub(super) use groups::{GroupMatmul, gemm_groups, group_scratch};
#[cfg(target_arch = "x86_64")]
pub(super) use micro_kernel::{Interleaved, NoInterleave};
#[cfg(target_arch = "x86_64")]
pub(super) use prefetch::{prefetch_read, prefetch_write};
#[cfg(target_arch = "x86_64")]
pub(super) use transpose::transpose_from;
pub(super) use view::MatrixView;
