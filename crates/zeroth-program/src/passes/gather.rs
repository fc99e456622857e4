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

use crate::{Action, Instruction, Program, Settings};

pub(super) fn gather(mut program: Program, settings: &Settings) -> Program {
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
    /// For each flat, the instructions that read it, in order.
    uses: Vec<Vec<usize>>,
    /// The reads of flats that do not stay gathered, in order: the instruction and the flat.
    reads: Vec<(usize, usize)>,
    /// Elements of the first n of these reads; a flat that is read several times in a row counts once.
    read_elements: Vec<u64>,
    resident: Vec<usize>,
    out: Vec<Instruction>,
}

impl<'a> Gatherer<'a> {
    fn new(program: &'a Program, instructions: &'a [Instruction], settings: &'a Settings) -> Self {
        let mut uses = vec![Vec::new(); program.layout.flats.len()];
        let mut reads: Vec<(usize, usize)> = Vec::new();
        let mut read_elements = vec![0];
        let mut total = 0;
        let is_sharded: Vec<bool> = (0..uses.len()).map(|flat| program.is_sharded(flat)).collect();
        for (index, instruction) in instructions.iter().enumerate() {
            for &flat in &instruction.reads {
                uses[flat].push(index);
                if is_sharded[flat] {
                    if reads.last().is_none_or(|(_, before)| *before != flat) {
                        total += program.gathered_elements(flat);
                    }
                    reads.push((index, flat));
                    read_elements.push(total);
                }
            }
        }
        let (resident, out) = (Vec::new(), Vec::new());
        Self { program, instructions, settings, uses, reads, read_elements, resident, out }
    }

    fn run(mut self) -> Vec<Instruction> {
        let (mut viewed, mut seen) = (Vec::new(), vec![false; self.uses.len()]);
        for flat in self.instructions.iter().flat_map(|instruction| instruction.reads.iter().copied()) {
            if !seen[flat] && self.program.is_viewed(flat) {
                viewed.push(flat);
            }
            seen[flat] = true;
        }
        self.out = viewed.iter().map(|flat| self.all_gather(*flat)).collect();
        self.resident = viewed;
        for (index, instruction) in self.instructions.iter().enumerate() {
            let needs: Vec<usize> =
                instruction.reads.iter().copied().filter(|flat| self.program.is_sharded(*flat)).collect();
            for flat in &needs {
                if !self.resident.contains(flat) {
                    self.make_room(index, *flat, &needs);
                    self.resident.push(*flat);
                    let gather = self.all_gather(*flat);
                    self.out.push(gather);
                }
            }
            self.out.push(instruction.clone());
            // A flat that was near after its last read has only come nearer.
            let read = self.resident.iter().copied().filter(|flat| needs.contains(flat));
            let far: Vec<usize> = read.filter(|flat| self.is_far(index, *flat)).collect();
            for flat in far {
                self.release(flat);
            }
        }
        self.out
    }

    /// The gather of a flat that is about to be read; `rails` puts a level before it where there are two.
    fn all_gather(&self, flat: usize) -> Instruction {
        Instruction::new(Action::AllGather(flat, self.program.layout.world.gather_axis()))
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
        let uses = &self.uses[flat];
        uses.get(uses.partition_point(|at| *at <= index)).copied()
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
        // Reads between this instruction and the next use: all of other flats. Those that stay gathered do not count.
        let [first, end] = [index + 1, next].map(|at| self.reads.partition_point(|(read, _)| *read < at));
        if first == end {
            return false;
        }
        let later = self.read_elements[end] - self.read_elements[first + 1];
        self.elements(self.reads[first].1) + later > self.settings.max_reuse
    }
}
