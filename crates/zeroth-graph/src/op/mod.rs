//! The ops of a graph.
//!
//! An op holds what does not depend on the micro-batch. Its operands, parameters and results are the node's; their order is
//! documented here, for the graph and everything that executes it. The file of an op has its shape rule, its gradient, both
//! in f64, and its test.

#![allow(clippy::many_single_char_names, reason = "the letters of the formulas")]

mod activation;
mod add_rms_norm;
mod attention;
mod balance_loss;
mod distill_loss;
mod dropout;
mod embedding;
mod expert_rows;
mod gated_activation;
mod gated_rows;
mod grouped_linear;
mod head_loss;
mod head_norm_rope;
mod linear;
mod linear_add;
mod position_bias;
mod rms_norm;
mod rope;
mod route;
mod scale;

use zeroth_base::{ActivationFn, PositionBuckets};

use crate::gradient::Deriver;
use crate::reference::{Gradients, Machine};
use crate::{GradNode, GradOp, LossInfo, Node};

pub use activation::{activation, activation_backward};
pub use attention::{Attention, AttentionOptions, AttentionSpec, DropoutSpec, attention, attention_backward};
pub use balance_loss::balance_loss;
pub use distill_loss::{DistillSpec, Teacher, TeacherKind, TeacherRows, distill_loss};
pub use embedding::{embedding, embedding_backward};
pub use expert_rows::{combine_rows, gather_rows};
pub use gated_activation::{gated_activation, gated_activation_backward};
pub use gated_rows::{gated_rows, gated_rows_backward};
pub use grouped_linear::{grouped_linear, grouped_linear_backward};
pub use head_loss::head_loss;
pub use linear::{linear, linear_backward};
pub use position_bias::{position_bias, position_bias_backward};
pub use rms_norm::{NormOptions, rms_norm, rms_norm_backward};
pub use rope::rope;
pub use route::{BalanceSums, Routed, Routing, route, route_backward};

