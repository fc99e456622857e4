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
mod dispatch;
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

pub(crate) use dispatch::{backward, derive, forward};

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
