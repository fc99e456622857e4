//! The step program: what a rank does in one training step, written down before it runs.
//!
//! `lower` writes a micro-batch's forward and backward; the passes after it add what ZeRO adds: parameters that arrive
//! and leave, gradients that become shards, the update. A pass moves work; it does not change arithmetic. Built so far:
//! stages 0 and 3, with `lower`, `gather`, `reduce` and `update`, and [`bytes()`], which counts and places memory; queues
//! and waits come next (docs/program.md).

mod bytes;
mod ir;
mod passes;

use zeroth_graph::{Backward, Graph};

pub use bytes::{Buffer, Category, Memory, Types, bytes};
pub use ir::{Action, Addition, Instruction, Program, ProgramError, Residency, Section, SectionKind};

use crate::Layout;

/// What the passes ask of a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `zero_optimization.stage`: 0 or 3.
    pub stage: u8,
    /// `gradient_accumulation_steps`.
    pub accumulation: u64,
    /// `zero_optimization.reduce_bucket_size`, in elements.
    pub reduce_bucket: u64,
    /// `zero_optimization.stage3_max_live_parameters`, in elements.
    pub max_live: u64,
    /// `zero_optimization.stage3_max_reuse_distance`, in elements.
    pub max_reuse: u64,
}

/// Compiles a step: the passes, in their order.
pub fn compile(
    graph: &Graph,
    backward: &Backward,
    layout: Layout,
    settings: Settings,
) -> Result<Program, ProgramError> {
    if !matches!(settings.stage, 0 | 3) {
        return Err(ProgramError::Stage { stage: settings.stage });
    }
    let program = passes::lower(graph, backward, layout, settings);
    // Gathers before reductions: a gradient's landing must find its parameters' order settled.
    let program = passes::gather(program, settings);
    let program = passes::reduce(program, settings);
    Ok(passes::update(program, settings))
}
