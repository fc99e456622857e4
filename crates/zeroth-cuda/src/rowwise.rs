//! Row-wise kernels: embedding, RMSNorm, and column sums. Rows that are 16-byte aligned and a multiple of [`VEC`] wide have faster,
//! vectorized kernels.

use super::driver::Address;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel, stored_in_f32};
use super::launch_context::{LaunchContext, THREADS, VEC, WARP, aligned16, float};
use zeroth_kernel::{DeviceError, Span};
use zeroth_kernel::{EmbeddingDims, MAX_CLAMPED, RmsNormDims};

/// Vectors of a row per thread (`VECS` in rowwise.cu).
const VECS: usize = 4;
/// Rows per thread of the scalar column sums (`BLOCK_ROWS` in rowwise.cu).
const COLUMN_ROWS: usize = 64;
/// Largest grid of the gradient of a norm.
const MAX_BLOCKS: usize = 512;

/// Partition of rows over threads in the vectorized kernels. It depends on the width alone, and with it the order of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowPartition {
    /// Threads per row, a power of two.
    pub(super) row_threads: usize,
}

impl RowPartition {
    /// `None` if the width is not a multiple of [`VEC`], or too large.
    pub(super) fn new(width: usize) -> Option<Self> {
        let row_threads = (width / VEC).div_ceil(VECS).next_power_of_two();
        let fits = width > 0 && width.is_multiple_of(VEC) && row_threads <= THREADS as usize;
        fits.then_some(Self { row_threads })
    }

    /// Rows that a block processes side by side.
    pub(super) const fn rows_per_pass(self) -> usize {
        THREADS as usize / self.row_threads
    }

    /// Rows per block, and blocks, of the gradient kernels.
    pub(super) fn gradient_blocks(self, rows: usize) -> (usize, usize) {
        let block_rows =
            rows.div_ceil(MAX_BLOCKS).max(4 * self.rows_per_pass()).next_multiple_of(self.rows_per_pass());
        (block_rows, rows.div_ceil(block_rows))
    }
}

/// The ids of `rows` rows; the span may be longer.
fn first_of(ids: Span, rows: usize) -> Span {
    Span { bytes: ids.bytes.min(4 * rows as u64), ..ids }
}

pub(super) fn embedding(
    cx: &LaunchContext,
    dims: EmbeddingDims,
    rows: usize,
    [ids, table, y]: [Span; 3],
) -> Result<(), DeviceError> {
    let ids = cx.words("ids", first_of(ids, rows), rows)?;
    let table = cx.typed("table", table, dims.vocab * dims.width)?;
    let y = cx.typed("y", y, rows * dims.width)?;
    let arguments = [ids, table, y, dims.vocab as u64, dims.width as u64];
    cx.run(EntryPoint::Embedding, &[cx.dtype], [rows, 1, 1], THREADS, &arguments)
}

pub(super) fn embedding_backward(
    cx: &LaunchContext,
    dims: EmbeddingDims,
    rows: usize,
    [ids, dy, dtable]: [Span; 3],
) -> Result<(), DeviceError> {
    let ids = cx.words("ids", first_of(ids, rows), rows)?;
    let dy = cx.typed("dy", dy, rows * dims.width)?;
    let dtable = cx.words("dtable", dtable, dims.vocab * dims.width)?;
    let arguments = [ids, dy, dtable, rows as u64, dims.vocab as u64, dims.width as u64];
    let (entry, columns) = if dims.width.is_multiple_of(VEC) && aligned16(&[dy]) {
        (EntryPoint::EmbeddingBackwardVec, VEC)
    } else {
        (EntryPoint::EmbeddingBackward, 1)
    };
    let grid = [rows, dims.width.div_ceil(columns * THREADS as usize), 1];
    cx.run(entry, &[cx.dtype], grid, THREADS, &arguments)
}

