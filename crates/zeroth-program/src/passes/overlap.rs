//! `overlap`: queues and prefetch, so that transfers overlap compute.
//!
//! Keys: `zero_optimization.overlap_comm`, `zero_optimization.stage3_prefetch_bucket_size`,
//! `zero_optimization.stage3_max_live_parameters`.
//!
//! With overlap_comm, collectives run on a queue of their own. An all-gather is hoisted as long as prefetched elements
//! stay within the prefetch bucket (a unit is fetched whole, so a bucket above 0 always allows the next one) and all
//! gathered elements within max_live. The sum of a received chunk is delayed until the next chunk is in transfer, at each
//! level. Only order and queues change, not instructions or operands.

use zeroth_base::Axis;
use zeroth_kernel::Queue;

use crate::{Action, Instruction, Program, Section, Settings};

pub(super) fn overlap(mut program: Program, settings: &Settings) -> Program {
    if !settings.overlap {
        return program;
    }
    let most = program.live_limit(settings.max_live);
    let mut sections = std::mem::take(&mut program.sections);
    for section in &mut sections {
        if settings.prefetch > 0 {
            hoist_gathers(&program, section, settings.prefetch, most);
        }
        program.layout.world.levels().iter().for_each(|axis| defer_sums(section, *axis));
        for instruction in &mut section.instructions {
            instruction.queue = match instruction.action {
                Action::OffloadActivation(_) => Queue::Download,
                Action::ReloadActivation(_) => Queue::Upload,
                ref action if action.is_collective() => Queue::Comm,
                _ => Queue::Compute,
            };
        }
    }
    program.sections = sections;
    program
}

/// A gathered copy of a flat and the index of its first read.
struct LiveFlat {
    flat: usize,
    first_read: Option<usize>,
}

/// Hoists each all-gather, in order.
fn hoist_gathers(program: &Program, section: &mut Section, prefetch: u64, most: u64) {
    let elements = |flat: usize| program.gathered_elements(flat);
    for at in 0..section.instructions.len() {
        let Action::AllGather(flat, _) = section.instructions[at].action else { continue };
        // Zero-copy gathers are already at the start of the section.
        if program.is_viewed(flat) {
            continue;
        }
        let mut resident = live_flats(&section.instructions, at);
        let mut place = at;
        while place > 0 {
            let crossed = &section.instructions[place - 1];
            match crossed.action {
                // All-gathers keep their order, and a flat is not gathered before its previous copy is released.
                Action::AllGather(..) => break,
                Action::Release(other) if other == flat => break,
                Action::Release(other) => {
                    resident.push(live_flat_before(&section.instructions[..place - 1], other));
                }
                _ => {}
            }
            let live: u64 = resident.iter().map(|live| elements(live.flat)).sum();
            let unread = |live: &&LiveFlat| live.first_read.is_none_or(|read| read >= place - 1);
            let ahead: u64 = resident.iter().filter(unread).map(|live| elements(live.flat)).sum();
            // A unit is fetched whole: with nothing prefetched, the next one always may be.
            let has_room = ahead == 0 || ahead + elements(flat) <= prefetch;
            if !has_room || program.persistent_elements() + live + elements(flat) > most {
                break;
            }
            place -= 1;
        }
        section.instructions[place..=at].rotate_right(1);
    }
}

/// The gathered copy of a flat that ends with this list.
fn live_flat_before(instructions: &[Instruction], flat: usize) -> LiveFlat {
    let is_gather =
        |instruction: &Instruction| matches!(instruction.action, Action::AllGather(of, _) if of == flat);
    let gathered = instructions.iter().rposition(is_gather);
    let from = gathered.unwrap_or(0);
    let read = instructions[from..].iter().position(|instruction| instruction.reads.contains(&flat));
    LiveFlat { flat, first_read: read.map(|read| from + read) }
}

/// The flats that are gathered right before an instruction.
fn live_flats(instructions: &[Instruction], at: usize) -> Vec<LiveFlat> {
    let mut resident: Vec<LiveFlat> = Vec::new();
    for (index, instruction) in instructions.iter().enumerate() {
        if index >= at && resident.iter().all(|live| live.first_read.is_some()) {
            break;
        }
        match instruction.action {
            Action::AllGather(flat, _) if index < at => resident.push(LiveFlat { flat, first_read: None }),
            Action::Release(flat) if index < at => resident.retain(|live| live.flat != flat),
            _ => {}
        }
        for live in &mut resident {
            if live.first_read.is_none() && instruction.reads.contains(&live.flat) {
                live.first_read = Some(index);
            }
        }
    }
    resident
}

/// Moves what follows the exchange of a chunk along an axis, its sum and any further level, after the next exchange along it,
/// or to the end.
fn defer_sums(section: &mut Section, axis: Axis) {
    let mut out: Vec<Instruction> = Vec::with_capacity(section.instructions.len());
    let mut waiting: Vec<Instruction> = Vec::new();
    for instruction in section.instructions.drain(..) {
        match &instruction.action {
            Action::SumRanks(_, _, along) if *along == axis => {
                out.append(&mut waiting);
                waiting.push(instruction);
            }
            Action::AllToAll(_, along) if *along == axis => {
                out.push(instruction);
                out.append(&mut waiting);
            }
            // The next level of what waits.
            Action::SumRanks(chunk, ..) | Action::AllToAll(chunk, _)
                if waiting.first().is_some_and(|sum| sum.action.chunk() == Some(chunk)) =>
            {
                waiting.push(instruction);
            }
            _ => out.push(instruction),
        }
    }
    out.append(&mut waiting);
    section.instructions = out;
}
