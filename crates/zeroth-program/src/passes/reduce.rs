//! `reduce`: how gradients become what the update reads.
//!
//! Keys: `zero_optimization.reduce_bucket_size`, `gradient_accumulation_steps`, `zero_optimization.stage`,
//! `communication_data_type`; `zero_optimization.reduce_scatter` decides what an exchange moves, and not where it stands.
//!
//! Stages 2 and 3 reduce every micro-batch: what of a flat's gradient is added to is cleared before the first landing and,
//! after the last, what did not land in the communication type is rounded, and all is exchanged and added, chunk by chunk.
//! Stages 0 and 1 let micro-batches add in the flat's own gradient and reduce in the last one. Alone, without accumulation,
//! a gradient is only rounded.

use super::super::{
    Action, Addition, Chunk, GradientHome, Instruction, Program, Section, SectionKind, Settings,
};

pub(in super::super) fn reduce(mut program: Program, settings: &Settings) -> Program {
    let sections = std::mem::take(&mut program.sections);
    program.sections = sections.iter().map(|section| reduced(&program, section, settings)).collect();
    program
}

fn reduced(program: &Program, section: &Section, settings: &Settings) -> Section {
    let mut out = Vec::with_capacity(section.instructions.len());
    for (index, instruction) in section.instructions.iter().enumerate() {
        let lands_before =
            |flat: &usize| section.instructions[..index].iter().any(|i| i.lands.contains(flat));
        let lands_after =
            |flat: &usize| section.instructions[index + 1..].iter().any(|i| i.lands.contains(flat));
        for flat in instruction.lands.iter().filter(|flat| !lands_before(flat)) {
            if !program.cleared(section.kind, *flat).is_empty() {
                out.push(Instruction::new(Action::Clear(*flat)));
            }
        }
        out.push(instruction.clone());
        for flat in instruction.lands.iter().filter(|flat| !lands_after(flat)) {
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
    if program.gradient_home() == GradientHome::Rounded {
        out.push(Instruction::new(Action::Keep(flat)));
        return;
    }
    let is_first = program.stage < 2 || kind.is_first();
    let addition = if is_first { Addition::Write } else { Addition::Add };
    let ranks = program.layout.ranks;
    let has_rest = !program.unrounded(kind, flat).is_empty() || !program.unseen(kind, flat).is_empty();
    let chunks: Vec<_> = program.layout.flats[flat].chunks(ranks, settings.reduce_bucket).collect();
    if program.rounds_landings(kind) && has_rest {
        out.push(Instruction::new(Action::RoundRest(flat)));
    }
    // The only chunk of a flat is the flat.
    let in_parts = ranks > 1 && chunks.len() > 1;
    for range in chunks {
        let chunk = Chunk { flat, range };
        if !program.rounds_landings(kind) {
            out.push(Instruction::new(Action::Round(chunk.clone())));
        } else if in_parts {
            out.push(Instruction::new(Action::Pack(chunk.clone())));
        }
        if ranks > 1 {
            out.push(Instruction::new(Action::Exchange(chunk.clone())));
        }
        out.push(Instruction::new(Action::Add(chunk, addition)));
    }
}