/// Adds the column sums of dy to `total`; with h and rstd, those of dy · h · rstd.
pub(super) fn sum_columns(
    cx: &mut LaunchContext,
    dy: Address,
    norm: Option<(Address, Address)>,
    [rows, width]: [usize; 2],
    total: Address,
) -> Result<(), DeviceError> {
    let partials = cx.scratch.take(column_sums(rows, width))?;
    let ((h, rstd), blocks) = (norm.unwrap_or((0, 0)), rows.div_ceil(COLUMN_ROWS));
    let grid = [blocks, width.div_ceil(THREADS as usize), 1];
    let arguments = [dy, h, rstd, partials, rows as u64, width as u64];
    cx.run(EntryPoint::ColumnSums, &[cx.dtype], grid, THREADS, &arguments)?;
    add_column_sums(cx, partials, total, [blocks, width])
}

/// Bytes of the first level of column sums, for the scalar and the vectorized kernels.
pub(super) fn column_sums(rows: usize, width: usize) -> u64 {
    let blocks = RowPartition::new(width).map_or(0, |partition| partition.gradient_blocks(rows).1);
    4 * (blocks.max(rows.div_ceil(COLUMN_ROWS)) * width) as u64
}

pub(super) fn add_column_sums(
    cx: &LaunchContext,
    partials: Address,
    total: Address,
    [blocks, width]: [usize; 2],
) -> Result<(), DeviceError> {
    let grid = [width.div_ceil(WARP as usize), 1, 1];
    cx.run(EntryPoint::AddColumnSums, &[], grid, WARP * WARP, &[partials, total, blocks as u64, width as u64])
}

pub(super) fn norm(
    cx: &LaunchContext,
    dims: RmsNormDims,
    x: Span,
    residual: Option<(Span, Span)>,
    [w, y, rstd]: [Span; 3],
) -> Result<(), DeviceError> {
    let elements = dims.rows * dims.width;
    let x = cx.typed("x", x, elements)?;
    let (residual, h) = match residual {
        Some((residual, h)) => (cx.typed("residual", residual, elements)?, cx.typed("h", h, elements)?),
        None => (0, 0),
    };
    let (w, y) = (cx.typed("w", w, dims.width)?, cx.typed("y", y, elements)?);
    let rstd = cx.words("rstd", rstd, dims.rows)?;
    let (rows, width, eps) = (dims.rows as u64, dims.width as u64, float(dims.eps));
    let limit = float(if dims.clamp { MAX_CLAMPED } else { f32::INFINITY });
    if let Some(partition) = RowPartition::new(dims.width).filter(|_| aligned16(&[x, residual, w, h, y])) {
        let row_threads = partition.row_threads as u64;
        let arguments = [x, residual, w, h, y, rstd, rows, width, eps, row_threads, limit];
        let grid = [dims.rows.div_ceil(partition.rows_per_pass()), 1, 1];
        return cx.run(EntryPoint::RmsNormVec, &[cx.dtype], grid, THREADS, &arguments);
    }
    let arguments = [x, residual, w, h, y, rstd, rows, width, eps, limit];
    cx.run_rowwise(EntryPoint::RmsNorm, dims.rows, &arguments)
}

pub(super) fn norm_backward(
    cx: &mut LaunchContext,
    dims: RmsNormDims,
    [dy, h, rstd, w]: [Span; 4],
    residual: Option<Span>,
    dh: Option<Span>,
    dw: Option<Span>,
) -> Result<(), DeviceError> {
    let elements = dims.rows * dims.width;
    let (dy, h) = (cx.typed("dy", dy, elements)?, cx.typed("h", h, elements)?);
    let (rstd, w) = (cx.words("rstd", rstd, dims.rows)?, cx.typed("w", w, dims.width)?);
    let residual =
        residual.map(|residual| cx.typed("residual", residual, elements)).transpose()?.unwrap_or(0);
    let dh = dh.map(|dh| cx.typed("dh", dh, elements)).transpose()?;
    let dw = dw.map(|dw| cx.words("dw", dw, dims.width)).transpose()?;
    norm_gradients(cx, dims, [dy, h, rstd, w, residual], dh, dw)
}

