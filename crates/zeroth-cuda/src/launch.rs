//! Dispatch of kernels: checks operands against shapes and enqueues the CUDA functions.

use zeroth_base::DType;

use super::cublaslt::dtype_index;
use super::cudnn::FusedAttention;
use super::entry_points::EntryPoint;
use super::launch_context::{LaunchContext, THREADS, VEC, aligned16, float};
use super::lm_head::HeadGradients;
use super::matmuls::{Matmul, Matmuls, Matrix};
use super::route::{BalanceGradient, RouteGradients};
use super::scratch::{WORKSPACE, blocks, exact_sums};
use super::{
    attention, cached_attention, distill, expert_rows, grouped, lm_head, norm_rope, position_bias, route,
    rowwise,
};
use zeroth_kernel::{CacheRange, ExactSum, LinearDims, Nf4Record, RowKey};
use zeroth_kernel::{
    Control, DeviceError, GROUPS, GradStore, HeadLossDw, Kernel, LOSSES, MOMENTS, MasterForm, Moment,
    Optimizer, Recipe, Record, Rounding, Span, StepInput,
};

/// Vectors of a row that a thread of dropout handles, as in elementwise.cu.
const DROPOUT_VECS: usize = 4;

/// Enqueues a kernel.
pub(super) fn dispatch(
    cx: &mut LaunchContext,
    matmuls: &mut Matmuls,
    fused: &mut FusedAttention,
    kernel: &Kernel,
) -> Result<(), DeviceError> {
    let dtype = cx.dtype;
    if kernel.has_padded_rows() {
        return Err(cx.invalid(
            "its dimensions have padded rows; kernels of the GPU read rows without padding".to_owned(),
        ));
    }
    match *kernel {
        Kernel::Embedding { dims, rows, ids, table, y } => {
            rowwise::embedding(cx, dims, rows, [ids, table, y])
        }
        Kernel::EmbeddingBackward { dims, rows, ids, dy, dtable, tied_rows: None } => {
            rowwise::embedding_backward(cx, dims, rows, [ids, dy, dtable])
        }
        Kernel::EmbeddingBackward { tied_rows: Some(_), .. }
        | Kernel::HeadLossBackward {
            dw:
                Some(HeadLossDw { store: GradStore::Round { .. }, .. } | HeadLossDw { tied_rows: Some(_), .. }),
            ..
        }
        | Kernel::DistillLossBackward {
            dw:
                Some(HeadLossDw { store: GradStore::Round { .. }, .. } | HeadLossDw { tied_rows: Some(_), .. }),
            ..
        } => {
            let problem =
                "on a GPU the gradient of the LM head is stored in f32 and rounded later".to_owned();
            Err(DeviceError::Operands { what: kernel.name(), problem })
        }
        Kernel::Linear { .. }
        | Kernel::LinearAdd { .. }
        | Kernel::LinearDx { .. }
        | Kernel::LinearDw { .. } => linear(cx, matmuls, kernel),
        Kernel::LinearDb { dims, dy, db } => {
            let dy = cx.typed("dy", dy, dims.rows * dims.outputs)?;
            let db = cx.words("db", db, dims.outputs)?;
            rowwise::sum_columns(cx, dy, None, [dims.rows, dims.outputs], db)
        }
        Kernel::RmsNorm { dims, x, w, y, rstd } => rowwise::norm(cx, dims, x, None, [w, y, rstd]),
        Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd } => {
            rowwise::norm(cx, dims, x, Some((residual, h)), [w, y, rstd])
        }
        Kernel::RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw } => {
            rowwise::norm_backward(cx, dims, [dy, h, rstd, w], residual, dh, dw)
        }
        Kernel::Rope { dims, cos, sin, x, y, back } => norm_rope::rope(cx, dims, [cos, sin], x, y, back),
        Kernel::HeadNormRope { dims, x, w, cos, sin, y, rstd } => {
            norm_rope::forward(cx, dims, [x, w], [cos, sin], [y, rstd])
        }
        Kernel::HeadNormRopeBackward { dims, dy, h, rstd, w, cos, sin, dh, dw } => {
            norm_rope::backward(cx, dims, [dy, h, rstd, w], [cos, sin], dh, dw)
        }
        Kernel::PositionBias { dims, w, table } => position_bias::forward(cx, dims, w, table),
        Kernel::PositionBiasBackward { dims, dtable, dw } => position_bias::backward(cx, dims, dtable, dw),
        Kernel::Attention { dims, context, q, k, v, y, lse } => {
            attention::forward(cx, fused, &dims, &context, [q, k, v], y, lse)
        }
        Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias } => {
            attention::backward(cx, &dims, &context, [q, k, v], [y, lse, dy], [dq, dk, dv], dbias)
        }
        Kernel::StoreRows { dims, ranges, x, cache } => {
            cached_attention::store_rows(cx, dims, ranges, x, cache)
        }
        Kernel::CachedAttention { dims, cached, ranges, bias, q, k, v, y } => {
            cached_attention::forward(cx, &dims, cached, [ranges, q, k, v], bias, y)
        }
        Kernel::Activation { activation, x, y } => {
            let count = cx.count("y", y, dtype)?;
            let (x, y) = (cx.typed("x", x, count)?, cx.typed("y", y, count)?);
            cx.run_vectorized(EntryPoint::activation(activation), &[dtype], count, &[x, y, count as u64])
        }
        Kernel::ActivationBackward { activation, dy, x, dx } => {
            let count = cx.count("dy", dy, dtype)?;
            let (dy, x) = (cx.typed("dy", dy, count)?, cx.typed("x", x, count)?);
            let dx = cx.typed("dx", dx, count)?;
            let entry = EntryPoint::activation_backward(activation);
            cx.run_vectorized(entry, &[dtype], count, &[dy, x, dx, count as u64])
        }
        Kernel::Scale { factor, x, y } => {
            let count = cx.count("y", y, dtype)?;
            let (x, y) = (cx.typed("x", x, count)?, cx.typed("y", y, count)?);
            cx.run_vectorized(EntryPoint::Scale, &[dtype], count, &[float(factor), x, y, count as u64])
        }
        Kernel::GatedActivation { activation, gate, up, y } => {
            let count = cx.count("y", y, dtype)?;
            let (gate, up) = (cx.typed("gate", gate, count)?, cx.typed("up", up, count)?);
            let y = cx.typed("y", y, count)?;
            cx.run_vectorized(
                EntryPoint::gated_activation(activation),
                &[dtype],
                count,
                &[gate, up, y, count as u64],
            )
        }
        Kernel::GatedActivationBackward { activation, dy, gate, up, dgate, dup } => {
            let count = cx.count("dy", dy, dtype)?;
            let dy = cx.typed("dy", dy, count)?;
            let (gate, up) = (cx.typed("gate", gate, count)?, cx.typed("up", up, count)?);
            let (dgate, dup) = (cx.typed("dgate", dgate, count)?, cx.typed("dup", dup, count)?);
            cx.run_vectorized(
                EntryPoint::gated_activation_backward(activation),
                &[dtype],
                count,
                &[dy, gate, up, dgate, dup, count as u64],
            )
        }
        Kernel::Dropout { probability, seed, op, width, keys, x, y, .. } => {
            let rows = keys.bytes as usize / size_of::<RowKey>();
            let keys = cx.sized("keys", keys, rows, size_of::<RowKey>() as u64)?;
            let (x, y) = (cx.typed("x", x, rows * width)?, cx.typed("y", y, rows * width)?);
            let threshold = (f64::from(probability) * 4_294_967_296.0) as u64;
            let scale = float(1.0 / (1.0 - probability));
            let vectorized = u64::from(width.is_multiple_of(VEC) && aligned16(&[x, y]));
            let arguments =
                [keys, x, y, rows as u64, width as u64, threshold, scale, seed, u64::from(op), vectorized];
            let threads = rows * width.div_ceil(VEC).div_ceil(DROPOUT_VECS);
            cx.run_elementwise(EntryPoint::Dropout, &[dtype], threads, &arguments)
        }
        Kernel::Route { dims, starts, logits, experts, weights, order, places, offsets, balance } => {
            route::forward(cx, dims, starts, logits, [experts, weights, order, places, offsets], balance)
        }
        Kernel::RouteBackward { dims, starts, logits, experts, weights, dweights, slopes, dlogits } => {
            let gradients = RouteGradients { dweights, slopes };
            route::backward(cx, dims, starts, [logits, experts, weights], &gradients, dlogits)
        }
        Kernel::GatherRows { dims, order, offsets, x, y } => {
            expert_rows::gather(cx, dims, [order, offsets, x, y])
        }
        Kernel::CombineRows { dims, places, offsets, x, y } => {
            expert_rows::combine(cx, dims, [places, offsets, x, y])
        }
        Kernel::GroupedLinear { .. }
        | Kernel::GroupedLinearAdd { .. }
        | Kernel::GroupedLinearDx { .. }
        | Kernel::GroupedLinearDw { .. } => grouped::linear(cx, kernel),
        Kernel::GatedRows { activation, dims, order, offsets, weights, gate_up, y } => {
            expert_rows::gated(cx, activation, dims, [order, offsets, weights, gate_up, y])
        }
        Kernel::GatedRowsBackward {
            activation,
            dims,
            order,
            offsets,
            weights,
            gate_up,
            dy,
            dgate_up,
            dweights,
        } => {
            let operands = [order, offsets, weights, gate_up, dy];
            expert_rows::gated_backward(cx, activation, dims, operands, dgate_up, dweights)
        }
        Kernel::BalanceLoss { dims, starts, balance, labels, loss } => {
            route::balance_loss(cx, dims, [starts, balance, labels, loss], None)
        }
        Kernel::BalanceLossBackward { dims, starts, balance, labels, loss, loss_weight, control, slopes } => {
            let gradient = BalanceGradient { loss_weight, control, slopes };
            route::balance_loss(cx, dims, [starts, balance, labels, loss], Some(gradient))
        }
        Kernel::HeadLoss { dims, x, w, labels, loss } => {
            lm_head::loss(cx, matmuls, dims, [x, w, labels, loss], None)
        }
        Kernel::HeadLossBackward { dims, x, w, labels, loss, loss_weight, control, dx, dw } => {
            let dw = dw.map(|dw| (dw.to, dw.store == GradStore::Add));
            let gradients = HeadGradients { loss_weight, control, dx, dw };
            lm_head::loss(cx, matmuls, dims, [x, w, labels, loss], Some(gradients))
        }
        Kernel::DistillLossBackward { .. } => distill::loss(cx, matmuls, kernel),
        Kernel::TopLogProbs { dims, k, temperature, x, w, ids, log_probs } => {
            distill::top_log_probs(cx, matmuls, dims, k, temperature, [x, w, ids, log_probs])
        }
        Kernel::Logits { dims, starts, x, w, logits } => {
            lm_head::logits(cx, matmuls, dims, starts, [x, w], logits)
        }
        Kernel::Sum { a, b, y } => {
            let count = cx.count("y", y, dtype)?;
            let (a, b) = (cx.typed("a", a, count)?, cx.typed("b", b, count)?);
            let y = cx.typed("y", y, count)?;
            cx.run_vectorized(EntryPoint::Add, &[dtype], count, &[a, b, y, count as u64])
        }
        Kernel::Zero { to } => zero(cx, to),
        Kernel::Convert { from, from_type, to, to_type, found_inf } => {
            let count = cx.count("from", from, from_type)?;
            let bytes = from.bytes;
            let from = cx.sized("from", from, count, from_type.bytes())?;
            let to = cx.sized("to", to, count, to_type.bytes())?;
            let found_inf =
                found_inf.map(|found_inf| cx.structure::<u64>("found_inf", found_inf)).transpose()?;
            if from_type == to_type && found_inf.is_none() {
                return cx.copy(to, from, bytes);
            }
            let arguments = [from, to, count as u64, found_inf.unwrap_or(0)];
            cx.run_vectorized(EntryPoint::Convert, &[from_type, to_type], count, &arguments)
        }
        Kernel::Unpack { records, y } => {
            let count = cx.count("y", y, dtype)?;
            let (whole, size) = (count.div_ceil(Nf4Record::ELEMENTS), Nf4Record::BYTES as u64);
            let (records, y) = (cx.sized("records", records, whole, size)?, cx.typed("y", y, count)?);
            cx.run_vectorized(EntryPoint::Unpack, &[dtype], count, &[records, y, count as u64])
        }
        Kernel::CheckFinite { values, value_type, found_inf } => {
            check_finite(cx, values, value_type, found_inf)
        }
        Kernel::SumRanks { ranks, parts, from_type, to, to_type, add } => {
            let count = cx.count("to", to, to_type)?;
            let parts = cx.sized("parts", parts, ranks * count, from_type.bytes())?;
            let to = cx.sized("to", to, count, to_type.bytes())?;
            let arguments = [parts, ranks as u64, to, count as u64, u64::from(add)];
            cx.run_vectorized(EntryPoint::SumRanks, &[from_type, to_type], count, &arguments)
        }
        Kernel::Squares { values, value_type, sum } => squares(cx, values, value_type, sum),
        Kernel::CountTokens { experts, slots, offsets, weights, counts } => {
            let offsets = cx.sized("offsets", offsets, experts + 1, 4)?;
            let weights = cx.sized("weights", weights, slots, 4)?;
            let counts = cx.sized("counts", counts, experts + 1, 4)?;
            let grid = [experts.max(slots).div_ceil(THREADS as usize), 1, 1];
            let arguments = [experts as u64, slots as u64, offsets, weights, counts];
            cx.run(EntryPoint::CountTokens, &[], grid, THREADS, &arguments)
        }
        Kernel::Control { .. } => control(cx, kernel),
        Kernel::Optimize { .. } => optimize(cx, kernel),
    }
}

