//! The kernels that every device loads: the program of each, its name, and the data types of its instantiations.

use zeroth_base::{ActivationFn, DType};

/// The data types for which a kernel is instantiated.
#[derive(Clone, Copy)]
pub(super) enum Types {
    /// Not generic.
    None,
    /// Every data type.
    One,
    /// Every pair of data types.
    Two,
    /// Every data type with itself and with f32.
    Widening,
}

macro_rules! entries {
    ($($entry:ident: $program:literal, $name:literal, $types:ident;)*) => {
        /// A kernel, in all its instantiations.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum EntryPoint { $($entry),* }

        /// Entry point, file, name without type suffixes, and types.
        pub(super) const ENTRIES: &[(EntryPoint, &str, &str, Types)] = &[$((EntryPoint::$entry, $program, $name, Types::$types)),*];
    };
}

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

/// A data type, its suffix in kernel names, and its name in CUDA.
pub(super) const TYPES: [(DType, &str, &str); 3] =
    [(DType::F32, "f32", "float"), (DType::Bf16, "bf16", "Bf16"), (DType::F16, "f16", "F16")];

pub(super) const fn dtype_index(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}

/// Index of an instantiation in the function table. A missing type counts as index 0.
pub(super) fn function_index(entry: EntryPoint, types: &[DType]) -> usize {
    let at = |number: usize| types.get(number).map_or(0, |&dtype| dtype_index(dtype));
    entry as usize * 9 + at(0) * 3 + at(1)
}

impl Types {
    pub(super) fn all(self) -> Vec<(Option<DType>, Option<DType>)> {
        let each = || TYPES.iter().map(|&(dtype, ..)| Some(dtype));
        match self {
            Self::None => vec![(None, None)],
            Self::One => each().map(|dtype| (dtype, None)).collect(),
            Self::Two => each().flat_map(|first| each().map(move |second| (first, second))).collect(),
            Self::Widening => {
                let wide = each().map(|dtype| (dtype, Some(DType::F32)));
                wide.chain(each().skip(1).map(|dtype| (dtype, dtype))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instantiation_has_its_own_index() {
        let mut indices = std::collections::BTreeSet::new();
        for &(entry, _, _, types) in ENTRIES {
            for (first, second) in types.all() {
                let types: Vec<DType> = [first, second].into_iter().flatten().collect();
                assert!(indices.insert(function_index(entry, &types)), "{entry:?} {types:?}");
            }
        }
        assert!(indices.last().is_some_and(|&last| last < ENTRIES.len() * 9));
    }
}
