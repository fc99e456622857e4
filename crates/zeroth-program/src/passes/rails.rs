//! `rails`: gathers of parameters that are sharded over several groups take two levels.
//!
//! Keys: none; the mesh decides (`zeroth.sum_group`), and `zero_optimization.zero_hpz_partition_size`.
//!
//! Along the rail a rank gathers its group shard, into its part of the gathered flat; the group's gather then runs in
//! place. It runs after the passes that move gathers, so that both levels stay together. Parameters that are sharded
//! within groups only need no rail.

use zeroth_base::Axis;

use crate::{Action, Instruction, Program};

pub(super) fn rails(mut program: Program) -> Program {
    if !program.layout.world.has_two_levels() {
        return program;
    }
    let mut sections = std::mem::take(&mut program.sections);
    for section in &mut sections {
        let mut out = Vec::with_capacity(section.instructions.len());
        for instruction in section.instructions.drain(..) {
            if let Action::AllGather(flat, Axis::Group) = instruction.action
                && !program.is_sharded_in_groups(flat)
            {
                let action = Action::AllGather(flat, Axis::Rail);
                out.push(Instruction { queue: instruction.queue, ..Instruction::new(action) });
            }
            out.push(instruction);
        }
        section.instructions = out;
    }
    program.sections = sections;
    program
}
