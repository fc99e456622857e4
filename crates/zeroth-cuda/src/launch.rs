//! Launches of matmuls, gradient norms and the optimizer.

use zeroth_base::DType;

use super::cublaslt::dtype_index;
use super::entry_points::EntryPoint;
use super::gpu_kernel::{CudaKernel, Libraries, NO_SCRATCH, cuda_kernel};
use super::launch_context::{LaunchContext, THREADS};
use super::matmuls::{Matmul, Matmuls, Matrix};
use super::scratch::{WORKSPACE, blocks, exact_sums};
use zeroth_kernel::{
    CacheRange, Control, DeviceError, ExactSum, GROUPS, GradStore, LOSSES, LinearDims, MOMENTS, MasterForm,
    Moment, Optimizer, Recipe, Record, Rounding, RowKey, Span, StepInput, operands,
};

/// The product with the weight: with a bias, or added to y times a factor.
pub(super) fn linear(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    LinearDims { rows, inputs, outputs, .. }: LinearDims,
    [x, w, y]: [Span; 3],
    bias: Option<Span>,
    added: Option<f32>,
) -> Result<(), DeviceError> {
    let (from, workspace) = (cx.dtype, cx.scratch.take(WORKSPACE)?);
    let matmul = Matmul {
        size: [rows, outputs, inputs],
        p: Matrix::rows(cx.typed("x", x, rows * inputs)?, inputs),
        q: Matrix::transposed(cx.typed("w", w, outputs * inputs)?, inputs),
        from,
        d: Matrix::rows(cx.typed("y", y, rows * outputs)?, outputs),
        to: from,
        bias: bias.map(|bias| cx.typed("bias", bias, outputs)).transpose()?,
        scale: added.unwrap_or(1.0),
        add: added.is_some(),
    };
    matmuls.enqueue(cx, &matmul, workspace)
}

pub(super) fn linear_dx(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    LinearDims { rows, inputs, outputs, .. }: LinearDims,
    [dy, w, dx]: [Span; 3],
    scale: f32,
    add: bool,
) -> Result<(), DeviceError> {
    let (from, workspace) = (cx.dtype, cx.scratch.take(WORKSPACE)?);
    let matmul = Matmul {
        size: [rows, inputs, outputs],
        p: Matrix::rows(cx.typed("dy", dy, rows * outputs)?, outputs),
        q: Matrix::rows(cx.typed("w", w, outputs * inputs)?, inputs),
        from,
        d: Matrix::rows(cx.typed("dx", dx, rows * inputs)?, inputs),
        to: from,
        bias: None,
        scale,
        add,
    };
    matmuls.enqueue(cx, &matmul, workspace)
}

pub(super) fn linear_dw(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    LinearDims { rows, inputs, outputs, .. }: LinearDims,
    [dy, x, dw]: [Span; 3],
    scale: f32,
    store: GradStore,
) -> Result<(), DeviceError> {
    let (from, to, workspace) = (cx.dtype, to_type(store), cx.scratch.take(WORKSPACE)?);
    let matmul = Matmul {
        size: [outputs, inputs, rows],
        p: Matrix::transposed(cx.typed("dy", dy, rows * outputs)?, outputs),
        q: Matrix::rows(cx.typed("x", x, rows * inputs)?, inputs),
        from,
        d: Matrix::rows(cx.sized("dw", dw, outputs * inputs, to.bytes())?, inputs),
        to,
        bias: None,
        scale,
        add: store == GradStore::Add,
    };
    matmuls.enqueue(cx, &matmul, workspace)?;
    match store {
        GradStore::Round { found_inf, .. } => check_finite(cx, dw, to, found_inf),
        GradStore::Add | GradStore::Write => Ok(()),
    }
}

/// The data type of a stored gradient.
pub(super) const fn to_type(store: GradStore) -> DType {
    match store {
        GradStore::Add | GradStore::Write => DType::F32,
        GradStore::Round { to, .. } => to,
    }
}

