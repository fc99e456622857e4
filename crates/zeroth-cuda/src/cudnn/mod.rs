//! cuDNN, NVIDIA's library of fused operations: attention forward as one of its graphs.
//!
//! A graph is made of descriptors, each an object whose attributes are set by number and which is then finished. [`library`]
//! has the calls, [`graph`] the tensors and operations and how a plan is found for them, [`attention`] the graph of causal
//! attention and when it takes the place of our own kernel.

mod attention;
mod graph;
mod library;

pub(super) use attention::{Fused, Operands, workspace};

/// Opens the library for a moment. Needs a current context.
pub(super) fn is_there() -> Result<(), zeroth_kernel::DeviceError> {
    library::Cudnn::open().map(drop)
}
