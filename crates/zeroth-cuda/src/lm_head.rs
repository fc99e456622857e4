//! The LM head: logits, cross-entropy and gradients, one slice of rows at a time, so that the logits of a micro-batch are never all
//! in memory.
//!
//! Logits are rounded to the run's data type, as in PyTorch, and their gradients overwrite them. The softmax sums in f32.

use std::mem::offset_of;

use zeroth_base::DType;

use super::attention::starts_of;
use super::driver::Address;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{cuda_kernel, stored_in_f32};
use super::launch_context::{LaunchContext, THREADS as COPY_THREADS};
use super::matmuls::{Matmul, Matmuls, Matrix};
use super::scratch::{WORKSPACE, logits_row_stride, slice_rows};
use zeroth_kernel::{Control, DeviceError, GradStore, HeadLossDims, HeadLossDw, LogitsDims, Span};

/// Threads per row of logits, and of the sum of losses (`THREADS` in cross_entropy.cu).
pub(super) const THREADS: u32 = 1024;

/// The gradients to compute; one without a destination is skipped.
pub(super) struct HeadGradients {
    pub(super) loss_weight: Span,
    pub(super) control: Span,
    pub(super) dx: Option<Span>,
    /// dw, and whether to add to it.
    pub(super) dw: Option<(Span, bool)>,
}

/// The loss and, with `gradients`, those.
pub(super) fn loss(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    dims: HeadLossDims,
    [x, w, labels, loss]: [Span; 4],
    gradients: Option<HeadGradients>,
) -> Result<(), DeviceError> {
    let HeadLossDims { rows, hidden, vocab, .. } = dims;
    let dtype = cx.dtype;
    let (x, w) = (cx.typed("x", x, rows * hidden)?, cx.typed("w", w, vocab * hidden)?);
    let (labels, loss) = (cx.words("labels", labels, rows)?, cx.structure::<f64>("loss", loss)?);
    // Without gradients the cross-entropy leaves the logits as they are.
    let (mut scales, mut dx, mut dw) = ([0; 2], None, None);
    if let Some(gradients) = gradients {
        let HeadGradients { loss_weight, control, .. } = gradients;
        let loss_weight = cx.structure::<f64>("loss_weight", loss_weight)?;
        let control = cx.structure::<Control>("control", control)? + offset_of!(Control, loss_scale) as u64;
        dx = gradients.dx.map(|dx| cx.typed("dx", dx, rows * hidden)).transpose()?;
        if let Some((to, add)) = gradients.dw {
            dw = Some((cx.words("dw", to, vocab * hidden)?, add));
        }
        if dx.is_some() || dw.is_some() {
            scales = [loss_weight, control];
        }
    }
    if let (0, Some((dw, false))) = (rows, dw) {
        cx.driver.set_bytes(dw, 0, 4 * (vocab * hidden) as u64, cx.stream)?;
    }
    let (row_stride, slice) = (logits_row_stride(dims), slice_rows(dims, dtype));
    let workspace = cx.scratch.take(WORKSPACE)?;
    let logits = cx.scratch.take((slice * row_stride) as u64 * dtype.bytes())?;
    let losses = cx.scratch.take(4 * rows as u64)?;
    let head = SliceMatmuls { dims, workspace, logits, row_stride, x, w, dx, dw };
    for first in (0..rows).step_by(slice.max(1)) {
        let count = slice.min(rows - first);
        head.logits(cx, matmuls, first, count)?;
        let at = 4 * first as u64;
        let [weight, scale] = scales;
        let arguments = [logits, row_stride as u64, labels + at, losses + at, vocab as u64, weight, scale];
        cx.run(EntryPoint::CrossEntropy, &[dtype], [count, 1, 1], THREADS, &arguments)?;
        head.gradients(cx, matmuls, first, count)?;
    }
    cx.run(EntryPoint::SumLosses, &[], [1; 3], THREADS, &[losses, rows as u64, loss])
}

/// The matmuls of a head over slices of its rows.
pub(super) struct SliceMatmuls {
    pub(super) dims: HeadLossDims,
    pub(super) workspace: Address,
    /// A slice's logits, and later their gradient.
    pub(super) logits: Address,
    pub(super) row_stride: usize,
    pub(super) x: Address,
    pub(super) w: Address,
    pub(super) dx: Option<Address>,
    /// dw, and whether to add to it.
    pub(super) dw: Option<(Address, bool)>,
}

impl SliceMatmuls {
    /// The address of row `first` of x or dx.
    fn row(&self, cx: &LaunchContext, at: Address, first: usize) -> Address {
        at + (first * self.dims.hidden) as u64 * cx.dtype.bytes()
    }