pub(super) fn check_finite(
    cx: &LaunchContext,
    values: Span,
    value_type: DType,
    found_inf: Span,
) -> Result<(), DeviceError> {
    let count = cx.count("values", values, value_type)?;
    let values = cx.sized("values", values, count, value_type.bytes())?;
    let found_inf = cx.structure::<u64>("found_inf", found_inf)?;
    cx.run_vectorized(EntryPoint::CheckFinite, &[value_type], count, &[values, count as u64, found_inf])
}

pub(super) fn zero(cx: &LaunchContext, to: Span) -> Result<(), DeviceError> {
    let at = cx.arenas.find(cx.what, to)?;
    if to.bytes == 0 {
        return Ok(());
    }
    cx.driver.set_bytes(at, 0, to.bytes, cx.stream)
}

pub(super) fn squares(
    cx: &mut LaunchContext,
    values: Span,
    value_type: DType,
    sum: Span,
) -> Result<(), DeviceError> {
    let count = cx.count("values", values, value_type)?;
    let values = cx.sized("values", values, count, value_type.bytes())?;
    let sum = cx.structure::<ExactSum>("sum", sum)?;
    let blocks = blocks(count as u64);
    let sums = cx.scratch.take(8 * blocks)?;
    let exact = cx.scratch.take(exact_sums(blocks) * size_of::<ExactSum>() as u64)?;
    let grid = [blocks as usize, 1, 1];
    cx.run(EntryPoint::BlockSquares, &[value_type], grid, THREADS, &[values, count as u64, sums])?;
    // Without elements there are no blocks; the merge then stores 0.
    let parts = exact_sums(blocks);
    cx.run(EntryPoint::ExactSums, &[], [parts as usize, 1, 1], THREADS, &[sums, blocks, exact])?;
    cx.run(EntryPoint::MergeSums, &[], [1; 3], THREADS, &[exact, parts, sum])
}

pub(super) fn control(cx: &LaunchContext, operands: operands::Control) -> Result<(), DeviceError> {
    let operands::Control { ranks, layout, recipe, input, reports, control, record } = operands;
    let recipe = cx.structure::<Recipe>("recipe", recipe)?;
    let input = cx.structure::<StepInput>("input", input)?;
    if layout.losses > LOSSES {
        return Err(
            cx.invalid(format!("a loss of {} parts; a step's input has {LOSSES} weights", layout.losses))
        );
    }
    let reports = cx.sized("reports", reports, ranks * layout.bytes() / 8, 8)?;
    let control = cx.structure::<Control>("control", control)?;
    let words = layout.record_bytes() / 8;
    let record = Span { bytes: record.bytes.min(8 * words as u64), ..record };
    let record = cx.sized("record", record, words, 8)?;
    let [losses, flats, counts] = [layout.losses, layout.flats, layout.counts].map(|count| count as u64);
    let arguments = [ranks as u64, losses, flats, counts, recipe, input, reports, control, record];
    cx.run(EntryPoint::Control, &[], [1; 3], THREADS, &arguments)
}

