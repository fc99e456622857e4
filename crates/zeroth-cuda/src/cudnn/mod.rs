//! cuDNN: attention forward as an operation graph of its backend API.
//!
//! A graph is built from descriptors, whose attributes are set by number before they are finalized. [`library`] has the calls,
//! [`graph`] the tensors, operations and execution plans, [`attention`] the graph of causal attention and the choice between it and
//! our own kernel.

mod attention;
mod graph;
mod library;

pub(super) use attention::{FusedAttention, Operands, workspace};
#[cfg(test)]
pub(super) use graph::{DataType, HEUR_MODE_A, NOTE_NONDETERMINISTIC, PointwiseMode, Reduction};
#[cfg(test)]
pub(super) use library::{Attribute, AttributeType, DescriptorType, Functions};

/// Checks that the library can be opened. A context must be current.
pub(super) fn is_there() -> Result<(), zeroth_kernel::DeviceError> {
    library::Cudnn::open().map(drop)
}
