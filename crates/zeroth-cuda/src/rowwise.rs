//! Kernels by rows: embedding, root-mean-square norm, and sums of columns. Rows of whole lots at multiples of 16 bytes have
//! faster forms.

use super::driver::Address;
use super::line::{LOT, Line, THREADS, WARP, float, in_sixteens};
use super::programs::Entry;
use super::scratch::{COLUMN_ROWS, column_sums};
use zeroth_kernel::{DeviceError, Span};
use zeroth_kernel::{EmbeddingDims, RmsNormDims};

/// Lots of a row that a thread has; the kernels count on it.
const LOTS: usize = 4;
/// The most blocks that share the rows of a norm's gradient.
const BLOCKS: usize = 512;

/// How rows of whole lots are shared out. It depends on sizes alone, and so do the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spans {
    /// Threads of a row.
    pub(super) span: usize,
}

impl Spans {
    /// `None` where rows are no whole lots, or too wide.
    pub(super) fn of(width: usize) -> Option<Self> {
        let span = (width / LOT).div_ceil(LOTS).next_power_of_two();
        let fits = width > 0 && width.is_multiple_of(LOT) && span <= THREADS as usize;
        fits.then_some(Self { span })
    }

    /// Rows that a block has beside each other.
    pub(super) const fn slots(self) -> usize {
        THREADS as usize / self.span
    }

    /// Rows of a block of the gradient, and blocks.
    pub(super) fn gradient(self, rows: usize) -> (usize, usize) {
        let of_block = rows.div_ceil(BLOCKS).max(4 * self.slots()).next_multiple_of(self.slots());
        (of_block, rows.div_ceil(of_block))
    }
}

/// As many ids as there are rows; more may lie behind them.
fn first_of(ids: Span, rows: usize) -> Span {
    Span { bytes: ids.bytes.min(4 * rows as u64), ..ids }
}

pub(super) fn embedding(
    line: &Line,
    dims: EmbeddingDims,
    rows: usize,
    [ids, table, y]: [Span; 3],
) -> Result<(), DeviceError> {
    let ids = line.words("ids", first_of(ids, rows), rows)?;
    let table = line.typed("table", table, dims.vocab * dims.width)?;
    let y = line.typed("y", y, rows * dims.width)?;
    let arguments = [ids, table, y, dims.vocab as u64, dims.width as u64];
    line.run(Entry::Embedding, &[line.dtype], [rows, 1, 1], THREADS, &arguments)
}

pub(super) fn embedding_backward(
    line: &Line,
    dims: EmbeddingDims,
    rows: usize,
    [ids, dy, dtable]: [Span; 3],
) -> Result<(), DeviceError> {
    let ids = line.words("ids", first_of(ids, rows), rows)?;
    let dy = line.typed("dy", dy, rows * dims.width)?;
    let dtable = line.words("dtable", dtable, dims.vocab * dims.width)?;
    let arguments = [ids, dy, dtable, rows as u64, dims.vocab as u64, dims.width as u64];
    let (entry, columns) = if dims.width.is_multiple_of(LOT) && in_sixteens(&[dy]) {
        (Entry::EmbeddingBackwardLots, LOT)
    } else {
        (Entry::EmbeddingBackward, 1)
    };
    let grid = [rows, dims.width.div_ceil(columns * THREADS as usize), 1];
    line.run(entry, &[line.dtype], grid, THREADS, &arguments)
}

/// Adds the sums of columns to `total`; with h and rstd, of the norm's terms.
pub(super) fn sum_columns(
    line: &mut Line,
    dy: Address,
    norm: Option<(Address, Address)>,
    [rows, width]: [usize; 2],
    total: Address,
) -> Result<(), DeviceError> {
    let partials = line.scratch.take(column_sums(rows, width))?;
    let ((h, rstd), blocks) = (norm.unwrap_or((0, 0)), rows.div_ceil(COLUMN_ROWS));
    let grid = [blocks, width.div_ceil(THREADS as usize), 1];
    let arguments = [dy, h, rstd, partials, rows as u64, width as u64];
    line.run(Entry::ColumnSums, &[line.dtype], grid, THREADS, &arguments)?;
    add_column_sums(line, partials, total, [blocks, width])
}