pub(super) fn optimize(cx: &LaunchContext, operands: operands::Optimize) -> Result<(), DeviceError> {
    let operands::Optimize {
        optimizer,
        group,
        control,
        grads,
        grad_type,
        master,
        master_form,
        moments,
        moment_type,
        rounding,
        weights,
    } = operands;
    if group >= GROUPS {
        return Err(cx.invalid(format!("group {group} of {GROUPS}")));
    }
    if moment_type == DType::F16 {
        return Err(cx.invalid("moments must be fp32 or bf16: fp16 would overflow".to_owned()));
    }
    // SGD without a velocity buffer has no momentum.
    let lacks = |moment: &Moment| moments[*moment as usize].is_none();
    if optimizer != Optimizer::Sgd && optimizer.moments().iter().any(lacks) {
        return Err(cx.invalid(format!("{optimizer:?} needs buffers for its moments; it has {moments:?}")));
    }
    let control = cx.structure::<Control>("control", control)?;
    let count = cx.count("grads", grads, grad_type)?;
    let grads = cx.sized("grads", grads, count, grad_type.bytes())?;
    let has_bf16_weights = weights.is_some() && cx.dtype == DType::Bf16;
    if master_form == MasterForm::LowBits && !has_bf16_weights {
        let problem = format!(
            "master weights split into low-order bits need bf16 weights, and weights are {weights:?}"
        );
        return Err(cx.invalid(problem));
    }
    let master = cx.sized("master", master, count, master_form.bytes())?;
    // Moments that the optimizer does not use are not passed.
    let mut addresses = [0; MOMENTS];
    for &moment in optimizer.moments() {
        if let Some(span) = moments[moment as usize] {
            addresses[moment as usize] = cx.sized(moment.name(), span, count, moment_type.bytes())?;
        }
    }
    let [first, second, third] = addresses;
    let weights = weights.map(|weights| cx.typed("weights", weights, count)).transpose()?.unwrap_or(0);
    let (is_bf16, stochastic) = (u64::from(moment_type == DType::Bf16), u64::from(rounding.is_some()));
    let Rounding { seed, flat, first: at } = rounding.unwrap_or(Rounding { seed: 0, flat: 0, first: 0 });
    let (optimizer, group, flat) = (optimizer as u64, group as u64, u64::from(flat));
    let arguments = [
        optimizer,
        group,
        control,
        grads,
        u64::from(dtype_index(grad_type)),
        master,
        u64::from(master_form == MasterForm::LowBits),
        first,
        second,
        third,
        is_bf16,
        stochastic,
        seed,
        flat,
        at,
        weights,
        u64::from(dtype_index(cx.dtype)),
        count as u64,
    ];
    let entry = if third == 0 { EntryPoint::Optimize } else { EntryPoint::OptimizeWithThird };
    cx.run_vectorized(entry, &[], count, &arguments)
}

// Checked by static_assert in optimizer_step.cu and elementwise.cu, too.
const _: () =
    assert!(size_of::<ExactSum>() == 88 && size_of::<Recipe>() == 168 && size_of::<StepInput>() == 584);
const _: () = assert!(size_of::<Control>() == 216 && size_of::<Record>() == 80);
const _: () = assert!(size_of::<RowKey>() == 16 && size_of::<CacheRange>() == 8);

cuda_kernel!(Linear { dims, x, w, bias, y }, |_| [WORKSPACE, 0, 0], |cx, libraries| linear(
    cx,
    libraries.matmuls,
    dims,
    [x, w, y],
    bias,
    None
));

cuda_kernel!(LinearAdd { dims, scale, x, w, y }, |_| [WORKSPACE, 0, 0], |cx, libraries| linear(
    cx,
    libraries.matmuls,
    dims,
    [x, w, y],
    None,
    Some(scale)
));

cuda_kernel!(LinearDx { dims, scale, add, dy, w, dx }, |_| [WORKSPACE, 0, 0], |cx, libraries| linear_dx(
    cx,
    libraries.matmuls,
    dims,
    [dy, w, dx],
    scale,
    add
));

cuda_kernel!(LinearDw { dims, scale, dy, x, dw, store }, |_| [WORKSPACE, 0, 0], |cx, libraries| linear_dw(
    cx,
    libraries.matmuls,
    dims,
    [dy, x, dw],
    scale,
    store
));

cuda_kernel!(Zero { to }, |_| NO_SCRATCH, |cx| zero(cx, to));

cuda_kernel!(CheckFinite { values, value_type, found_inf }, |_| NO_SCRATCH, |cx| check_finite(
    cx, values, value_type, found_inf
));

cuda_kernel!(
    Squares { values, value_type, sum },
    |_| {
        let blocks = blocks(values.bytes / value_type.bytes());
        [8 * blocks, exact_sums(blocks) * size_of::<ExactSum>() as u64, 0]
    },
    |cx| squares(cx, values, value_type, sum)
);

impl CudaKernel for operands::Control {
    fn scratch(&self, _: DType) -> [u64; 3] {
        NO_SCRATCH
    }

    fn enqueue(self, cx: &mut LaunchContext, _: &mut Libraries<'_>) -> Result<(), DeviceError> {
        control(cx, self)
    }
}

impl CudaKernel for operands::Optimize {
    fn scratch(&self, _: DType) -> [u64; 3] {
        NO_SCRATCH
    }

    fn enqueue(self, cx: &mut LaunchContext, _: &mut Libraries<'_>) -> Result<(), DeviceError> {
        optimize(cx, self)
    }
}
