//! The kernels of a GPU: their entry points, their scratch, and the launch of each.

use zeroth_base::{ActivationFn, DType};

use super::attention::needs_context;
use super::cudnn::{FusedAttention, workspace};
use super::entry_points::{EntryPoint, Types, entries};
use super::launch::{check_finite, squares, zero};
use super::launch_context::{ALIGNMENT, LaunchContext, THREADS, VEC, aligned16, float};
use super::lm_head::HeadGradients;
use super::matmuls::Matmuls;
use super::route::{BalanceGradient, RouteGradients};
use super::scratch::{
    WORKSPACE, bias_partials, blocks, column_sums, deltas, exact_sums, logits_row_stride, rotated_back,
    slice_rows,
};
use super::{
    attention, cached_attention, distill, expert_rows, grouped, launch, lm_head, norm_rope, position_bias,
    route, rowwise,
};
use zeroth_kernel::{DeviceError, ExactSum, GradStore, HeadLossDw, Kernel, Nf4Record, RowKey, operands};

entries! {
    SwiGlu: "elementwise.cu", "swiglu", One;
    SwiGluBackward: "elementwise.cu", "swiglu_backward", One;
    GeGlu: "elementwise.cu", "geglu", One;
    GeGluBackward: "elementwise.cu", "geglu_backward", One;
    GeGluTanh: "elementwise.cu", "geglu_tanh", One;
    GeGluTanhBackward: "elementwise.cu", "geglu_tanh_backward", One;
    ReGlu: "elementwise.cu", "reglu", One;
    ReGluBackward: "elementwise.cu", "reglu_backward", One;
    Silu: "elementwise.cu", "silu", One;
    SiluBackward: "elementwise.cu", "silu_backward", One;
    Gelu: "elementwise.cu", "gelu", One;
    GeluBackward: "elementwise.cu", "gelu_backward", One;
    GeluTanh: "elementwise.cu", "gelu_tanh", One;
    GeluTanhBackward: "elementwise.cu", "gelu_tanh_backward", One;
    Relu: "elementwise.cu", "relu", One;
    ReluBackward: "elementwise.cu", "relu_backward", One;
    Scale: "elementwise.cu", "scale", One;
    Add: "elementwise.cu", "add", One;
    SumRanks: "elementwise.cu", "sum_ranks", Two;
    Rope: "elementwise.cu", "rope", One;
    Dropout: "elementwise.cu", "dropout", One;
    Convert: "elementwise.cu", "convert", Two;
    CheckFinite: "elementwise.cu", "check_finite", One;
    Unpack: "elementwise.cu", "unpack_nf4", One;
    CrossEntropy: "cross_entropy.cu", "cross_entropy", One;
    SumLosses: "cross_entropy.cu", "sum_losses", None;
    HeadNormRope: "norm_rope.cu", "head_norm_rope", One;
    HeadNormRopeBackward: "norm_rope.cu", "head_norm_rope_backward", One;
    Matmul: "matmul.cu", "matmul", Widening;
    FillRandom: "matmul.cu", "fill_random", One;
    CompareWords: "matmul.cu", "compare_words", None;
    Embedding: "rowwise.cu", "embedding", One;
    EmbeddingBackward: "rowwise.cu", "embedding_backward", One;
    EmbeddingBackwardVec: "rowwise.cu", "embedding_backward_vec", One;
    GatherLastRows: "rowwise.cu", "gather_last_rows", One;
    RmsNorm: "rowwise.cu", "rms_norm", One;
    RmsNormBackward: "rowwise.cu", "rms_norm_backward", One;
    RmsNormVec: "rowwise.cu", "rms_norm_vec", One;
    RmsNormBackwardVec: "rowwise.cu", "rms_norm_backward_vec", One;
    AttentionDelta: "rowwise.cu", "attention_delta", One;
    ColumnSums: "rowwise.cu", "column_sums", One;
    AddColumnSums: "rowwise.cu", "add_column_sums", None;
    BlockSquares: "optimizer_step.cu", "block_squares", One;
    ExactSums: "optimizer_step.cu", "exact_sums", None;
    MergeSums: "optimizer_step.cu", "merge_sums", None;
    CountTokens: "optimizer_step.cu", "count_tokens", None;
    Control: "optimizer_step.cu", "control", None;
    Optimize: "optimizer_step.cu", "optimize", None;
    OptimizeWithThird: "optimizer_step.cu", "optimize_with_third", None;
    StoreRows: "cached_attention.cu", "store_rows", One;
    CachedAttention: "cached_attention.cu", "cached_attention", One;
    PositionBias: "position_bias.cu", "position_bias", One;
    PositionBiasBackward: "position_bias.cu", "position_bias_backward", None;
    Route: "route.cu", "route", One;
    RouteCount: "route.cu", "route_count", None;
    RouteScan: "route.cu", "route_scan", None;
    RoutePlace: "route.cu", "route_place", None;
    RouteProbabilities: "route.cu", "route_probabilities", One;
    RouteBalance: "route.cu", "route_balance", None;
    RouteBackward: "route.cu", "route_backward", One;
    BalanceLoss: "route.cu", "balance_loss", None;
    GatherRows: "expert_rows.cu", "gather_rows", One;
    CombineRows: "expert_rows.cu", "combine_rows", One;
    SwiGluRows: "expert_rows.cu", "swiglu_rows", One;
    SwiGluRowsBackward: "expert_rows.cu", "swiglu_rows_backward", One;
    GeGluRows: "expert_rows.cu", "geglu_rows", One;
    GeGluRowsBackward: "expert_rows.cu", "geglu_rows_backward", One;
    GeGluTanhRows: "expert_rows.cu", "geglu_tanh_rows", One;
    GeGluTanhRowsBackward: "expert_rows.cu", "geglu_tanh_rows_backward", One;
    ReGluRows: "expert_rows.cu", "reglu_rows", One;
    ReGluRowsBackward: "expert_rows.cu", "reglu_rows_backward", One;
}

