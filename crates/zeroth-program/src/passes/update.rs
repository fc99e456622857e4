//! `update`: gradient norm, clipping and optimizer, flat by flat.
//!
//! Keys: `zero_optimization.stage`, `zero_optimization.allgather_bucket_size`, `zero_optimization.allgather_partitions`,
//! `gradient_clipping`, `optimizer` (their values are uploaded as a recipe; the program
//! does not change with them).
//!
//! The global norm is known before any weight changes. Stage 0 all-gathers the reduced gradients first, because every
//! rank updates every flat; stages 1 and above update shards, and flats that stay gathered are all-gathered again.

use crate::{Action, Chunk, Instruction, Program, Section, SectionKind, Settings};

pub(super) fn update(mut program: Program, settings: &Settings) -> Program {
    let trained: Vec<usize> =
        (0..program.layout.flats.len()).filter(|flat| program.is_trained(*flat)).collect();
    let each = |action: fn(usize) -> Action, flats: &[usize]| {
        flats.iter().map(|flat| Instruction::new(action(*flat))).collect::<Vec<_>>()
    };
    let company = program.layout.ranks > 1;
    let mut instructions = each(Action::GradSquares, &trained);
    if company {
        instructions.push(Instruction::new(Action::AllGatherReports));
    }
    instructions.push(Instruction::new(Action::Control));
    if company && !program.shards_optimizer() {
        instructions.extend(each(Action::AllGatherGrad, &trained));
    }
    for flat in &trained {
        let whole = Chunk { flat: *flat, range: 0..program.update_capacity(*flat) };
        instructions.push(Instruction::new(Action::Update(whole)));
        if company && program.shards_optimizer() && program.stays_gathered(*flat) {
            spread(&program, *flat, settings, &mut instructions);
        }
    }
    program.sections.push(Section { kind: SectionKind::Update, instructions });
    program
}

/// Distributes updated shards: by all-gathers of chunks, or by broadcasts rank by rank.
fn spread(program: &Program, flat: usize, settings: &Settings, out: &mut Vec<Instruction>) {
    let ranks = program.layout.ranks;
    if settings.allgather_partitions {
        let chunks = program.layout.flats[flat].chunks(ranks, settings.allgather_bucket);
        let gather = |range| Instruction::new(Action::AllGatherWeights(Chunk { flat, range }));
        out.extend(chunks.map(gather));
    } else {
        let spread = |root| Instruction::new(Action::BroadcastWeights { flat, root: root as usize });
        out.extend((0..ranks).map(spread));
    }
}
