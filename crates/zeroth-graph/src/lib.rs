//! A model's computation graph over shapes, without memory or device.
//!
//! A model writes its forward once with a [`Builder`]: units declare parameters, ops connect values. The result is a
//! [`Graph`], a list of [`Node`]s in execution order. [`Graph::backward`] derives the gradients. Everything about an op is in
//! one file: its shape rule, what its gradient reads and computes, and both in f64.
//!
//! Activations are [rows, width], with a row for each token of a stream, several for each, or a fixed number. The sequences of
//! a micro-batch are packed contiguously; the executor holds their starts.
//! Describing a 70B model takes milliseconds and no tensor memory.

mod backward;
mod builder;
mod error;
mod gradient;
mod graph;
mod loss;
mod op;
pub mod reference;
mod value;

pub use builder::Builder;
pub use error::GraphError;
pub use gradient::{Backward, GradNode, GradOp, GradWrite};
pub use graph::{
    DynamicScaling, Graph, Group, LossPart, Node, Param, ParamId, ParamSpec, Role, Rotary, Stream, Unit,
    UnitId,
};
pub use loss::{EvaluatedLoss, LossInfo, SliceLogits};
pub use op::{
    AttentionOptions, AttentionSpec, BalanceSums, DistillSpec, DropoutSpec, NormOptions, Op, Routing,
    Teacher, TeacherKind,
};
pub use value::{Kind, Rows, Value, ValueInfo};
pub use zeroth_base::{ActivationFn, PositionBuckets};
