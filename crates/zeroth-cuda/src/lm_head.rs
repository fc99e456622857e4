//! The head on a card: a slice's logits in scratch, its softmax, and its gradients, before the next slice.
//!
//! Logits are rounded to the run's type, as PyTorch's are, and so are their gradients, in the same memory: products read one
//! type. Sums of the softmax are in f32.

use std::mem::offset_of;

use zeroth_base::DType;

use super::attention::starts_of;
use super::line::{Line, THREADS as COPYING};
use super::products::{Matrix, Products, Task};
use super::programs::Entry;
use super::scratch::{WORKSPACE, logits_pitch, slice_rows};
use zeroth_kernel::{Control, DeviceError, Span, StepInput};
use zeroth_kernel::{HeadLossDims, LogitsDims};

/// Threads of a row of logits, and of the sum of losses; the kernels count on it.
const THREADS: u32 = 1024;

/// `backward`: input, control, dx and dw, and whether dw is added to what is there.
pub(super) fn run(
    line: &mut Line,
    products: &mut Products,
    dims: HeadLossDims,
    [x, w, labels, loss]: [Span; 4],
    backward: Option<([Span; 4], bool)>,
) -> Result<(), DeviceError> {
    let HeadLossDims { rows, hidden, vocab } = dims;
    let dtype = line.dtype;
    let (x, w) = (line.typed("x", x, rows * hidden)?, line.typed("w", w, vocab * hidden)?);
    let (labels, loss) = (line.words("labels", labels, rows)?, line.one::<f64>("loss", loss)?);
    let add = backward.is_some_and(|(_, add)| add);
    let backward = match backward {
        Some(([input, control, dx, dw], _)) => Some([
            line.one::<StepInput>("input", input)? + offset_of!(StepInput, loss_weight) as u64,
            line.one::<Control>("control", control)? + offset_of!(Control, loss_scale) as u64,
            line.typed("dx", dx, rows * hidden)?,
            line.words("dw", dw, vocab * hidden)?,
        ]),
        None => None,
    };
    if let Some([.., dw]) = backward
        && !add
        && rows == 0
    {
        line.driver.set_bytes(dw, 0, 4 * (vocab * hidden) as u64, line.stream)?;
    }
    let (pitch, slice) = (logits_pitch(dims), slice_rows(dims, dtype));
    let workspace = line.scratch.take(WORKSPACE)?;
    let logits = line.scratch.take((slice * pitch) as u64 * dtype.bytes())?;
    let losses = line.scratch.take(4 * rows as u64)?;
    for first in (0..rows).step_by(slice.max(1)) {
        let count = slice.min(rows - first);
        let x = x + (first * hidden) as u64 * dtype.bytes();
        let product = Task {
            size: [count, vocab, hidden],
            p: Matrix::rows(x, hidden),
            q: Matrix::transposed(w, hidden),
            from: dtype,
            d: Matrix::rows(logits, pitch),
            to: dtype,
            bias: None,
            add: false,
        };
        products.multiply(line, &product, workspace)?;
        let at = 4 * first as u64;
        let [weight, scale] = backward.map_or([0; 2], |[weight, scale, ..]| [weight, scale]);
        let arguments = [logits, pitch as u64, labels + at, losses + at, vocab as u64, weight, scale];
        line.run(Entry::SoftmaxLoss, &[dtype], [count, 1, 1], THREADS, &arguments)?;
        if let Some([_, _, dx, dw]) = backward {
            let to_x = Task {
                size: [count, hidden, vocab],
                p: Matrix::rows(logits, pitch),
                q: Matrix::rows(w, hidden),
                d: Matrix::rows(dx + (first * hidden) as u64 * dtype.bytes(), hidden),
                ..product
            };
            products.multiply(line, &to_x, workspace)?;
            let to_w = Task {
                size: [vocab, hidden, count],
                p: Matrix::transposed(logits, pitch),
                q: Matrix::rows(x, hidden),
                d: Matrix::rows(dw, hidden),
                to: DType::F32,
                add: add || first > 0,
                ..product
            };
            products.multiply(line, &to_w, workspace)?;
        }
    }
    line.run(Entry::SumLosses, &[], [1; 3], THREADS, &[losses, rows as u64, loss])
}

/// The last row of each sequence, brought together and projected.
pub(super) fn logits(
    line: &mut Line,
    products: &mut Products,
    dims: LogitsDims,
    starts: Span,
    [x, w]: [Span; 2],
    logits: Span,
) -> Result<(), DeviceError> {
    let LogitsDims { rows, sequences, hidden, vocab } = dims;
    let dtype = line.dtype;
    let [starts, room] = starts_of(line, starts)?;
    let (x, w) = (line.typed("x", x, rows * hidden)?, line.typed("w", w, vocab * hidden)?);
    let logits = line.words("logits", logits, sequences * vocab)?;
    let workspace = line.scratch.take(WORKSPACE)?;
    let last = line.scratch.take((sequences * hidden) as u64 * dtype.bytes())?;
    let arguments = [starts, room, x, last, rows as u64, hidden as u64];
    line.run(Entry::LastRows, &[dtype], [sequences, 1, 1], COPYING, &arguments)?;
    let product = Task {
        size: [sequences, vocab, hidden],
        p: Matrix::rows(last, hidden),
        q: Matrix::transposed(w, hidden),
        from: dtype,
        d: Matrix::rows(logits, vocab),
        to: DType::F32,
        bias: None,
        add: false,
    };
    products.multiply(line, &product, workspace)
}
