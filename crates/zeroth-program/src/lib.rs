//! The step program: what a rank does in one training step, written down before it runs.
//!
//! `lower` writes a micro-batch's forward and backward; the passes after it add what ZeRO adds: parameters that arrive
//! and leave, gradients that become shards, the update, and what runs beside what. A pass moves work; it does not
//! change arithmetic. [`Memory`] gives every buffer of a program a place, the engine carries it out.

mod across;
mod buffers;
mod bytes;
mod carried;
mod category_bytes;
mod check;
mod compiled;
mod ir;
mod landings;
mod launches;
mod layout;
mod passes;
mod place;
mod settings;
mod target;
mod tile;
mod views;
mod waits;

use zeroth_base::DType;
use zeroth_graph::{Backward, Graph};

pub use buffers::vocabulary;
pub use buffers::{Buffer, Category, Content};
pub use settings::{Gather, Offload, Recompute, Settings, Stream, Types, UpdatedBy};

pub use bytes::guarded_bytes;
pub use bytes::{Memory, Placed, Reach, SectionMemory, bytes};
pub use check::{ProgramError, Residency};
pub use ir::{Action, Addition, Chunk, GradientHome, Held, Instruction, Program, Section, SectionKind};
pub use landings::Givers;
pub use launches::{Binding, Collective, Lowering, Work};
pub use passes::in_place;

pub use category_bytes::Bytes;
pub use compiled::{CompileError, Compiled};
pub use layout::{BLOCK, Flat, FlatKind, Layout, Piece, Slot};
pub use target::Target;

/// Compiles a model for inference on one rank, its numbers stored in `run`: forward, and the next-token logits of up to
/// `sequences` sequences. The model's parameters are frozen, so that nothing is planned that training would need.
pub fn compile_inference(graph: &Graph, run: DType, sequences: u64) -> Program {
    let layout = Layout::new(graph, 1, 0, 0);
    passes::lower_inference(graph, layout, &Settings::inference(run), sequences)
}

/// Compiles a step on `ranks` ranks: the passes, in their order.
pub fn compile(
    graph: &Graph,
    backward: &Backward,
    ranks: u64,
    settings: &Settings,
) -> Result<Program, ProgramError> {
    if settings.stage > 3 {
        return Err(ProgramError::Stage { stage: settings.stage });
    }
    // Where parameters are whole on every rank, small ones lie with their unit.
    let persistence = if settings.stage >= 3 { settings.persistence } else { 0 };
    let layout = Layout::new(graph, ranks, persistence, settings.model_persistence);
    let program = passes::lower(graph, backward, layout, settings);
    // What is computed again must be there before parameters are gathered for it.
    let program = passes::checkpoint(program, graph, backward, settings);
    // Gathers before reductions: a gradient's landing must find its parameters' order settled.
    let program = passes::gather(program, settings);
    let program = passes::reduce(program, settings);
    let program = passes::update(program, settings);
    // Overlap moves what the others have put down; offload puts copies beside it.
    let program = passes::overlap(program, settings);
    Ok(passes::offload(program, settings))
}
