//! The entry points of the kernels of a GPU, and the launches of those that handle elements one by one.

use zeroth_base::ActivationFn;

use super::entry_points::{EntryPoint, Types, entries};
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::launch_context::{THREADS, VEC, aligned16, float};
use zeroth_kernel::{Nf4Record, RowKey};

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

/// Vectors of a row that a thread of dropout handles, as in elementwise.cu.
const DROPOUT_VECS: usize = 4;

cuda_kernel!(Activation { activation, x, y }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("y", y, cx.dtype)?;
    let (x, y) = (cx.typed("x", x, count)?, cx.typed("y", y, count)?);
    cx.run_vectorized(EntryPoint::activation(activation), &[cx.dtype], count, &[x, y, count as u64])
});

cuda_kernel!(ActivationBackward { activation, dy, x, dx }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("dy", dy, cx.dtype)?;
    let (dy, x) = (cx.typed("dy", dy, count)?, cx.typed("x", x, count)?);
    let dx = cx.typed("dx", dx, count)?;
    let entry = EntryPoint::activation_backward(activation);
    cx.run_vectorized(entry, &[cx.dtype], count, &[dy, x, dx, count as u64])
});

cuda_kernel!(Scale { factor, x, y }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("y", y, cx.dtype)?;
    let (x, y) = (cx.typed("x", x, count)?, cx.typed("y", y, count)?);
    cx.run_vectorized(EntryPoint::Scale, &[cx.dtype], count, &[float(factor), x, y, count as u64])
});

cuda_kernel!(GatedActivation { activation, gate, up, y }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("y", y, cx.dtype)?;
    let (gate, up) = (cx.typed("gate", gate, count)?, cx.typed("up", up, count)?);
    let y = cx.typed("y", y, count)?;
    cx.run_vectorized(
        EntryPoint::gated_activation(activation),
        &[cx.dtype],
        count,
        &[gate, up, y, count as u64],
    )
});

cuda_kernel!(GatedActivationBackward { activation, dy, gate, up, dgate, dup }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("dy", dy, cx.dtype)?;
    let dy = cx.typed("dy", dy, count)?;
    let (gate, up) = (cx.typed("gate", gate, count)?, cx.typed("up", up, count)?);
    let (dgate, dup) = (cx.typed("dgate", dgate, count)?, cx.typed("dup", dup, count)?);
    cx.run_vectorized(
        EntryPoint::gated_activation_backward(activation),
        &[cx.dtype],
        count,
        &[dy, gate, up, dgate, dup, count as u64],
    )
});

cuda_kernel!(Dropout { probability, seed, op, width, keys, x, y }, |_| NO_SCRATCH, |cx| {
    let rows = keys.bytes as usize / size_of::<RowKey>();
    let keys = cx.sized("keys", keys, rows, size_of::<RowKey>() as u64)?;
    let (x, y) = (cx.typed("x", x, rows * width)?, cx.typed("y", y, rows * width)?);
    let threshold = (f64::from(probability) * 4_294_967_296.0) as u64;
    let scale = float(1.0 / (1.0 - probability));
    let vectorized = u64::from(width.is_multiple_of(VEC) && aligned16(&[x, y]));
    let arguments =
        [keys, x, y, rows as u64, width as u64, threshold, scale, seed, u64::from(op), vectorized];
    let threads = rows * width.div_ceil(VEC).div_ceil(DROPOUT_VECS);
    cx.run_elementwise(EntryPoint::Dropout, &[cx.dtype], threads, &arguments)
});

cuda_kernel!(Sum { a, b, y }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("y", y, cx.dtype)?;
    let (a, b) = (cx.typed("a", a, count)?, cx.typed("b", b, count)?);
    let y = cx.typed("y", y, count)?;
    cx.run_vectorized(EntryPoint::Add, &[cx.dtype], count, &[a, b, y, count as u64])
});

cuda_kernel!(Convert { from, from_type, to, to_type, found_inf }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("from", from, from_type)?;
    let bytes = from.bytes;
    let from = cx.sized("from", from, count, from_type.bytes())?;
    let to = cx.sized("to", to, count, to_type.bytes())?;
    let found_inf = found_inf.map(|found_inf| cx.structure::<u64>("found_inf", found_inf)).transpose()?;
    if from_type == to_type && found_inf.is_none() {
        return cx.copy(to, from, bytes);
    }
    let arguments = [from, to, count as u64, found_inf.unwrap_or(0)];
    cx.run_vectorized(EntryPoint::Convert, &[from_type, to_type], count, &arguments)
});

cuda_kernel!(Unpack { records, y }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("y", y, cx.dtype)?;
    let (whole, size) = (count.div_ceil(Nf4Record::ELEMENTS), Nf4Record::BYTES as u64);
    let (records, y) = (cx.sized("records", records, whole, size)?, cx.typed("y", y, count)?);
    cx.run_vectorized(EntryPoint::Unpack, &[cx.dtype], count, &[records, y, count as u64])
});

cuda_kernel!(SumRanks { ranks, parts, from_type, to, to_type, add }, |_| NO_SCRATCH, |cx| {
    let count = cx.count("to", to, to_type)?;
    let parts = cx.sized("parts", parts, ranks * count, from_type.bytes())?;
    let to = cx.sized("to", to, count, to_type.bytes())?;
    let arguments = [parts, ranks as u64, to, count as u64, u64::from(add)];
    cx.run_vectorized(EntryPoint::SumRanks, &[from_type, to_type], count, &arguments)
});

cuda_kernel!(CountTokens { experts, slots, offsets, weights, counts }, |_| NO_SCRATCH, |cx| {
    let offsets = cx.sized("offsets", offsets, experts + 1, 4)?;
    let weights = cx.sized("weights", weights, slots, 4)?;
    let counts = cx.sized("counts", counts, experts + 1, 4)?;
    let grid = [experts.max(slots).div_ceil(THREADS as usize), 1, 1];
    let arguments = [experts as u64, slots as u64, offsets, weights, counts];
    cx.run(EntryPoint::CountTokens, &[], grid, THREADS, &arguments)
});
