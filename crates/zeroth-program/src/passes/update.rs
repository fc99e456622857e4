//! `update`: gradient norm, clipping and optimizer, flat by flat.
//!
//! Keys: `zero_optimization.stage`, `zero_optimization.allgather_bucket_size`, `zero_optimization.allgather_partitions`,
//! `zero_optimization.zero_hpz_partition_size`, `gradient_clipping`, `optimizer` (their values are uploaded as a recipe; the program
//! does not change with them).
//!
//! The global norm is known before any weight changes. Stage 0 all-gathers the reduced gradients first, because every
//! rank updates every flat; stages 1 and above update shards, and flats that stay gathered are all-gathered again. With
//! `zero_hpz_partition_size` so are flats that are sharded within groups, along the rails.

use zeroth_base::Axis;

use crate::{Action, Chunk, Instruction, Program, Section, SectionKind, Settings};

pub(super) fn update(mut program: Program, settings: &Settings) -> Program {
    let trained: Vec<usize> =
        (0..program.layout.flats.len()).filter(|flat| program.is_trained(*flat)).collect();
    let each = |action: fn(usize) -> Action, flats: &[usize]| {
        flats.iter().map(|flat| Instruction::new(action(*flat))).collect::<Vec<_>>()
    };
    let company = program.layout.ranks() > 1;
    let world = program.layout.world;
    let mut instructions = each(Action::GradSquares, &trained);
    if company {
        // In this order all reports stand in rank order, which decides how losses add up and who is named.
        let gather = |axis: &Axis| Instruction::new(Action::AllGatherReports(*axis));
        instructions.extend(world.levels().iter().map(gather));
    }
    instructions.push(Instruction::new(Action::Control));
    if company && !program.shards_optimizer() {
        for flat in &trained {
            let gather = |axis: &Axis| Instruction::new(Action::AllGatherGrad(*flat, *axis));
            instructions.extend(world.levels().iter().rev().map(gather));
        }
    }
    for flat in &trained {
        let whole = Chunk { flat: *flat, range: 0..program.update_capacity(*flat) };
        instructions.push(Instruction::new(Action::Update(whole)));
        if !company || !program.shards_optimizer() {
            continue;
        }
        if program.stays_gathered(*flat) {
            world.levels().iter().rev().for_each(|axis| {
                spread(&program, *flat, *axis, settings, &mut instructions);
            });
        } else if program.is_sharded_in_groups(*flat) {
            spread(&program, *flat, Axis::Rail, settings, &mut instructions);
        }
    }
    program.sections.push(Section { kind: SectionKind::Update, instructions });
    program
}

/// Distributes updated shards along an axis: by all-gathers of chunks, or by broadcasts rank by rank.
fn spread(program: &Program, flat: usize, axis: Axis, settings: &Settings, out: &mut Vec<Instruction>) {
    let world = program.layout.world;
    if settings.allgather_partitions {
        let chunks = program.layout.flats[flat].gather_chunks(axis, world, settings.allgather_bucket);
        let gather = |range| Instruction::new(Action::AllGatherWeights(Chunk { flat, range }, axis));
        out.extend(chunks.map(gather));
    } else {
        let spread = |root| Instruction::new(Action::BroadcastWeights { flat, root: root as usize, axis });
        out.extend((0..world.along(axis)).map(spread));
    }
}
