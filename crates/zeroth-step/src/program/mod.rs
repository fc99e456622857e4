//! The step program: what a rank does in one training step, written down before it runs.
//!
//! `lower` writes a micro-batch's forward and backward; the passes after it add what ZeRO adds: parameters that arrive
//! and leave, gradients that become shards, the update, and what runs beside what. A pass moves work; it does not
//! change arithmetic. [`Memory`] gives every buffer of a program a place, [`crate::run`] carries it out.

mod buffers;
mod bytes;
mod check;
mod ir;
mod launches;
mod passes;
mod place;
mod waits;

use zeroth_base::DType;
use zeroth_graph::{Backward, Graph};

pub use buffers::{Buffer, Category, Content};
pub(crate) use bytes::guarded_bytes;
pub use bytes::{Memory, Placed, SectionMemory, bytes};
pub use check::{ProgramError, Residency};
pub use ir::{Action, Addition, Chunk, GradientHome, Instruction, Program, Section, SectionKind};
pub(crate) use launches::{Binding, Collective, Lowering, Work};

use crate::Layout;

/// The types a run stores numbers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Parameters and activations.
    pub run: DType,
    /// Gradients on their way between ranks.
    pub communication: DType,
}

/// What the passes ask of a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// `gradient_accumulation_steps`.
    pub accumulation: u64,
    /// `bf16`, `fp16` and `communication_data_type`.
    pub types: Types,
    /// `zero_optimization.reduce_bucket_size`, in elements.
    pub reduce_bucket: u64,
    /// `zero_optimization.stage3_max_live_parameters`, in elements.
    pub max_live: u64,
    /// `zero_optimization.stage3_max_reuse_distance`, in elements.
    pub max_reuse: u64,
    /// `zero_optimization.stage3_prefetch_bucket_size`, in elements.
    pub prefetch: u64,
    /// `zero_optimization.overlap_comm`.
    pub overlap: bool,
}

/// Compiles a step: the passes, in their order.
pub fn compile(
    graph: &Graph,
    backward: &Backward,
    layout: Layout,
    settings: &Settings,
) -> Result<Program, ProgramError> {
    if settings.stage > 3 {
        return Err(ProgramError::Stage { stage: settings.stage });
    }
    let program = passes::lower(graph, backward, layout, settings);
    // Gathers before reductions: a gradient's landing must find its parameters' order settled.
    let program = passes::gather(program, settings);
    let program = passes::reduce(program, settings);
    let program = passes::update(program);
    // Last, because it moves what the others have put down.
    Ok(passes::overlap(program, settings))
}