/// The gradients of a norm, of checked operands; one without a destination is skipped. A residual of 0 is none.
pub(super) fn norm_gradients(
    cx: &mut LaunchContext,
    dims: RmsNormDims,
    [dy, h, rstd, w, residual]: [Address; 5],
    dh: Option<Address>,
    dw: Option<Address>,
) -> Result<(), DeviceError> {
    let (rows, width) = (dims.rows as u64, dims.width as u64);
    let operands = [dy, h, w, residual, dh.unwrap_or(0)];
    let Some(partition) = RowPartition::new(dims.width).filter(|_| aligned16(&operands)) else {
        // Column sums first: dh may alias dy or h.
        if let Some(dw) = dw {
            sum_columns(cx, dy, Some((h, rstd)), [dims.rows, dims.width], dw)?;
        }
        return match dh {
            Some(dh) => {
                let arguments = [dy, h, rstd, w, residual, dh, rows, width];
                cx.run_rowwise(EntryPoint::RmsNormBackward, dims.rows, &arguments)
            }
            None => Ok(()),
        };
    };
    // The kernel skips a gradient whose address is null.
    let partials = match dw {
        Some(_) => cx.scratch.take(column_sums(dims.rows, dims.width))?,
        None => 0,
    };
    let dh = dh.unwrap_or(0);
    let ((block_rows, blocks), row_threads) =
        (partition.gradient_blocks(dims.rows), partition.row_threads as u64);
    let arguments = [dy, h, rstd, w, residual, dh, partials, rows, width, row_threads, block_rows as u64];
    cx.run(EntryPoint::RmsNormBackwardVec, &[cx.dtype], [blocks, 1, 1], THREADS, &arguments)?;
    dw.map_or(Ok(()), |dw| add_column_sums(cx, partials, dw, [blocks, dims.width]))
}

cuda_kernel!(Embedding { dims, rows, ids, table, y }, |_| NO_SCRATCH, |cx| embedding(
    cx,
    dims,
    rows,
    [ids, table, y]
));

cuda_kernel!(EmbeddingBackward { dims, rows, ids, dy, dtable, tied_rows }, |_| NO_SCRATCH, |cx| {
    if tied_rows.is_some() {
        return Err(stored_in_f32(cx));
    }
    embedding_backward(cx, dims, rows, [ids, dy, dtable])
});

cuda_kernel!(LinearDb { dims, dy, db }, |_| [column_sums(dims.rows, dims.outputs), 0, 0], |cx| {
    let dy = cx.typed("dy", dy, dims.rows * dims.outputs)?;
    let db = cx.words("db", db, dims.outputs)?;
    sum_columns(cx, dy, None, [dims.rows, dims.outputs], db)
});

cuda_kernel!(RmsNorm { dims, x, w, y, rstd }, |_| NO_SCRATCH, |cx| norm(cx, dims, x, None, [w, y, rstd]));

cuda_kernel!(AddRmsNorm { dims, x, residual, w, h, y, rstd }, |_| NO_SCRATCH, |cx| norm(
    cx,
    dims,
    x,
    Some((residual, h)),
    [w, y, rstd]
));

cuda_kernel!(
    RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw },
    |_| if dw.is_some() { [column_sums(dims.rows, dims.width), 0, 0] } else { NO_SCRATCH },
    |cx| norm_backward(cx, dims, [dy, h, rstd, w], residual, dh, dw)
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_per_row_follow_the_width() {
        let partition = |width| {
            RowPartition::new(width).map(|partition| [partition.row_threads, partition.rows_per_pass()])
        };
        assert_eq!(partition(8), Some([1, 256]));
        assert_eq!(partition(128), Some([4, 64]));
        assert_eq!(partition(1024), Some([32, 8]));
        assert_eq!(partition(5120), Some([256, 1]));
        assert_eq!(partition(8192), Some([256, 1]));
        assert_eq!((partition(0), partition(20), partition(8200)), (None, None, None));
    }

    #[test]
    fn gradient_blocks_cover_all_rows() {
        for (rows, width) in [(1, 8), (33, 128), (16_384, 1024), (262_144, 128), (5000, 8192)] {
            let partition = RowPartition::new(width).unwrap();
            let (block_rows, blocks) = partition.gradient_blocks(rows);
            assert!(block_rows.is_multiple_of(partition.rows_per_pass()) && block_rows * blocks >= rows);
            assert!(block_rows * (blocks - 1) < rows && blocks <= MAX_BLOCKS, "{rows} {width}");
        }
    }
}