fn linear(cx: &mut LaunchContext, matmuls: &mut Matmuls, kernel: &Kernel) -> Result<(), DeviceError> {
    let (from, workspace) = (cx.dtype, cx.scratch.take(WORKSPACE)?);
    let matmul = match *kernel {
        Kernel::Linear { dims: LinearDims { rows, inputs, outputs, .. }, x, w, bias, y } => Matmul {
            size: [rows, outputs, inputs],
            p: Matrix::rows(cx.typed("x", x, rows * inputs)?, inputs),
            q: Matrix::transposed(cx.typed("w", w, outputs * inputs)?, inputs),
            from,
            d: Matrix::rows(cx.typed("y", y, rows * outputs)?, outputs),
            to: from,
            bias: bias.map(|bias| cx.typed("bias", bias, outputs)).transpose()?,
            scale: 1.0,
            add: false,
        },
        Kernel::LinearAdd { dims: LinearDims { rows, inputs, outputs, .. }, scale, x, w, y } => Matmul {
            size: [rows, outputs, inputs],
            p: Matrix::rows(cx.typed("x", x, rows * inputs)?, inputs),
            q: Matrix::transposed(cx.typed("w", w, outputs * inputs)?, inputs),
            from,
            d: Matrix::rows(cx.typed("y", y, rows * outputs)?, outputs),
            to: from,
            bias: None,
            scale,
            add: true,
        },
        Kernel::LinearDx { dims: LinearDims { rows, inputs, outputs, .. }, scale, dy, w, dx, add } => {
            Matmul {
                size: [rows, inputs, outputs],
                p: Matrix::rows(cx.typed("dy", dy, rows * outputs)?, outputs),
                q: Matrix::rows(cx.typed("w", w, outputs * inputs)?, inputs),
                from,
                d: Matrix::rows(cx.typed("dx", dx, rows * inputs)?, inputs),
                to: from,
                bias: None,
                scale,
                add,
            }
        }
        Kernel::LinearDw { dims: LinearDims { rows, inputs, outputs, .. }, scale, dy, x, dw, store } => {
            Matmul {
                size: [outputs, inputs, rows],
                p: Matrix::transposed(cx.typed("dy", dy, rows * outputs)?, outputs),
                q: Matrix::rows(cx.typed("x", x, rows * inputs)?, inputs),
                from,
                d: Matrix::rows(cx.sized("dw", dw, outputs * inputs, to_type(store).bytes())?, inputs),
                to: to_type(store),
                bias: None,
                scale,
                add: store == GradStore::Add,
            }
        }
        _ => unreachable!("called for matmuls only"),
    };
    matmuls.enqueue(cx, &matmul, workspace)?;
    match *kernel {
        Kernel::LinearDw { dw, store: GradStore::Round { to, found_inf }, .. } => {
            check_finite(cx, dw, to, found_inf)
        }
        _ => Ok(()),
    }
}

/// The data type of a stored gradient.
pub(super) const fn to_type(store: GradStore) -> DType {
    match store {
        GradStore::Add | GradStore::Write => DType::F32,
        GradStore::Round { to, .. } => to,
    }
}

fn check_finite(
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

fn zero(cx: &LaunchContext, to: Span) -> Result<(), DeviceError> {
    let at = cx.arenas.find(cx.what, to)?;
    if to.bytes == 0 {
        return Ok(());
    }
    cx.driver.set_bytes(at, 0, to.bytes, cx.stream)
}

fn squares(cx: &mut LaunchContext, values: Span, value_type: DType, sum: Span) -> Result<(), DeviceError> {
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

fn control(cx: &LaunchContext, kernel: &Kernel) -> Result<(), DeviceError> {
    let Kernel::Control { ranks, layout, recipe, input, reports, control, record } = *kernel else {
        unreachable!("called for control only")
    };
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

fn optimize(cx: &LaunchContext, kernel: &Kernel) -> Result<(), DeviceError> {
    let Kernel::Optimize {
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
    } = *kernel
    else {
        unreachable!("called for the optimizer only")
    };
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
