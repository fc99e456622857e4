//! `reduce`: from accumulated gradients to what the update reads.
//!
//! Keys: `zero_optimization.reduce_bucket_size`, `gradient_accumulation_steps`, `zero_optimization.stage`,
//! `communication_data_type`, `zero_optimization.zero_hpz_partition_size`; `zero_optimization.reduce_scatter` decides what an exchange moves, and not where it stands.
//!
//! Stages 2 and 3 reduce every micro-batch: accumulated parts of a flat's gradient are zeroed before backward writes
//! them; after the last write, f32 parts are cast, and the flat is exchanged and summed chunk by chunk. Stages 0 and 1
//! accumulate micro-batches in the flat's own gradient and reduce in the last one. One rank without accumulation only
//! casts.
//!
//! In a mesh with two levels, groups add up first, in f32; their partial sums are exchanged along the rails. With
//! `zero_hpz_partition_size` micro-batches add up in the partial sums, which cross the rail in the last one.

use crate::{
    Accumulate, Action, Chunk, GradientStorage, Instruction, Program, Section, SectionKind, Settings,
};

pub(super) fn reduce(mut program: Program, settings: &Settings) -> Program {
    let sections = std::mem::take(&mut program.sections);
    program.sections = sections.iter().map(|section| reduced(&program, section, settings)).collect();
    program
}

fn reduced(program: &Program, section: &Section, settings: &Settings) -> Section {
    let mut out = Vec::with_capacity(section.instructions.len());
    // For each flat, the first and the last instruction that accumulate into it.
    let mut ends: Vec<Option<(usize, usize)>> = vec![None; program.layout.flats.len()];
    for (index, instruction) in section.instructions.iter().enumerate() {
        for flat in &instruction.accumulates_into {
            ends[*flat].get_or_insert((index, index)).1 = index;
        }
    }
    for (index, instruction) in section.instructions.iter().enumerate() {
        let is_first = |flat: &&usize| ends[**flat].is_some_and(|(first, _)| first == index);
        let is_last = |flat: &&usize| ends[**flat].is_some_and(|(_, last)| last == index);
        for flat in instruction.accumulates_into.iter().filter(is_first) {
            if !program.zeroed(section.kind, *flat).is_empty() {
                out.push(Instruction::new(Action::ZeroGrad(*flat)));
            }
        }
        out.push(instruction.clone());
        for flat in instruction.accumulates_into.iter().filter(is_last) {
            if program.reduces_in(section.kind) {
                reduce_flat(program, section.kind, *flat, settings, &mut out);
            }
        }
    }
    Section { kind: section.kind, instructions: out }
}

fn reduce_flat(
    program: &Program,
    kind: SectionKind,
    flat: usize,
    settings: &Settings,
    out: &mut Vec<Instruction>,
) {
    if program.gradient_storage() == GradientStorage::FlatComm {
        out.push(Instruction::new(Action::KeepGrad(flat)));
        return;
    }
    let is_first = program.stage < 2 || kind.is_first();
    let addition = if is_first { Accumulate::Overwrite } else { Accumulate::Add };
    let ranks = program.layout.ranks();
    let has_rest = !program.uncast(kind, flat).is_empty() || !program.unchecked(kind, flat).is_empty();
    let chunks: Vec<_> = program.layout.flats[flat].chunks(ranks, settings.reduce_bucket).collect();
    if program.casts_in_producers(kind) && has_rest {
        out.push(Instruction::new(Action::CastGrad(flat)));
    }
    // A single chunk is the flat itself and needs no packing.
    let in_parts = ranks > 1 && chunks.len() > 1;
    for range in chunks {
        let chunk = Chunk { flat, range };
        if !program.casts_in_producers(kind) {
            out.push(Instruction::new(Action::CastAndPackGrad(chunk.clone())));
        } else if in_parts {
            out.push(Instruction::new(Action::PackGrad(chunk.clone())));
        }
        // Partial sums that add up over micro-batches cross the rail once.
        let levels = program.layout.world.levels().iter().filter(|axis| {
            program.sums_partially(**axis) || !program.accumulates_partial_sums() || kind.is_last()
        });
        for axis in levels.copied() {
            if ranks > 1 {
                out.push(Instruction::new(Action::AllToAll(chunk.clone(), axis)));
            }
            // Of two levels only one adds to what earlier micro-batches left.
            let adds = program.sums_partially(axis) == program.accumulates_partial_sums();
            let addition = if adds { addition } else { Accumulate::Overwrite };
            out.push(Instruction::new(Action::SumRanks(chunk.clone(), addition, axis)));
        }
    }
}
