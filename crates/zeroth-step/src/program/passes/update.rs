//! `update`: norm, clipping and optimizer, flat by flat.
//!
//! Keys: `zero_optimization.stage`, `gradient_clipping`, `optimizer` (their values are uploaded as a recipe; the program
//! does not change with them).
//!
//! The norm of all gradients is known before any weight changes. Stage 0 brings the summed gradients together first,
//! because every rank updates all of every flat; stages 1 and above update shards, and what stays gathered is brought
//! together again.

use super::super::{Action, Instruction, Program, Section, SectionKind};

pub(in super::super) fn update(mut program: Program) -> Program {
    let trained: Vec<usize> =
        (0..program.layout.flats.len()).filter(|flat| program.is_trained(*flat)).collect();
    let each = |action: fn(usize) -> Action, flats: &[usize]| {
        flats.iter().map(|flat| Instruction::new(action(*flat))).collect::<Vec<_>>()
    };
    let company = program.layout.ranks > 1;
    let mut instructions = each(Action::Squares, &trained);
    if company {
        instructions.push(Instruction::new(Action::Reports));
    }
    instructions.push(Instruction::new(Action::Control));
    if company && !program.cuts_optimizer() {
        instructions.extend(each(Action::GatherGradient, &trained));
    }
    for flat in &trained {
        instructions.push(Instruction::new(Action::Update(*flat)));
        if company && program.cuts_optimizer() && program.stays_gathered(*flat) {
            instructions.push(Instruction::new(Action::GatherWeights(*flat)));
        }
    }
    program.sections.push(Section { kind: SectionKind::Update, instructions });
    program
}
