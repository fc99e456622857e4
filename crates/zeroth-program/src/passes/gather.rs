//! `gather`: when sharded parameters of a unit are gathered and released: all at stage 3, frozen ones as they are placed.
//!
//! Keys: `zeroth.gather`, `zero_optimization.stage3_max_live_parameters`, `zero_optimization.stage3_max_reuse_distance`,
//! `zero_optimization.memory_efficient_linear`.
//!
//! A flat is gathered before the first instruction that reads it and released after the last. It is released earlier if
//! its next use is more than max_reuse elements of other flats away, or to stay within max_live; then the flat with the
//! farthest next use goes first. A max_live below the largest flat is raised to it.
//!
//! Zero-copy gathers take no memory, so none of these bounds applies: such flats are gathered at the start of a
//! section, where ranks synchronise once instead of per unit, and released after their last use.

use super::super::{Action, Instruction, Program, Settings};

pub(in super::super) fn gather(mut program: Program, settings: &Settings) -> Program {
    if !program.shards_parameters() {
        return program;
    }
    let sections = std::mem::take(&mut program.sections);
    program.sections = sections
        .into_iter()
        .map(|mut section| {
            section.instructions = Gatherer::new(&program, &section.instructions, settings).run();
            section
        })
        .collect();
    program
}

struct Gatherer<'a> {
    program: &'a Program,
    instructions: &'a [Instruction],
    settings: &'a Settings,
    resident: Vec<usize>,
    out: Vec<Instruction>,
}

impl<'a> Gatherer<'a> {
    fn new(program: &'a Program, instructions: &'a [Instruction], settings: &'a Settings) -> Self {
        Self { program, instructions, settings, resident: Vec::new(), out: Vec::new() }
    }

    fn run(mut self) -> Vec<Instruction> {
        let mut viewed: Vec<usize> = Vec::new();
        for flat in self.instructions.iter().flat_map(|instruction| instruction.reads.iter().copied()) {
            if self.program.is_viewed(flat) && !viewed.contains(&flat) {
                viewed.push(flat);
            }
        }
        self.out.extend(viewed.iter().map(|flat| Instruction::new(Action::AllGather(*flat))));
        self.resident = viewed;
        for (index, instruction) in self.instructions.iter().enumerate() {
            let needs: Vec<usize> =
                instruction.reads.iter().copied().filter(|flat| self.program.is_sharded(*flat)).collect();
            for flat in &needs {
                if !self.resident.contains(flat) {
                    self.make_room(index, *flat, &needs);
                    self.resident.push(*flat);
                    self.out.push(Instruction::new(Action::AllGather(*flat)));
                }
            }
            self.out.push(instruction.clone());
            let far: Vec<usize> =
                self.resident.iter().copied().filter(|flat| self.is_far(index, *flat)).collect();
            for flat in far {
                self.release(flat);
            }
        }
        self.out
    }

    fn elements(&self, flat: usize) -> u64 {
        self.program.gathered_elements(flat)
    }

    fn live(&self) -> u64 {
        let gathered: u64 = self.resident.iter().map(|flat| self.elements(*flat)).sum();
        self.program.layout.persistent_elements() + gathered
    }

    /// Releases flats that this instruction does not need, farthest next use first, until the new one fits.
    fn make_room(&mut self, index: usize, newcomer: usize, needs: &[usize]) {
        while self.live() + self.elements(newcomer) > self.settings.max_live {
            let copies = self.resident.iter().copied().filter(|flat| !self.program.is_viewed(*flat));
            let idle = copies.filter(|flat| !needs.contains(flat));
            let Some(farthest) = idle.max_by_key(|flat| self.next_use(index, *flat).unwrap_or(usize::MAX))
            else {
                return; // only what this instruction needs is left: it must fit
            };
            self.release(farthest);
        }
    }

    fn release(&mut self, flat: usize) {
        self.resident.retain(|other| *other != flat);
        self.out.push(Instruction::new(Action::Release(flat)));
    }

    /// The next instruction after `index` that reads the flat.
    fn next_use(&self, index: usize, flat: usize) -> Option<usize> {
        let later = &self.instructions[index + 1..];
        later.iter().position(|instruction| instruction.reads.contains(&flat)).map(|place| index + 1 + place)
    }

    /// Whether the flat is not read again, or only after more than max_reuse elements of other flats.
    fn is_far(&self, index: usize, flat: usize) -> bool {
        let Some(next) = self.next_use(index, flat) else { return true };
        if self.program.is_viewed(flat) {
            return false;
        }
        // Without memory_efficient_linear a linear layer keeps its weight for backward, as PyTorch's does.
        if !self.settings.memory_efficient_linear && self.program.layout.flats[flat].slots.len() > 1 {
            return false;
        }
        let mut between: Vec<usize> = self.instructions[index + 1..next]
            .iter()
            .flat_map(|instruction| instruction.reads.iter().copied())
            // Flats that stay gathered do not count.
            .filter(|other| *other != flat && self.program.is_sharded(*other))
            .collect();
        // A flat read by several instructions in a row counts once.
        between.dedup();
        between.iter().map(|other| self.elements(*other)).sum::<u64>() > self.settings.max_reuse
    }
}
