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
mod ahead;
#[cfg(target_arch = "x86_64")]
mod bf16_panels;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only kernels of x86-64 have beats"))]
mod blocks;
mod f32_panels;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod over_rows;
mod plain;
mod sizes;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only tiles store whole lines"))]
mod store;
#[cfg(target_arch = "x86_64")]
mod tiled;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod view;
#[cfg(target_arch = "x86_64")]
mod woven;
#[cfg(target_arch = "x86_64")]
mod zmm;
#[cfg(target_arch = "x86_64")]
mod zmm_rows;

#[cfg(target_arch = "x86_64")]
pub(super) use ahead::ask_to_write;
#[cfg(target_arch = "x86_64")]
pub(super) use bf16_panels::{Side, pack as pack_bf16};
#[cfg(target_arch = "x86_64")]
pub(super) use blocks::{Between, Nothing};
pub(super) use blocks::{block, in_bands, matmul, over_rows, product};
pub(super) use sizes::{ALIGN, PANEL, TILE, band_scratch, over_rows_scratch, pack_len, scratch};
pub(super) use store::Store;
#[cfg(target_arch = "x86_64")]
pub(super) use store::{LINE, Line};
#[cfg(target_arch = "x86_64")]
pub(super) use tiles::{Tiles, permitted as tiles_permitted};
#[cfg(target_arch = "x86_64")]
pub(super) use transpose::transpose_from;
pub(super) use view::View;
