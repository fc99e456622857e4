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
mod kind;
mod linear;
mod linear_add;
mod position_bias;
mod rms_norm;
mod rope;
mod route;
mod scale;

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{GradNode, GradOp, LossInfo, Node};

pub use activation::{activation, activation_backward};
pub use attention::{Attention, AttentionOptions, attention, attention_backward};
pub use balance_loss::balance_loss;
pub use distill_loss::{Teacher, TeacherRows, distill_loss};
pub use embedding::{embedding, embedding_backward};
pub use expert_rows::{combine_rows, gather_rows};
pub use gated_activation::{gated_activation, gated_activation_backward};
pub use gated_rows::{gated_rows, gated_rows_backward};
pub use grouped_linear::{grouped_linear, grouped_linear_backward};
pub use head_loss::head_loss;
pub use kind::{AttentionSpec, DistillSpec, DropoutSpec, Op, TeacherKind};
pub use linear::{linear, linear_backward};
pub use position_bias::{position_bias, position_bias_backward};
pub use rms_norm::{NormOptions, rms_norm, rms_norm_backward};
pub use rope::rope;
pub use route::{BalanceSums, Routed, Routing, route, route_backward};

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
pub(crate) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    match node.op {
        Op::Embedding => embedding::forward(interpreter, node),
        Op::Linear => linear::forward(interpreter, node),
        Op::LinearAdd { scale } => linear_add::forward(interpreter, node, scale),
        Op::RmsNorm { eps } => rms_norm::forward(interpreter, node, eps),
        Op::AddRmsNorm { eps, .. } => add_rms_norm::forward(interpreter, node, eps),
        Op::HeadNormRope { heads, eps, rotary } => {
            head_norm_rope::forward(interpreter, node, heads, eps, rotary)
        }
        Op::Rope { heads, rotary } => rope::forward(interpreter, node, heads, rotary),
        Op::Attention(spec) => attention::forward(interpreter, node, spec),
        Op::PositionBias(buckets) => position_bias::forward(interpreter, node, buckets),
        Op::Activation(activation) => activation::forward(interpreter, node, activation),
        Op::Scale { factor } => scale::forward(interpreter, node, factor),
        Op::GatedActivation(activation) => gated_activation::forward(interpreter, node, activation),
        Op::Dropout { probability, salt } => dropout::forward(interpreter, node, probability, salt),
        Op::Route { k, normalized, .. } => route::forward(interpreter, node, k, normalized),
        Op::GatherRows | Op::CombineRows => expert_rows::forward(interpreter, node),
        Op::GroupedLinear => grouped_linear::forward(interpreter, node),
        Op::GroupedLinearAdd { scale } => grouped_linear::forward_add(interpreter, node, scale),
        Op::GatedRows(activation) => gated_rows::forward(interpreter, node, activation),
        Op::BalanceLoss { layers, .. } => balance_loss::forward(interpreter, node, layers),
        Op::HeadLoss { .. } => head_loss::forward(interpreter, node),
        Op::DistillLoss { .. } => distill_loss::forward(interpreter, node),
    }
}

/// The results of a backward node, in f64; `of` is its forward node.
pub(crate) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node) -> Gradients {
    match (node.op, of.op) {
        (GradOp::Sum, _) => {
            let [a, b] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
            Gradients::of_values(vec![a.iter().zip(b).map(|(a, b)| a + b).collect()])
        }
        (GradOp::LinearInput, _) => linear::backward_input(interpreter, node),
        (GradOp::LinearParams, _) => linear::backward_params(interpreter, node, of),
        (GradOp::LinearAddInput { scale }, _) => linear_add::backward_input(interpreter, node, scale),
        (GradOp::LinearAddParams { scale }, _) => linear_add::backward_params(interpreter, node, of, scale),
        (GradOp::GroupedLinearInput, _) => grouped_linear::backward_input(interpreter, node, 1.0),
        (GradOp::GroupedLinearParams, _) => grouped_linear::backward_params(interpreter, node, of, 1.0),
        (GradOp::GroupedLinearAddInput { scale }, _) => {
            grouped_linear::backward_input(interpreter, node, scale)
        }
        (GradOp::GroupedLinearAddParams { scale }, _) => {
            grouped_linear::backward_params(interpreter, node, of, scale)
        }
        (GradOp::Route { weights, balance }, Op::Route { k, normalized, .. }) => {
            route::backward(interpreter, node, [weights, balance], k, normalized)
        }
        (_, Op::GatherRows | Op::CombineRows) => expert_rows::backward(interpreter, node, of),
        (_, Op::GatedRows(activation)) => gated_rows::backward(interpreter, node, activation),
        (_, Op::BalanceLoss { part, layers }) => balance_loss::backward(interpreter, node, part, layers),
        (_, Op::Embedding) => embedding::backward(interpreter, node, of),
        (_, Op::RmsNorm { .. } | Op::AddRmsNorm { .. }) => rms_norm::backward(interpreter, node, of),
        (_, Op::HeadNormRope { heads, rotary, .. }) => {
            head_norm_rope::backward(interpreter, node, of, heads, rotary)
        }
        (_, Op::Rope { heads, rotary }) => rope::backward(interpreter, node, of, heads, rotary),
        (_, Op::Attention(spec)) => attention::backward(interpreter, node, of, spec),
        (_, Op::PositionBias(buckets)) => position_bias::backward(interpreter, node, of, buckets),
        (_, Op::Activation(activation)) => activation::backward(interpreter, node, activation),
        (_, Op::Scale { factor }) => scale::backward(interpreter, node, factor),
        (_, Op::GatedActivation(activation)) => gated_activation::backward(interpreter, node, activation),
        (_, Op::Dropout { probability, salt }) => dropout::backward(interpreter, node, probability, salt),
        (_, Op::HeadLoss { part }) => head_loss::backward(interpreter, node, of, part),
        (_, Op::DistillLoss { .. }) => distill_loss::backward(interpreter, node, of),
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