pub(super) fn add_column_sums(
    line: &Line,
    partials: Address,
    total: Address,
    [blocks, width]: [usize; 2],
) -> Result<(), DeviceError> {
    let grid = [width.div_ceil(WARP as usize), 1, 1];
    line.run(Entry::AddColumnSums, &[], grid, WARP * WARP, &[partials, total, blocks as u64, width as u64])
}

pub(super) fn norm(
    line: &Line,
    dims: RmsNormDims,
    x: Span,
    residual: Option<(Span, Span)>,
    [w, y, rstd]: [Span; 3],
) -> Result<(), DeviceError> {
    let elements = dims.rows * dims.width;
    let x = line.typed("x", x, elements)?;
    let (residual, h) = match residual {
        Some((residual, h)) => (line.typed("residual", residual, elements)?, line.typed("h", h, elements)?),
        None => (0, 0),
    };
    let (w, y) = (line.typed("w", w, dims.width)?, line.typed("y", y, elements)?);
    let rstd = line.words("rstd", rstd, dims.rows)?;
    let (rows, width, eps) = (dims.rows as u64, dims.width as u64, float(dims.eps));
    match Spans::of(dims.width).filter(|_| in_sixteens(&[x, residual, w, h, y])) {
        Some(spans) => {
            let arguments = [x, residual, w, h, y, rstd, rows, width, eps, spans.span as u64];
            let grid = [dims.rows.div_ceil(spans.slots()), 1, 1];
            line.run(Entry::RmsNormLots, &[line.dtype], grid, THREADS, &arguments)
        }
        None => line.warps(Entry::RmsNorm, dims.rows, &[x, residual, w, h, y, rstd, rows, width, eps]),
    }
}

/// `operands`: dy, h, rstd and w.
pub(super) fn norm_backward(
    line: &mut Line,
    dims: RmsNormDims,
    [dy, h, rstd, w]: [Span; 4],
    residual: Option<Span>,
    [dh, dw]: [Span; 2],
) -> Result<(), DeviceError> {
    let elements = dims.rows * dims.width;
    let (dy, h) = (line.typed("dy", dy, elements)?, line.typed("h", h, elements)?);
    let (rstd, w) = (line.words("rstd", rstd, dims.rows)?, line.typed("w", w, dims.width)?);
    let residual =
        residual.map(|residual| line.typed("residual", residual, elements)).transpose()?.unwrap_or(0);
    let (dh, dw) = (line.typed("dh", dh, elements)?, line.words("dw", dw, dims.width)?);
    let (rows, width) = (dims.rows as u64, dims.width as u64);
    let Some(spans) = Spans::of(dims.width).filter(|_| in_sixteens(&[dy, h, w, residual, dh])) else {
        // Columns first: dh may lie where dy or h does.
        sum_columns(line, dy, Some((h, rstd)), [dims.rows, dims.width], dw)?;
        return line.warps(Entry::RmsNormBackward, dims.rows, &[dy, h, rstd, w, residual, dh, rows, width]);
    };
    let partials = line.scratch.take(column_sums(dims.rows, dims.width))?;
    let ((of_block, blocks), span) = (spans.gradient(dims.rows), spans.span as u64);
    let arguments = [dy, h, rstd, w, residual, dh, partials, rows, width, span, of_block as u64];
    line.run(Entry::RmsNormBackwardLots, &[line.dtype], [blocks, 1, 1], THREADS, &arguments)?;
    add_column_sums(line, partials, dw, [blocks, dims.width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_as_many_threads_as_its_lots_need() {
        let spans = |width| Spans::of(width).map(|spans| [spans.span, spans.slots()]);
        assert_eq!(spans(8), Some([1, 256]));
        assert_eq!(spans(128), Some([4, 64]));
        assert_eq!(spans(1024), Some([32, 8]));
        assert_eq!(spans(5120), Some([256, 1]));
        assert_eq!(spans(8192), Some([256, 1]));
        assert_eq!((spans(0), spans(20), spans(8200)), (None, None, None));
    }

    #[test]
    fn blocks_of_a_gradient_have_all_rows() {
        for (rows, width) in [(1, 8), (33, 128), (16_384, 1024), (262_144, 128), (5000, 8192)] {
            let spans = Spans::of(width).unwrap();
            let (of_block, blocks) = spans.gradient(rows);
            assert!(of_block.is_multiple_of(spans.slots()) && of_block * blocks >= rows);
            assert!(of_block * (blocks - 1) < rows && blocks <= BLOCKS, "{rows} {width}");
        }
    }
}
