//! The matrix product under `linear`, `attention` and `head_loss`: cut into blocks that stay in the second-level cache,
//! packed, and multiplied by a register kernel of the path.
//!
//! The order of a sum depends on its length alone, so where a tile begins, how large the matrix around it is, and who
//! computes it change nothing:
//! - f32 kernels add blocks of terms in order (1024 with AVX-512, else 192), and inside a block one multiply-add after
//!   another.
//! - AMX tiles take 32 terms at a time, in order. Within the 32, terms of even and of odd place are summed apart (16
//!   fused multiply-adds each, rounded to nearest even), the two sums are added, and their sum is added to what stood
//!   before. Subnormal numbers count as 0. So the processor's manual describes TDPBF16PS, and a test holds it to that.
//!
//! AMX is for products in which a factor is bf16. A factor in f32 (softmax weights and score gradients of attention,
//! gradients of logits) is rounded to bf16 when it is packed, as flash attention and PyTorch's bf16 head do.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_driver;
#[cfg(target_arch = "x86_64")]
mod amx_pack;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_driver;
#[cfg(target_arch = "x86_64")]
mod avx512_pack;
mod blocking;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only kernels of x86-64 have beats"))]
mod driver;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only tiles store whole lines"))]
mod epilogue;
#[cfg(target_arch = "x86_64")]
mod gemm_tn;
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
pub(super) use amx::{Tiles, permitted as tiles_permitted};
#[cfg(target_arch = "x86_64")]
pub(super) use amx_pack::{Side, pack as pack_bf16};
pub(super) use blocking::{ALIGN, PANEL, TILE, band_scratch, over_rows_scratch, pack_len, scratch};
#[cfg(target_arch = "x86_64")]
pub(super) use driver::{Between, Nothing};
pub(super) use driver::{block, in_bands, matmul, over_rows, product};
pub(super) use epilogue::Store;
#[cfg(target_arch = "x86_64")]
pub(super) use epilogue::{LINE, Line};
#[cfg(target_arch = "x86_64")]
pub(super) use prefetch::ask_to_write;
#[cfg(target_arch = "x86_64")]
pub(super) use transpose::transpose_from;
pub(super) use view::View;