/// The op of a node. T is the number of rows, H the hidden size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// `ids` `[T]` and a table [V, H] give the rows [T, H].
    Embedding,
    /// `x` [T, I], weight [O, I] and an optional bias `[O]` give `x · wᵀ + b` [T, O].
    Linear,
    /// `base` [T, O], `u` [T, I] and weight [O, I] give `base + scale · u · wᵀ` [T, O].
    LinearAdd {
        /// The factor of the product.
        scale: f64,
    },
    /// `x` [T, H] and weight `[H]` give `x · rstd · w` [T, H] and the statistic `rstd` `[T]`.
    RmsNorm {
        /// Added to the mean of squares.
        eps: f64,
    },
    /// `r` and `x` [T, H] and weight `[H]` give the sum `h = r + x`, its norm and `rstd`: the residual add and the norm
    /// after it in one pass.
    AddRmsNorm {
        /// Added to the mean of squares.
        eps: f64,
        /// Whether the sum is limited to what fp16 represents, in a run in fp16.
        clamp: bool,
    },
    /// `x` [T, heads · D], `positions` `[T]` and weight `[D]` give each head's norm, rotated as `Rope` does, [T, heads · D] and
    /// `rstd` [T, heads]: the norm of q or k and its rotation in one pass. The norm is rounded before it is rotated.
    HeadNormRope {
        /// Heads in a row.
        heads: u64,
        /// Added to the mean of squares.
        eps: f64,
        /// The index of its rotary embedding in [`Graph::rotaries`](crate::Graph::rotaries).
        rotary: usize,
    },
    /// `x` [T, heads · D] and `positions` `[T]` give `x` with each head's halves rotated.
    Rope {
        /// Heads in a row.
        heads: u64,
        /// The index of its rotary embedding in [`Graph::rotaries`](crate::Graph::rotaries).
        rotary: usize,
    },
    /// `q` [Tq, heads · D], `k` and `v` [Tk, kv_heads · D], then the biases [heads, distances] where it has any, give [Tq, heads · D]
    /// and the log of the softmax's sum [Tq, heads]. A query attends to keys of its own sequence; where k and v are of another
    /// stream, to the sequence of the same index there.
    Attention(AttentionSpec),
    /// A table [buckets, heads] gives the biases [heads, distances] of attention by the distance of a key from its query, a statistic:
    /// the distance d is at d + `max_distance`.
    PositionBias(PositionBuckets),
    /// `x` gives `f(x)`, f the activation.
    Activation(ActivationFn),
    /// `x` gives `factor · x`.
    Scale {
        /// The factor.
        factor: f64,
    },
    /// `gate` and `up` [T, F] give `f(gate) · up`, f the activation.
    GatedActivation(ActivationFn),
    /// `x` with elements zeroed at random and the others scaled up; the mask is recomputed in backward.
    Dropout {
        /// The probability that an element is zeroed.
        probability: f64,
        /// The number of this op among the model's dropouts: part of the key of its random numbers.
        salt: u32,
    },
    /// `logits` [T, E], and the sums of the layers before with `balance`, give the `experts` [T, k] with the largest logits (ties: the
    /// lowest index), their `weights` [T, k] by softmax, the slots `order` `[T · k]` sorted by expert, its inverse `places` [T, k], the
    /// `offsets` `[E + 1]` of the experts in it, and with `balance` sums [2, E] of tokens and of probabilities. See
    /// [`Routing`](crate::Routing).
    Route {
        /// Experts of a token.
        k: u64,
        /// Whether a token's weights are divided by their sum.
        normalized: bool,
        /// Whether it computes sums for an auxiliary loss.
        balance: bool,
    },
    /// `x` [T, H], `order`, `places` and `offsets` give the rows of the slots [T · k, H] in sorted order.
    GatherRows,
    /// `x` [T · k, H], `order`, `places` and `offsets` give the sum of each token's rows [T, H].
    CombineRows,
    /// `x` [T · k, I], `offsets` and weight [E, O, I] give `x · w[e]ᵀ` [T · k, O] for the rows of each expert e.
    GroupedLinear,
    /// `base` [T · k, O], `u` [T · k, I], `offsets` and weight [E, O, I] give `base + scale · u · w[e]ᵀ` [T · k, O].
    GroupedLinearAdd {
        /// The factor of the product.
        scale: f64,
    },
    /// `gate_up` [T · k, 2F], `weights` [T, k], `order` and `offsets` give `f(gate) · up · weight` [T · k, F], f the activation.
    GatedRows(ActivationFn),
    /// `balance` [2, E] and `labels` `[T]` give the auxiliary loss `[1]`, counted once for every trained token.
    BalanceLoss {
        /// The index in [`Graph::loss_parts`](crate::Graph::loss_parts) of the part that it belongs to.
        part: usize,
        /// Layers that `balance` sums over.
        layers: u64,
    },
    /// `x` [T, H], weight [V, H] and `labels` `[T]` give the sum of the tokens' losses `[1]`: projection, softmax and
    /// cross-entropy in slices of tokens, so that no [T, V] tensor exists.
    HeadLoss {
        /// The index in [`Graph::loss_parts`](crate::Graph::loss_parts) of the part that it belongs to.
        part: usize,
    },
    /// `x` [T, H], weight [V, H], `labels` `[T]` and a teacher give the sums `[1]` of the tokens' cross-entropies and of their
    /// divergences from the teacher, in slices of tokens. The teacher is `x` [T, H'] and a second weight [V', H'], or `ids` and
    /// `log_probs` [T, k].
    DistillLoss {
        /// The index in [`Graph::loss_parts`](crate::Graph::loss_parts) of the cross-entropy.
        ce_part: usize,
        /// The index of the divergence.
        kd_part: usize,
        /// The divergence.
        spec: DistillSpec,
        /// Where the teacher's distribution comes from.
        teacher: TeacherKind,
    },
}

impl Op {
    /// What it reads and gives as a loss; `None` where it is none.
    pub const fn loss(self) -> Option<LossInfo> {
        match self {
            Self::HeadLoss { part } => Some(head_loss::info(part)),
            Self::DistillLoss { ce_part, kd_part, teacher, .. } => {
                Some(distill_loss::info(ce_part, kd_part, teacher))
            }
            Self::BalanceLoss { part, .. } => Some(balance_loss::info(part)),
            Self::Embedding
            | Self::Linear
            | Self::LinearAdd { .. }
            | Self::RmsNorm { .. }
            | Self::AddRmsNorm { .. }
            | Self::HeadNormRope { .. }
            | Self::Rope { .. }
            | Self::Attention(_)
            | Self::PositionBias(_)
            | Self::Activation(_)
            | Self::Scale { .. }
            | Self::GatedActivation(_)
            | Self::Dropout { .. }
            | Self::Route { .. }
            | Self::GatherRows
            | Self::CombineRows
            | Self::GroupedLinear
            | Self::GroupedLinearAdd { .. }
            | Self::GatedRows(_) => None,
        }
    }