    fn forward(&self, cx: &LaunchContext, first: usize, count: usize) -> Matmul {
        let HeadLossDims { hidden, vocab, .. } = self.dims;
        Matmul {
            size: [count, vocab, hidden],
            p: Matrix::rows(self.row(cx, self.x, first), hidden),
            q: Matrix::transposed(self.w, hidden),
            from: cx.dtype,
            d: Matrix::rows(self.logits, self.row_stride),
            to: cx.dtype,
            bias: None,
            scale: 1.0,
            add: false,
        }
    }

    /// The logits of `count` rows.
    pub(super) fn logits(
        &self,
        cx: &mut LaunchContext,
        matmuls: &mut Matmuls,
        first: usize,
        count: usize,
    ) -> Result<(), DeviceError> {
        matmuls.enqueue(cx, &self.forward(cx, first, count), self.workspace)
    }

    /// Multiplies the gradient of the logits of `count` rows into dx and dw.
    pub(super) fn gradients(
        &self,
        cx: &mut LaunchContext,
        matmuls: &mut Matmuls,
        first: usize,
        count: usize,
    ) -> Result<(), DeviceError> {
        let HeadLossDims { hidden, vocab, .. } = self.dims;
        if let Some(dx) = self.dx {
            let input_grad = Matmul {
                size: [count, hidden, vocab],
                p: Matrix::rows(self.logits, self.row_stride),
                q: Matrix::rows(self.w, hidden),
                d: Matrix::rows(self.row(cx, dx, first), hidden),
                ..self.forward(cx, first, count)
            };
            matmuls.enqueue(cx, &input_grad, self.workspace)?;
        }
        if let Some((dw, add)) = self.dw {
            let weight_grad = Matmul {
                size: [vocab, hidden, count],
                p: Matrix::transposed(self.logits, self.row_stride),
                q: Matrix::rows(self.row(cx, self.x, first), hidden),
                d: Matrix::rows(dw, hidden),
                to: DType::F32,
                add: add || first > 0,
                ..self.forward(cx, first, count)
            };
            matmuls.enqueue(cx, &weight_grad, self.workspace)?;
        }
        Ok(())
    }
}

/// Logits of the last row of each sequence.
pub(super) fn logits(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    dims: LogitsDims,
    starts: Span,
    [x, w]: [Span; 2],
    logits: Span,
) -> Result<(), DeviceError> {
    let LogitsDims { rows, sequences, hidden, vocab, .. } = dims;
    let dtype = cx.dtype;
    let [starts, capacity] = starts_of(cx, starts)?;
    let (x, w) = (cx.typed("x", x, rows * hidden)?, cx.typed("w", w, vocab * hidden)?);
    let logits = cx.words("logits", logits, sequences * vocab)?;
    let workspace = cx.scratch.take(WORKSPACE)?;
    let last = cx.scratch.take((sequences * hidden) as u64 * dtype.bytes())?;
    let arguments = [starts, capacity, x, last, rows as u64, hidden as u64];
    cx.run(EntryPoint::GatherLastRows, &[dtype], [sequences, 1, 1], COPY_THREADS, &arguments)?;
    let forward = Matmul {
        size: [sequences, vocab, hidden],
        p: Matrix::rows(last, hidden),
        q: Matrix::transposed(w, hidden),
        from: dtype,
        d: Matrix::rows(logits, vocab),
        to: DType::F32,
        bias: None,
        scale: 1.0,
        add: false,
    };
    matmuls.enqueue(cx, &forward, workspace)
}

/// Whether the gradient of the weight is rounded as it is stored, or leaves rows to the embedding.
pub(super) const fn is_rounded(dw: HeadLossDw) -> bool {
    matches!(dw.store, GradStore::Round { .. }) || dw.tied_rows.is_some()
}

fn head_scratch(dims: HeadLossDims, dtype: DType) -> [u64; 3] {
    let logits = dtype.bytes() * (slice_rows(dims, dtype) * logits_row_stride(dims)) as u64;
    // One loss per row.
    [WORKSPACE, logits, 4 * dims.rows as u64]
}

cuda_kernel!(HeadLoss { dims, x, w, labels, loss }, |dtype| head_scratch(dims, dtype), |cx, libraries| {
    self::loss(cx, libraries.matmuls, dims, [x, w, labels, loss], None)
});

cuda_kernel!(
    HeadLossBackward { dims, x, w, labels, loss, loss_weight, control, dx, dw },
    |dtype| head_scratch(dims, dtype),
    |cx, libraries| {
        if dw.is_some_and(is_rounded) {
            return Err(stored_in_f32(cx));
        }
        let dw = dw.map(|dw| (dw.to, dw.store == GradStore::Add));
        let gradients = HeadGradients { loss_weight, control, dx, dw };
        self::loss(cx, libraries.matmuls, dims, [x, w, labels, loss], Some(gradients))
    }
);

cuda_kernel!(
    Logits { dims, starts, x, w, logits },
    |dtype| [WORKSPACE, (dims.sequences * dims.hidden) as u64 * dtype.bytes(), 0],
    |cx, libraries| self::logits(cx, libraries.matmuls, dims, starts, [x, w], logits)
);
