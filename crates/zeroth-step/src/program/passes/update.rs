//! `update`: norm, clipping and optimizer, flat by flat.
//!
//! Keys: `zero_optimization.stage` (and, when the optimizer is built, `gradient_clipping` and `optimizer`).
//!
//! The norm of all gradients is known before any weight changes. Stage 0 brings the summed gradients together first,
//! because every rank updates all of every flat.

use super::super::{Action, Instruction, Program, Section, SectionKind, Settings};
use crate::FlatKind;

pub(in super::super) fn update(mut program: Program, settings: Settings) -> Program {
    let is_trained = |flat: &usize| !matches!(program.layout.flats[*flat].kind, FlatKind::Frozen(_));
    let trained: Vec<usize> = (0..program.layout.flats.len()).filter(is_trained).collect();
    let mut instructions = Vec::new();
    if settings.stage == 0 {
        instructions.extend(trained.iter().map(|flat| Instruction::new(Action::GatherGradient(*flat))));
    }
    instructions.push(Instruction::new(Action::Control));
    instructions.extend(trained.iter().map(|flat| Instruction::new(Action::Update(*flat))));
    // What stays gathered at stage 3 was updated in shards, and is brought together again.
    let persistent = trained
        .iter()
        .filter(|flat| program.cuts_parameters && program.layout.flats[**flat].kind == FlatKind::Persistent);
    instructions.extend(persistent.map(|flat| Instruction::new(Action::Gather(*flat))));
    program.sections.push(Section { kind: SectionKind::Update, instructions });
    program
}
