//! `in_place`: ranks that see each other's memory read it where it lies.
//!
//! Keys: none; the device decides, and `zero_optimization.reduce_scatter`.
//!
//! Ranks that compute on the processor add up a chunk straight from what each of them has rounded, wherever it lies: the
//! exchange and the sum are one instruction, in the exchange's place, and nothing is packed or received first. The same
//! values are added in the same order. A sum that completes a gradient counts its squares, too, so that the update need not
//! read it for the norm. Without reduce_scatter an exchange is asked to give every rank everything, and stays
//! what it is.

use std::collections::BTreeSet;

use crate::Target;
use zeroth_kernel::Tier;

use super::super::{Action, Addition, Chunk, Program, Section};

/// The program as a device of this kind runs it.
pub fn in_place(mut program: Program, target: Target) -> Program {
    if matches!(target, Target::Cpu { .. }) && program.reduce_scatter && program.layout.ranks > 1 {
        let on_device: Vec<bool> = program.held.iter().map(|held| held.gradients == Tier::Device).collect();
        for section in &mut program.sections {
            reduce_in_place(section);
            join_chunks(section, &on_device);
        }
        let reduced = program.sections.iter().flat_map(|section| {
            section.instructions.iter().filter_map(|instruction| match &instruction.action {
                Action::Reduce(chunk, addition) => Some((section.kind, chunk.flat, *addition)),
                _ => None,
            })
        });
        let counted: BTreeSet<usize> = reduced
            .filter(|(kind, flat, addition)| program.completes(*kind, *flat, *addition))
            .map(|(_, flat, _)| flat)
            .collect();
        for section in &mut program.sections {
            let is_counted =
                |action: &Action| matches!(action, Action::Squares(flat) if counted.contains(flat));
            section.instructions.retain(|instruction| !is_counted(&instruction.action));
        }
    }
    program
}

fn reduce_in_place(section: &mut Section) {
    let sums: Vec<(Chunk, Addition)> = section
        .instructions
        .iter()
        .filter_map(|instruction| match &instruction.action {
            Action::Add(chunk, addition) => Some((chunk.clone(), *addition)),
            _ => None,
        })
        .collect();
    for instruction in &mut section.instructions {
        let Action::Exchange(chunk) = &instruction.action else { continue };
        let sum = sums.iter().find(|(summed, _)| summed == chunk).expect("what is exchanged is added");
        instruction.action = Action::Reduce(sum.0.clone(), sum.1);
    }
    section
        .instructions
        .retain(|instruction| !matches!(instruction.action, Action::Add(..) | Action::Pack(_)));
}

/// Makes one sum of chunks that follow each other: a bucket bounds what is packed and received, and here nothing is. What goes
/// on to host memory stays in chunks, which bound what waits for the copy.
fn join_chunks(section: &mut Section, on_device: &[bool]) {
    section.instructions.dedup_by(|next, reduced| {
        let (Action::Reduce(chunk, addition), Action::Reduce(before, added)) =
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
