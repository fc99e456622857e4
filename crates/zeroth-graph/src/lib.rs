//! What a model computes, over shapes only: no memory, no device.
//!
//! A model's forward is written once, with a [`Builder`]: units declare their parameters, ops connect values. The
//! result is a [`Graph`], a list of [`Node`]s in the order they run. [`Graph::backward`] derives the gradients: each op
//! says in one place what its gradient reads and how it is computed, and nobody writes a model's backward.
//!
//! Activations are [tokens, width]: a micro-batch is its sequences end to end, with a table of where each begins that
//! the executor holds. A 70B model is described in milliseconds and in no memory.

mod builder;
mod error;
mod gradient;
mod graph;
mod op;
pub mod reference;
mod value;

pub use builder::Builder;
pub use error::GraphError;
pub use gradient::{Backward, GradNode, GradOp, GradWrite};
pub use graph::{Graph, Node, Param, ParamId, ParamSpec, Rotary, DynamicScaling, Unit, UnitId};
pub use op::Op;
pub use value::{Kind, Value, ValueInfo};
