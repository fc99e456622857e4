//! `in_place`: CPU ranks of one group reduce gradients straight from each other's memory.
//!
//! Keys: none; the device decides, and `zero_optimization.reduce_scatter`.
//!
//! On the CPU, all-to-all and sum become one reduce-scatter that reads each rank's cast gradient where it is; nothing
//! is packed or received first. The same values are added in the same order. A reduction that completes a gradient also
//! computes its squared norm, so that the update need not read it again. Without reduce_scatter, the all-to-all must
//! deliver everything to every rank, and stays.
//!
//! In a mesh with two levels this is the group's level: its sums are partial, and the rail's level stays. What a rank gets
//! of a chunk are parts of its rail, so a flat with several chunks is still packed, and chunks bound the partial sums.

use std::collections::BTreeSet;

use zeroth_base::Axis;
use zeroth_graph::{Backward, Graph};
use zeroth_kernel::Target;

use super::operands::operands;
use crate::{Accumulate, Action, Chunk, Program, Section};

/// Specialises a program for a target.
pub fn in_place(mut program: Program, graph: &Graph, backward: &Backward, target: &dyn Target) -> Program {
    let world = program.layout.world;
    if target.maps_peers() && program.reduce_scatter && world.group > 1 {
        let on_device: Vec<bool> =
            program.residency.iter().map(|residency| !residency.gradients.is_offloaded()).collect();
        for section in &mut program.sections {
            reduce_in_place(section, world.has_two_levels());
            if !world.has_two_levels() {
                join_chunks(section, &on_device);
            }
        }
        let reduced = program.sections.iter().flat_map(|section| {
            section.instructions.iter().filter_map(|instruction| match &instruction.action {
                Action::ReduceScatter(chunk, addition, _) => Some((section.kind, chunk.flat, *addition)),
                _ => None,
            })
        });
        let counted: BTreeSet<usize> = reduced
            .filter(|(kind, flat, addition)| program.completes(*kind, *flat, *addition))
            .map(|(_, flat, _)| flat)
            .collect();
        for section in &mut program.sections {
            let is_counted =
                |action: &Action| matches!(action, Action::GradSquares(flat) if counted.contains(flat));
            section.instructions.retain(|instruction| !is_counted(&instruction.action));
        }
        program = operands(program, graph, backward);
    }
    program
}

fn reduce_in_place(section: &mut Section, keeps_packed: bool) {
    let sums: Vec<(Chunk, Accumulate)> = section
        .instructions
        .iter()
        .filter_map(|instruction| match &instruction.action {
            Action::SumRanks(chunk, addition, Axis::Group) => Some((chunk.clone(), *addition)),
            _ => None,
        })
        .collect();
    for instruction in &mut section.instructions {
        let Action::AllToAll(chunk, axis @ Axis::Group) = &instruction.action else { continue };
        let sum = sums.iter().find(|(summed, _)| summed == chunk).expect("what is exchanged is added");
        instruction.action = Action::ReduceScatter(sum.0.clone(), sum.1, *axis);
    }
    section.instructions.retain(|instruction| match instruction.action {
        Action::SumRanks(_, _, Axis::Group) => false,
        Action::PackGrad(_) => keeps_packed,
        _ => true,
    });
}

/// Merges reductions of consecutive chunks: a bucket bounds pack and receive buffers, and here there are none. Chunks
/// that go on to host memory stay separate, which bounds the buffers of the copy.
fn join_chunks(section: &mut Section, on_device: &[bool]) {
    section.instructions.dedup_by(|next, reduced| {
        let (Action::ReduceScatter(chunk, addition, _), Action::ReduceScatter(before, added, _)) =
            (&next.action, &mut reduced.action)
        else {
            return false;
        };
        let follows = chunk.flat == before.flat && chunk.range.start == before.range.end;
        let joins = follows && addition == added && on_device[chunk.flat];
        if joins {
            before.range.end = chunk.range.end;
        }
        joins
    });
}
