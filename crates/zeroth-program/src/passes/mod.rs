//! The passes, one file each: functions from a program to a program; and what runs them in order.

mod checkpoint;
mod gather;
mod in_place;
mod lower;
mod offload;
mod operands;
mod overlap;
mod rails;
mod reduce;
mod unpack;
mod update;

pub use in_place::in_place;

use zeroth_base::DType;
use zeroth_graph::{Backward, Graph};

use crate::settings::TopLogProbs;
use crate::{CachedTokens, Layout, Program, ProgramError, Settings, World};
use checkpoint::checkpoint;
use gather::gather;
use lower::{lower, lower_inference, lower_top_log_probs};
use offload::offload;
use operands::operands;
use overlap::overlap;
use rails::rails;
use reduce::reduce;
use unpack::unpack;
use update::update;

/// Compiles a model for inference on one rank with compute dtype `run`: forward, then the next-token logits of up to
/// `sequences` sequences. With a cache for keys and values it has a section that decodes. All parameters are
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
    let program = lower_inference(graph, layout, &settings, sequences, cached);
    let program = unpack(program, graph, backward);
    operands(program, graph, backward)
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
    if world.group == 0 || !world.ranks.is_multiple_of(world.group) {
        return Err(ProgramError::Groups(world));
    }
    // Unsharded parameters need no persistent flat: small ones stay in the flat of their unit.
    let persistence = if settings.stage >= 3 { settings.persistence } else { 0 };
    let storage = settings.types.compute;
    let layout = Layout::new(graph, world, persistence, settings.model_persistence, storage);
    let program = lower(graph, backward, layout, settings);
    // Recomputed nodes read parameters too, so they must exist before `gather` places all-gathers.
    let program = checkpoint(program, graph, backward, settings);
    // `reduce` relies on the final order of parameter reads, so it runs after `gather`.
    let program = gather(program, settings);
    let program = reduce(program, settings);
    let program = update(program, settings);
    // `overlap` reorders what the earlier passes emitted; `offload` inserts copies next to it.
    let program = overlap(program, settings);
    let program = offload(program, settings);
    let program = rails(program);
    // Right before each use: what is unpacked is not kept, and not prefetched.
    let program = unpack(program, graph, backward);
    Ok(operands(program, graph, backward))
}

/// Compiles the forward of a teacher, whose most probable tokens are kept.
pub(super) fn compile_top_log_probs(
    graph: &Graph,
    backward: &Backward,
    world: World,
    settings: &Settings,
    top: TopLogProbs,
) -> Program {
    let layout = Layout::new(graph, world, 0, 0, settings.types.compute);
    let program = lower_top_log_probs(graph, layout, settings, top);
    let program = gather(program, settings);
    let program = overlap(program, settings);
    let program = offload(program, settings);
    let program = rails(program);
    let program = unpack(program, graph, backward);
    operands(program, graph, backward)
}
