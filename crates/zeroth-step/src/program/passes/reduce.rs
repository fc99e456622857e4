//! `reduce`: how gradients become what the update reads.
//!
//! Keys: `zero_optimization.reduce_bucket_size`, `gradient_accumulation_steps`, `zero_optimization.stage`,
//! `communication_data_type`; `zero_optimization.reduce_scatter` decides what an exchange moves, and not where it stands.
//!
//! Stages 2 and 3 reduce every micro-batch: a flat's gradient is cleared before the first landing and, after the last,
//! rounded, exchanged and added, chunk by chunk. Stages 0 and 1 let micro-batches add in the flat's own gradient and
//! reduce in the last one. Alone, without accumulation, a gradient is only rounded.

use super::super::{Action, Addition, Chunk, GradientHome, Instruction, Program, Section, Settings};

pub(in super::super) fn reduce(mut program: Program, settings: &Settings) -> Program {
    let sections = std::mem::take(&mut program.sections);
    program.sections = sections.iter().map(|section| reduced(&program, section, settings)).collect();
    program
}

fn reduced(program: &Program, section: &Section, settings: &Settings) -> Section {
    let every_time = program.stage >= 2;
    let is_first = section.kind.is_first();
    let mut out = Vec::with_capacity(section.instructions.len());
    for (index, instruction) in section.instructions.iter().enumerate() {
        let lands_before =
            |flat: &usize| section.instructions[..index].iter().any(|i| i.lands.contains(flat));
        let lands_after =
            |flat: &usize| section.instructions[index + 1..].iter().any(|i| i.lands.contains(flat));
        for flat in instruction.lands.iter().filter(|flat| !lands_before(flat)) {
            if every_time || is_first {
                out.push(Instruction::new(Action::Clear(*flat)));
            }
        }
        out.push(instruction.clone());
        for flat in instruction.lands.iter().filter(|flat| !lands_after(flat)) {
            if program.reduces() && (every_time || section.kind.is_last()) {
                let addition = if !every_time || is_first { Addition::Write } else { Addition::Add };
                reduce_flat(program, *flat, addition, settings, &mut out);
            }
        }
    }
    Section { kind: section.kind, instructions: out }
}

fn reduce_flat(
    program: &Program,
    flat: usize,
    addition: Addition,
    settings: &Settings,
    out: &mut Vec<Instruction>,
) {
    if program.gradient_home() == GradientHome::Rounded {
        out.push(Instruction::new(Action::Keep(flat)));
        return;
    }
    let ranks = program.layout.ranks;
    for range in program.layout.flats[flat].chunks(ranks, settings.reduce_bucket) {
        let chunk = Chunk { flat, range };
        out.push(Instruction::new(Action::Round(chunk.clone())));
        if ranks > 1 {
            out.push(Instruction::new(Action::Exchange(chunk.clone())));
        }
        out.push(Instruction::new(Action::Add(chunk, addition)));
    }
}
