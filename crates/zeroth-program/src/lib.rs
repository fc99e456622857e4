//! The step program: the instruction list that a rank executes in one training step, compiled before the run starts.
//!
//! `lower` emits forward and backward of a micro-batch. The passes after it add what ZeRO adds: all-gathers and
//! releases of parameters, reduce-scatters of gradients, the optimizer step, and overlap. A pass moves work and never
//! changes arithmetic. [`Memory`] places every buffer of a program, and the engine runs it.

mod address_accesses;
mod buffer;
mod buffer_analysis;
mod cached_tokens;
mod category_bytes;
mod check;
mod communication;
mod compiled;
mod cross_section_buffers;
mod cross_step_waits;
mod dump;
mod grad_destinations;
mod grad_producers;
mod ir;
mod launches;
mod layout;
mod lowering_parts;
mod memory;
mod occupancy;
mod operands;
mod passes;
mod placement;
mod plan_memory;
mod program;
mod router_counts;
mod settings;
mod shared_buffers;
mod stream_sizes;
mod streams;
mod sub_group;
mod top_log_probs;
mod views;
mod waits;
mod world;

use zeroth_base::DType;
use zeroth_graph::{Backward, Graph};

pub use buffer::{Buffer, BufferId, Category};
pub use buffer_analysis::vocabulary;
pub use cached_tokens::CachedTokens;
pub use category_bytes::Bytes;
pub use check::{GatherStats, ProgramError};
pub use compiled::{CompileError, Compiled};
pub use grad_producers::GradProducers;
pub use ir::{Accumulate, Action, Chunk, GradientStorage, Instruction, Section, SectionKind};
pub use launches::{Binding, Collective, Lowering, Work};
pub use layout::{BLOCK, Flat, FlatKind, Layout, Piece, Slot, Storage};
pub use lowering_parts::{LoweringDifference, LoweringPart};
pub use memory::{LiveRange, Memory, PlacedBuffer, SectionMemory};
pub use operands::Operands;
pub use passes::in_place;
pub use plan_memory::plan_memory;
pub use program::{Program, Residency};
pub use router_counts::RouterCounts;
pub use settings::{Offload, Settings, StateStream, TeacherPlacement, Types};
pub use stream_sizes::StreamSizes;
pub use streams::cross_streams;
pub use top_log_probs::TopLogProbs;
pub use world::World;
pub use zeroth_config::schema::{FrozenPlacement, Gather, Recompute, UpdatedBy};

/// Compiles a model for inference on one rank with compute dtype `run`: forward, then the next-token logits of up to
/// `sequences` sequences. With a cache for the keys and values of so many tokens it has a section that decodes. All parameters are
/// frozen, so nothing is planned that only training needs.
pub fn compile_inference(
    graph: &Graph,
    backward: &Backward,
    run: DType,
    sequences: u64,
    cached: CachedTokens,
) -> Program {
    let layout = Layout::new(graph, 1, 0, 0, run);
    let settings = Settings::inference(run);
    let program = passes::lower_inference(graph, layout, &settings, sequences, cached);
    let program = passes::unpack(program, graph, backward);
    passes::operands(program, graph, backward)
}

/// Compiles a training step for the ranks of `world` by running the passes in order.
pub fn compile(
    graph: &Graph,
    backward: &Backward,
    world: impl Into<World>,
    settings: &Settings,
) -> Result<Program, ProgramError> {
    let world = world.into();
    if settings.stage > 3 {
        return Err(ProgramError::Stage { stage: settings.stage });
    }
    // Unsharded parameters need no persistent flat: small ones stay in the flat of their unit.
    let persistence = if settings.stage >= 3 { settings.persistence } else { 0 };
    let storage = settings.types.compute;
    let layout = Layout::new(graph, world.ranks, persistence, settings.model_persistence, storage);
    let program = passes::lower(graph, backward, world, layout, settings);
    // Recomputed nodes read parameters too, so they must exist before `gather` places all-gathers.
    let program = passes::checkpoint(program, graph, backward, settings);
    // `reduce` relies on the final order of parameter reads, so it runs after `gather`.
    let program = passes::gather(program, settings);
    let program = passes::reduce(program, settings);
    let program = passes::update(program, settings);
    // `overlap` reorders what the earlier passes emitted; `offload` inserts copies next to it.
    let program = passes::overlap(program, settings);
    let program = passes::offload(program, settings);
    // Right before each use: what is unpacked is not kept, and not prefetched.
    let program = passes::unpack(program, graph, backward);
    Ok(passes::operands(program, graph, backward))
}
