//! `reduce`: how gradients become shards.
//!
//! Keys: `zero_optimization.reduce_bucket_size`, `gradient_accumulation_steps`.
//!
//! Stage 3 reduces every micro-batch: a flat's gradient is cleared before the first landing and exchanged, chunk by
//! chunk, after the last. Stage 0 lets micro-batches add in the flat's own gradient and reduces in the last one.

use super::super::{Action, Addition, Instruction, Program, Section, SectionKind, Settings};

pub(in super::super) fn reduce(mut program: Program, settings: Settings) -> Program {
    let sections = std::mem::take(&mut program.sections);
    program.sections = sections.iter().map(|section| reduced(&program, section, settings)).collect();
    program
}

fn reduced(program: &Program, section: &Section, settings: Settings) -> Section {
    let every_time = program.cuts_parameters;
    let is_first = matches!(section.kind, SectionKind::Only | SectionKind::First);
    let is_last = matches!(section.kind, SectionKind::Only | SectionKind::Last);
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
            if every_time || is_last {
                let addition = if !every_time || is_first { Addition::Write } else { Addition::Add };
                let chunks = program.layout.flats[*flat].chunks(program.layout.ranks, settings.reduce_bucket);
                let reduce = |chunk| Instruction::new(Action::Reduce { flat: *flat, chunk, addition });
                out.extend(chunks.map(reduce));
            }
        }
    }
    Section { kind: section.kind, instructions: out }
}