impl EntryPoint {
    pub(super) const fn activation(activation: ActivationFn) -> Self {
        match activation {
            ActivationFn::Silu => Self::Silu,
            ActivationFn::Gelu => Self::Gelu,
            ActivationFn::GeluTanh => Self::GeluTanh,
            ActivationFn::Relu => Self::Relu,
        }
    }

    pub(super) const fn activation_backward(activation: ActivationFn) -> Self {
        match activation {
            ActivationFn::Silu => Self::SiluBackward,
            ActivationFn::Gelu => Self::GeluBackward,
            ActivationFn::GeluTanh => Self::GeluTanhBackward,
            ActivationFn::Relu => Self::ReluBackward,
        }
    }

    pub(super) const fn gated_activation(activation: ActivationFn) -> Self {
        match activation {
            ActivationFn::Silu => Self::SwiGlu,
            ActivationFn::Gelu => Self::GeGlu,
            ActivationFn::GeluTanh => Self::GeGluTanh,
            ActivationFn::Relu => Self::ReGlu,
        }
    }

    pub(super) const fn gated_activation_backward(activation: ActivationFn) -> Self {
        match activation {
            ActivationFn::Silu => Self::SwiGluBackward,
            ActivationFn::Gelu => Self::GeGluBackward,
            ActivationFn::GeluTanh => Self::GeGluTanhBackward,
            ActivationFn::Relu => Self::ReGluBackward,
        }
    }

    pub(super) const fn gated_rows(activation: ActivationFn) -> Self {
        match activation {
            ActivationFn::Silu => Self::SwiGluRows,
            ActivationFn::Gelu => Self::GeGluRows,
            ActivationFn::GeluTanh => Self::GeGluTanhRows,
            ActivationFn::Relu => Self::ReGluRows,
        }
    }

    pub(super) const fn gated_rows_backward(activation: ActivationFn) -> Self {
        match activation {
            ActivationFn::Silu => Self::SwiGluRowsBackward,
            ActivationFn::Gelu => Self::GeGluRowsBackward,
            ActivationFn::GeluTanh => Self::GeGluTanhRowsBackward,
            ActivationFn::Relu => Self::ReGluRowsBackward,
        }
    }
}