    /// The index of the rotary embedding that it reads.
    pub const fn rotary(self) -> Option<usize> {
        match self {
            Self::Rope { rotary, .. } | Self::HeadNormRope { rotary, .. } => Some(rotary),
            _ => None,
        }
    }

    /// Its name in messages, traces and plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Linear => "linear",
            Self::LinearAdd { .. } => "linear_add",
            Self::RmsNorm { .. } => "rms_norm",
            Self::AddRmsNorm { .. } => "add_rms_norm",
            Self::HeadNormRope { .. } => "head_norm_rope",
            Self::Rope { .. } => "rope",
            Self::Attention(_) => "attention",
            Self::PositionBias(_) => "position_bias",
            Self::Activation(activation) => activation.plain_name(),
            Self::Scale { .. } => "scale",
            Self::GatedActivation(activation) => activation.name(),
            Self::Dropout { .. } => "dropout",
            Self::Route { .. } => "route",
            Self::GatherRows => "gather_rows",
            Self::CombineRows => "combine_rows",
            Self::GroupedLinear => "grouped_linear",
            Self::GroupedLinearAdd { .. } => "grouped_linear_add",
            Self::GatedRows(_) => "gated_rows",
            Self::BalanceLoss { .. } => "balance_loss",
            Self::HeadLoss { .. } => "head_loss",
            Self::DistillLoss { .. } => "distill_loss",
        }
    }
}

/// Appends the gradient of a forward node: what it reads and writes.
pub(crate) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    match node.op {
        Op::Embedding => embedding::derive(deriver, index, node),
        Op::Linear => linear::derive(deriver, index, node),
        Op::LinearAdd { scale } => linear_add::derive(deriver, index, node, scale),
        Op::RmsNorm { .. } => rms_norm::derive(deriver, index, node),
        Op::AddRmsNorm { .. } => add_rms_norm::derive(deriver, index, node),
        Op::HeadNormRope { .. } => head_norm_rope::derive(deriver, index, node),
        Op::Rope { .. } => rope::derive(deriver, index, node),
        Op::Attention(_) => attention::derive(deriver, index, node),
        Op::PositionBias(buckets) => position_bias::derive(deriver, index, node, buckets),
        Op::Activation(activation) => activation::derive(deriver, index, node, activation),
        Op::Scale { factor } => scale::derive(deriver, index, node, factor),
        Op::GatedActivation(activation) => gated_activation::derive(deriver, index, node, activation),
        Op::Dropout { .. } => dropout::derive(deriver, index, node),
        Op::Route { .. } => route::derive(deriver, index, node),
        Op::GatherRows | Op::CombineRows => expert_rows::derive(deriver, index, node),
        Op::GroupedLinear => grouped_linear::derive(deriver, index, node),
        Op::GroupedLinearAdd { scale } => grouped_linear::derive_add(deriver, index, node, scale),
        Op::GatedRows(activation) => gated_rows::derive(deriver, index, node, activation),
        Op::BalanceLoss { .. } => balance_loss::derive(deriver, index, node),
        Op::HeadLoss { .. } => head_loss::derive(deriver, index, node),
        Op::DistillLoss { .. } => distill_loss::derive(deriver, index, node),
    }
}

