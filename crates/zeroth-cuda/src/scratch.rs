//! Scratch memory of kernels. Its size depends on shapes alone, so that a memory plan is exact without a GPU.

use zeroth_base::DType;

use zeroth_kernel::{AttentionDims, BLOCK, HeadLossDims, HeadNormRopeDims};

/// Workspace of a matmul: NVIDIA's recommendation for Hopper.
pub(super) const WORKSPACE: u64 = 32 << 20;

/// Rows of a tile on CUDA cores, and the least of one on tensor cores.
pub(super) const TILE: usize = 64;
/// Block sums per thread block of `exact_sums`, and its largest grid.
const EXACT_SUMS: u64 = 256;

/// Limits of a slice of logits in bytes and rows. Every slice reads and writes the gradient of the LM head's weights once, so slices
/// should be large.
const SLICE_BYTES: u64 = 640 << 20;
const SLICE_ROWS: u64 = 2048;

/// Elements between two rows of logits: rows are 16-byte aligned for every vocabulary size.
pub(super) const fn logits_row_stride(dims: HeadLossDims) -> usize {
    row_stride(dims.vocab)
}

/// Elements between two rows of logits.
pub(super) const fn row_stride(vocab: usize) -> usize {
    vocab.next_multiple_of(8)
}

/// Rows of a slice of logits.
pub(super) fn slice_rows(dims: HeadLossDims, dtype: DType) -> usize {
    slice_rows_of(dims.rows, dtype.bytes() * logits_row_stride(dims) as u64)
}

/// Rows of a slice that holds `bytes` of each.
pub(super) fn slice_rows_of(rows: usize, bytes: u64) -> usize {
    let most = (SLICE_BYTES / bytes.max(1)).clamp(32, SLICE_ROWS) as usize / 32 * 32;
    most.min(rows)
}

/// Bytes of dy rotated back, where there is no dh to hold it.
pub(super) const fn rotated_back(dtype: DType, dims: HeadNormRopeDims) -> u64 {
    let norm = dims.norm();
    dtype.bytes() * (norm.rows * norm.width) as u64
}

/// Number of row sums of y · dy, in f32.
pub(super) const fn deltas(dims: &AttentionDims) -> usize {
    dims.heads * dims.rows
}

/// Bytes of the gradients of biases of each tile of queries. Tiles have at least [`TILE`] rows.
pub(super) fn bias_partials(dims: &AttentionDims) -> u64 {
    4 * (dims.rows.div_ceil(TILE) * dims.heads * dims.distances()) as u64
}

/// Block sums of a gradient norm.
pub(super) const fn blocks(elements: u64) -> u64 {
    elements.div_ceil(BLOCK as u64)
}

/// Number of intermediate exact sums of a gradient norm.
pub(super) fn exact_sums(blocks: u64) -> u64 {
    blocks.div_ceil(EXACT_SUMS).min(EXACT_SUMS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch_context::{ALIGNMENT, Scratch};
    use crate::scratch_bytes;
    use zeroth_kernel::{AttentionContext, BiasGrad, Kernel, Span};

    fn head(rows: usize, vocab: usize) -> Kernel {
        let span = Span::device(0, 0);
        let dims = HeadLossDims::new(rows, 64, vocab);
        Kernel::HeadLoss { dims, x: span, w: span, labels: span, loss: span }
    }

    #[test]
    fn scratch_of_the_lm_head_is_bounded_for_a_large_vocabulary() {
        // Qwen's vocabulary. More tokens in a micro-batch only add one loss each.
        let bytes = scratch_bytes(&head(8192, 151_936), DType::Bf16);
        assert!((600 << 20..673 << 20).contains(&bytes), "{bytes}");
        assert_eq!(scratch_bytes(&head(1_000_000, 151_936), DType::Bf16) - bytes, (1_000_000 - 8192) * 4);
    }

    #[test]
    fn gradients_of_biases_have_a_partial_sum_per_tile_of_queries() {
        let span = Span::device(0, 0);
        let plain = AttentionDims::new(130, 4, 2, 64, None, 1.0);
        let dims = AttentionDims { causal: false, max_distance: Some(128), ..plain };
        let backward = |dbias| Kernel::AttentionBackward {
            dims,
            context: AttentionContext { bias: Some(span), ..AttentionContext::new(span) },
            q: span,
            k: span,
            v: span,
            y: span,
            lse: span,
            dy: span,
            dq: span,
            dk: span,
            dv: span,
            dbias,
        };
        let without = scratch_bytes(&backward(None), DType::Bf16);
        let with = scratch_bytes(&backward(Some(BiasGrad { to: span, add: false })), DType::Bf16);
        assert_eq!(with - without, (4 * 3 * 4 * 257u64).next_multiple_of(ALIGNMENT));
    }

    #[test]
    fn allocations_fit_at_any_start_address() {
        let dims = HeadLossDims::new(5, 64, 37);
        let bytes = scratch_bytes(&head(5, 37), DType::F32);
        for at in [0, 4, 255, 256] {
            let mut scratch = Scratch::new("head_loss", at, bytes);
            let parts = [WORKSPACE, 4 * 5 * logits_row_stride(dims) as u64, 4 * 5];
            for part in parts {
                assert!(scratch.take(part).unwrap().is_multiple_of(256));
            }
            assert!(scratch.take(WORKSPACE).is_err());
        }
    }
}