/// Bytes of scratch that a kernel needs on a GPU.
pub fn scratch_bytes(kernel: &Kernel, dtype: DType) -> u64 {
    let parts = match *kernel {
        Kernel::Linear { .. }
        | Kernel::LinearAdd { .. }
        | Kernel::LinearDx { .. }
        | Kernel::LinearDw { .. } => [WORKSPACE, 0, 0],
        Kernel::LinearDb { dims, .. } => [column_sums(dims.rows, dims.outputs), 0, 0],
        Kernel::RmsNormBackward { dims, dw: Some(_), .. } => [column_sums(dims.rows, dims.width), 0, 0],
        Kernel::HeadNormRopeBackward { dims, dh, dw: Some(_), .. } => {
            let norm = dims.norm();
            let rotated = if dh.is_none() { rotated_back(dtype, dims) } else { 0 };
            [column_sums(norm.rows, norm.width), rotated, 0]
        }
        // Only cuDNN needs a workspace.
        Kernel::Attention { dims, context, .. } if needs_context(&dims, &context) => [0; 3],
        Kernel::Attention { dims, .. } => [workspace(&dims, dtype), 0, 0],
        Kernel::AttentionBackward { dims, dbias, .. } => {
            let partials = if dbias.is_some() { bias_partials(&dims) } else { 0 };
            [4 * deltas(&dims) as u64, partials, 0]
        }
        Kernel::HeadLoss { dims, .. } | Kernel::HeadLossBackward { dims, .. } => [
            WORKSPACE,
            dtype.bytes() * (slice_rows(dims, dtype) * logits_row_stride(dims)) as u64,
            // One loss per row.
            4 * dims.rows as u64,
        ],
        Kernel::DistillLossBackward { dims, teacher, .. } => distill::scratch(dims, &teacher, dtype),
        Kernel::TopLogProbs { dims, k, .. } => distill::top_scratch(dims, k, dtype),
        Kernel::Logits { dims, .. } => [WORKSPACE, (dims.sequences * dims.hidden) as u64 * dtype.bytes(), 0],
        Kernel::Route { dims, balance, .. } => route::scratch(dims, balance.is_some()),
        Kernel::Squares { values, value_type, .. } => {
            let blocks = blocks(values.bytes / value_type.bytes());
            [8 * blocks, exact_sums(blocks) * size_of::<ExactSum>() as u64, 0]
        }
        Kernel::RmsNormBackward { dw: None, .. }
        | Kernel::HeadNormRopeBackward { dw: None, .. }
        | Kernel::Embedding { .. }
        | Kernel::EmbeddingBackward { .. }
        | Kernel::RmsNorm { .. }
        | Kernel::AddRmsNorm { .. }
        | Kernel::Rope { .. }
        | Kernel::HeadNormRope { .. }
        | Kernel::PositionBias { .. }
        | Kernel::PositionBiasBackward { .. }
        | Kernel::StoreRows { .. }
        | Kernel::CachedAttention { .. }
        | Kernel::Activation { .. }
        | Kernel::ActivationBackward { .. }
        | Kernel::Scale { .. }
        | Kernel::GatedActivation { .. }
        | Kernel::GatedActivationBackward { .. }
        | Kernel::Dropout { .. }
        | Kernel::RouteBackward { .. }
        | Kernel::GatherRows { .. }
        | Kernel::CombineRows { .. }
        | Kernel::GroupedLinear { .. }
        | Kernel::GroupedLinearAdd { .. }
        | Kernel::GroupedLinearDx { .. }
        | Kernel::GroupedLinearDw { .. }
        | Kernel::GatedRows { .. }
        | Kernel::GatedRowsBackward { .. }
        | Kernel::BalanceLoss { .. }
        | Kernel::BalanceLossBackward { .. }
        | Kernel::Sum { .. }
        | Kernel::Zero { .. }
        | Kernel::Convert { .. }
        | Kernel::Unpack { .. }
        | Kernel::CheckFinite { .. }
        | Kernel::SumRanks { .. }
        | Kernel::CountTokens { .. }
        | Kernel::Control { .. }
        | Kernel::Optimize { .. } => [0; 3],
    };
    let total: u64 = parts.iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum();
    // A span may start at any address.
    if total == 0 { 0 } else { total + ALIGNMENT }
}

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
        Kernel::Linear { dims, x, w, bias, y } => launch::linear(cx, matmuls, dims, [x, w, y], bias, None),
        Kernel::LinearAdd { dims, scale, x, w, y } => {
            launch::linear(cx, matmuls, dims, [x, w, y], None, Some(scale))
        }
        Kernel::LinearDx { dims, scale, add, dy, w, dx } => {
            launch::linear_dx(cx, matmuls, dims, [dy, w, dx], scale, add)
        }
        Kernel::LinearDw { dims, scale, dy, x, dw, store } => {
            launch::linear_dw(cx, matmuls, dims, [dy, x, dw], scale, store)
        }
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
        Kernel::GroupedLinear { dims, offsets, x, w, y } => {
            grouped::linear(cx, dims, [offsets, x, w, y], 1.0, false)
        }
        Kernel::GroupedLinearAdd { dims, scale, offsets, x, w, y } => {
            grouped::linear(cx, dims, [offsets, x, w, y], scale, true)
        }
        Kernel::GroupedLinearDx { dims, scale, add, offsets, dy, w, dx } => {
            grouped::linear_dx(cx, dims, [offsets, dy, w, dx], scale, add)
        }
        Kernel::GroupedLinearDw { dims, scale, offsets, dy, x, dw, store } => {
            grouped::linear_dw(cx, dims, [offsets, dy, x, dw], scale, store)
        }
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
        Kernel::DistillLossBackward {
            dims,
            distillation,
            teacher,
            x,
            w,
            labels,
            losses,
            loss_weights,
            control,
            dx,
            dw,
        } => {
            let operands = operands::DistillLossBackward {
                dims,
                distillation,
                teacher,
                x,
                w,
                labels,
                losses,
                loss_weights,
                control,
                dx,
                dw,
            };
            distill::loss(cx, matmuls, operands)
        }
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
        Kernel::Control { ranks, layout, recipe, input, reports, control, record } => {
            launch::control(cx, operands::Control { ranks, layout, recipe, input, reports, control, record })
        }
        Kernel::Optimize {
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
        } => {
            let operands = operands::Optimize {
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
            };
            launch::optimize(cx, operands)
        }
    }
}