/// The results of a forward node, in f64.
pub(crate) fn forward(machine: &Machine<'_>, node: &Node) -> Vec<Vec<f64>> {
    match node.op {
        Op::Embedding => embedding::forward(machine, node),
        Op::Linear => linear::forward(machine, node),
        Op::LinearAdd { scale } => linear_add::forward(machine, node, scale),
        Op::RmsNorm { eps } => rms_norm::forward(machine, node, eps),
        Op::AddRmsNorm { eps, .. } => add_rms_norm::forward(machine, node, eps),
        Op::HeadNormRope { heads, eps, rotary } => head_norm_rope::forward(machine, node, heads, eps, rotary),
        Op::Rope { heads, rotary } => rope::forward(machine, node, heads, rotary),
        Op::Attention(spec) => attention::forward(machine, node, spec),
        Op::PositionBias(buckets) => position_bias::forward(machine, node, buckets),
        Op::Activation(activation) => activation::forward(machine, node, activation),
        Op::Scale { factor } => scale::forward(machine, node, factor),
        Op::GatedActivation(activation) => gated_activation::forward(machine, node, activation),
        Op::Dropout { probability, salt } => dropout::forward(machine, node, probability, salt),
        Op::Route { k, normalized, .. } => route::forward(machine, node, k, normalized),
        Op::GatherRows | Op::CombineRows => expert_rows::forward(machine, node),
        Op::GroupedLinear => grouped_linear::forward(machine, node),
        Op::GroupedLinearAdd { scale } => grouped_linear::forward_add(machine, node, scale),
        Op::GatedRows(activation) => gated_rows::forward(machine, node, activation),
        Op::BalanceLoss { layers, .. } => balance_loss::forward(machine, node, layers),
        Op::HeadLoss { .. } => head_loss::forward(machine, node),
        Op::DistillLoss { .. } => distill_loss::forward(machine, node),
    }
}

/// The results of a backward node, in f64; `of` is its forward node.
pub(crate) fn backward(machine: &Machine<'_>, node: &GradNode, of: &Node) -> Gradients {
    match (node.op, of.op) {
        (GradOp::Sum, _) => {
            let [a, b] = [0, 1].map(|place| machine.value(node.inputs[place]));
            Gradients::of_values(vec![a.iter().zip(b).map(|(a, b)| a + b).collect()])
        }
        (GradOp::LinearInput, _) => linear::backward_input(machine, node),
        (GradOp::LinearParams, _) => linear::backward_params(machine, node, of),
        (GradOp::LinearAddInput { scale }, _) => linear_add::backward_input(machine, node, scale),
        (GradOp::LinearAddParams { scale }, _) => linear_add::backward_params(machine, node, of, scale),
        (GradOp::GroupedLinearInput, _) => grouped_linear::backward_input(machine, node, 1.0),
        (GradOp::GroupedLinearParams, _) => grouped_linear::backward_params(machine, node, of, 1.0),
        (GradOp::GroupedLinearAddInput { scale }, _) => grouped_linear::backward_input(machine, node, scale),
        (GradOp::GroupedLinearAddParams { scale }, _) => {
            grouped_linear::backward_params(machine, node, of, scale)
        }
        (GradOp::Route { weights, balance }, Op::Route { k, normalized, .. }) => {
            route::backward(machine, node, [weights, balance], k, normalized)
        }
        (_, Op::GatherRows | Op::CombineRows) => expert_rows::backward(machine, node, of),
        (_, Op::GatedRows(activation)) => gated_rows::backward(machine, node, activation),
        (_, Op::BalanceLoss { part, layers }) => balance_loss::backward(machine, node, part, layers),
        (_, Op::Embedding) => embedding::backward(machine, node, of),
        (_, Op::RmsNorm { .. } | Op::AddRmsNorm { .. }) => rms_norm::backward(machine, node, of),
        (_, Op::HeadNormRope { heads, rotary, .. }) => {
            head_norm_rope::backward(machine, node, of, heads, rotary)
        }
        (_, Op::Rope { heads, rotary }) => rope::backward(machine, node, of, heads, rotary),
        (_, Op::Attention(spec)) => attention::backward(machine, node, of, spec),
        (_, Op::PositionBias(buckets)) => position_bias::backward(machine, node, of, buckets),
        (_, Op::Activation(activation)) => activation::backward(machine, node, activation),
        (_, Op::Scale { factor }) => scale::backward(machine, node, factor),
        (_, Op::GatedActivation(activation)) => gated_activation::backward(machine, node, activation),
        (_, Op::Dropout { probability, salt }) => dropout::backward(machine, node, probability, salt),
        (_, Op::HeadLoss { part }) => head_loss::backward(machine, node, of, part),
        (_, Op::DistillLoss { .. }) => distill_loss::backward(machine, node, of),
        (
            op,
            Op::Linear
            | Op::LinearAdd { .. }
            | Op::GroupedLinear
            | Op::GroupedLinearAdd { .. }
            | Op::Route { .. },
        ) => unreachable!("{op:?} is not the gradient of {}", of.op.name()),
    }
}
