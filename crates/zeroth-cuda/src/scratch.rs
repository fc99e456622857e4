//! How much scratch a kernel needs and how it is cut: from sizes only, so that a plan is exact without a card.

use zeroth_base::DType;

use super::cudnn::workspace;
use super::driver::Address;
use super::rows::Spans;
use zeroth_kernel::{AttentionDims, BLOCK, ExactSum, HeadLossDims};
use zeroth_kernel::{DeviceError, Kernel};

/// The workspace of a matrix product: what the library's makers advise for Hopper.
pub(super) const WORKSPACE: u64 = 32 << 20;
/// Rows whose columns one thread sums where rows are no whole lots.
pub(super) const COLUMN_ROWS: usize = 64;

/// Sums of blocks that a block of threads makes exact at a time, and the most exact sums.
const EXACT_SUMS: u64 = 256;

/// Every piece of scratch begins at a multiple of this.
const ALIGNMENT: u64 = 256;
/// The most bytes and rows of a slice's logits. Each slice reads and writes the gradient of the head's weights once, and the
/// fewer rows it has, the more of the time that is.
const SLICE: u64 = 640 << 20;
const SLICE_ROWS: u64 = 2048;

/// Elements from one row of logits to the next: rows begin at multiples of 16 bytes whatever the vocabulary is.
pub(super) const fn logits_pitch(dims: HeadLossDims) -> usize {
    dims.vocab.next_multiple_of(8)
}

/// Rows of a slice of the head.
pub(super) fn slice_rows(dims: HeadLossDims, dtype: DType) -> usize {
    let row = dtype.bytes() * logits_pitch(dims).max(1) as u64;
    let fitting = (SLICE / row).clamp(32, SLICE_ROWS) as usize / 32 * 32;
    fitting.min(dims.rows)
}

/// Bytes of the first level of column sums, whichever form runs.
pub(super) fn column_sums(rows: usize, width: usize) -> u64 {
    let of_lots = Spans::of(width).map_or(0, |spans| spans.gradient(rows).1);
    4 * (of_lots.max(rows.div_ceil(COLUMN_ROWS)) * width) as u64
}

/// Row sums of y · dy, in f32.
pub(super) const fn deltas(dims: &AttentionDims) -> usize {
    dims.heads * dims.rows
}

/// Blocks of a norm.
pub(super) const fn blocks(elements: u64) -> u64 {
    elements.div_ceil(BLOCK as u64)
}

/// Exact sums that the sums of blocks become before they become one.
pub(super) fn exact_sums(blocks: u64) -> u64 {
    blocks.div_ceil(EXACT_SUMS).min(EXACT_SUMS)
}

/// Bytes of scratch that a kernel needs.
pub fn scratch_bytes(kernel: &Kernel, dtype: DType) -> u64 {
    let pieces = match *kernel {
        Kernel::Linear { .. } | Kernel::LinearDx { .. } | Kernel::LinearDw { .. } => [WORKSPACE, 0, 0],
        Kernel::LinearDb { dims, .. } => [column_sums(dims.rows, dims.outputs), 0, 0],
        Kernel::RmsNormBackward { dims, .. } => [column_sums(dims.rows, dims.width), 0, 0],
        Kernel::HeadNormRopeBackward { dims, .. } => {
            let norm = dims.norm();
            [column_sums(norm.rows, norm.width), 0, 0]
        }
        Kernel::Attention { dims, .. } => [workspace(&dims, dtype), 0, 0],
        Kernel::AttentionBackward { dims, .. } => [4 * deltas(&dims) as u64, 0, 0],
        Kernel::HeadLoss { dims, .. } | Kernel::HeadLossBackward { dims, .. } => [
            WORKSPACE,
            dtype.bytes() * (slice_rows(dims, dtype) * logits_pitch(dims)) as u64,
            // A loss a row.
            4 * dims.rows as u64,
        ],
        Kernel::Logits { dims, .. } => [WORKSPACE, (dims.sequences * dims.hidden) as u64 * dtype.bytes(), 0],
        Kernel::Squares { values, value_type, .. } => {
            let blocks = blocks(values.bytes / value_type.bytes());
            [8 * blocks, exact_sums(blocks) * size_of::<ExactSum>() as u64, 0]
        }
        _ => [0; 3],
    };
    let total: u64 = pieces.iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum();
    // A span may begin anywhere.
    if total == 0 { 0 } else { total + ALIGNMENT }
}

/// Scratch that is handed out piece by piece.
pub(super) struct Scratch {
    what: &'static str,
    next: Address,
    end: Address,
}

impl Scratch {
    pub(super) const fn new(what: &'static str, at: Address, bytes: u64) -> Self {
        Self { what, next: at, end: at + bytes }
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let at = self.next.next_multiple_of(ALIGNMENT);
        self.next = at + bytes.next_multiple_of(ALIGNMENT);
        if self.next > self.end {
            let problem = format!("scratch is {} bytes too short", self.next - self.end);
            return Err(DeviceError::Operands { what: self.what, problem });
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeroth_kernel::Span;

    fn head(rows: usize, vocab: usize) -> Kernel {
        let span = Span::device(0, 0);
        let dims = HeadLossDims { rows, hidden: 64, vocab };
        Kernel::HeadLoss { dims, x: span, w: span, labels: span, loss: span }
    }

    #[test]
    fn the_heads_scratch_stays_bounded_for_a_large_vocabulary() {
        // Qwen's vocabulary; 1,000,000 tokens of a micro-batch add a loss each and nothing else.
        let bytes = scratch_bytes(&head(8192, 151_936), DType::Bf16);
        assert!((600 << 20..673 << 20).contains(&bytes), "{bytes}");
        assert_eq!(scratch_bytes(&head(1_000_000, 151_936), DType::Bf16) - bytes, (1_000_000 - 8192) * 4);
    }

    #[test]
    fn pieces_fit_into_what_was_said_wherever_a_span_begins() {
        let dims = HeadLossDims { rows: 5, hidden: 64, vocab: 37 };
        let bytes = scratch_bytes(&head(5, 37), DType::F32);
        for at in [0, 4, 255, 256] {
            let mut scratch = Scratch::new("head_loss", at, bytes);
            let pieces = [WORKSPACE, 4 * 5 * logits_pitch(dims) as u64, 4 * 5];
            for piece in pieces {
                assert!(scratch.take(piece).unwrap().is_multiple_of(256));
            }
            assert!(scratch.take(WORKSPACE).is_err());
        }
    }
}
