//! The chaos executor: runs a section's instructions in any order that queues and waits allow, and makes every mistake
//! of lifetimes visible. Memory that is not in use holds NaN, and the bytes behind every buffer are watched. A program
//! that is right computes the same bits as ever.

use zeroth_base::philox4x32;
use zeroth_device::{Device, Queue, Span, Tier};

use super::{Compiled, Engine, RunError};
use crate::program::Placed;

/// NaN in f32 and bf16, -1 as a number.
const POISON: u8 = 0xff;
const CANARY: u8 = 0xa7;

/// Chance, reproducible.
#[derive(Debug, Clone)]
pub struct Chaos {
    seed: u64,
    drawn: u32,
    watching: bool,
}

impl Chaos {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, drawn: 0, watching: false }
    }

    fn below(&mut self, count: usize) -> usize {
        self.drawn += 1;
        let words = philox4x32([self.drawn, 0, 0, 0], [self.seed as u32, (self.seed >> 32) as u32]);
        words[0] as usize % count
    }

    /// The bytes behind what is always there.
    pub(super) fn check_always(
        compiled: &Compiled,
        device: &mut dyn Device,
        step: u64,
    ) -> Result<(), RunError> {
        let always = &compiled.memory.always;
        always.iter().try_for_each(|placed| check(placed, compiled, device, step, "the step", 0))
    }
}

impl Engine<'_> {
    /// Runs a section's instructions in any order that is allowed.
    pub(super) fn run_wildly(&mut self, section: usize, size: usize) -> Result<(), RunError> {
        let compiled = self.compiled;
        let (instructions, memory) =
            (&compiled.program.sections[section].instructions, &compiled.memory.sections[section]);
        let mut chaos = self.chaos.take().expect("only an unleashed engine comes here");
        if !chaos.watching {
            chaos.watching = true;
            for placed in &compiled.memory.always {
                fill(self.device.as_mut(), guard_of(placed, compiled), CANARY, self.step)?;
            }
        }
        for tier in [Tier::Device, Tier::Host] {
            let (at, bytes) = compiled.memory.shared[tier as usize];
            fill(self.device.as_mut(), Span { tier, at, bytes }, POISON, self.step)?;
        }
        let mut done = vec![false; instructions.len()];
        let mut left: Vec<usize> = memory.buffers.iter().map(|placed| placed.touched_by.len()).collect();
        loop {
            // The first of each queue that has not run, if all it waits for has.
            let heads = Queue::ALL.into_iter().filter_map(|queue| {
                (0..instructions.len()).find(|at| instructions[*at].queue == queue && !done[*at])
            });
            let ready: Vec<usize> =
                heads.filter(|at| memory.waits[*at].iter().all(|earlier| done[*earlier])).collect();
            if ready.is_empty() {
                break;
            }
            let at = ready[chaos.below(ready.len())];
            let touched = |placed: &Placed| placed.touched_by.contains(&at);
            for (place, placed) in memory.buffers.iter().enumerate().filter(|(_, placed)| touched(placed)) {
                if left[place] == placed.touched_by.len() {
                    fill(self.device.as_mut(), guard_of(placed, compiled), CANARY, self.step)?;
                }
            }
            self.run_instruction(section, size, at)?;
            done[at] = true;
            for (place, placed) in memory.buffers.iter().enumerate().filter(|(_, placed)| touched(placed)) {
                check(placed, compiled, self.device.as_mut(), self.step, &format!("{:?}", memory.kind), at)?;
                left[place] -= 1;
                if left[place] == 0 {
                    let whole = Span { tier: placed.buffer.tier, at: placed.at, bytes: placed.buffer.bytes };
                    fill(self.device.as_mut(), whole, POISON, self.step)?;
                }
            }
        }
        assert!(done.iter().all(|done| *done), "waits of a program never form a circle");
        self.chaos = Some(chaos);
        Ok(())
    }
}

fn guard_of(placed: &Placed, compiled: &Compiled) -> Span {
    let guard = compiled.memory.guard;
    Span { tier: placed.buffer.tier, at: placed.at + placed.buffer.bytes - guard, bytes: guard }
}

fn fill(device: &mut dyn Device, span: Span, byte: u8, step: u64) -> Result<(), RunError> {
    let bytes = device.direct_mut(span).map_err(RunError::device(step, "poisoning"))?;
    bytes.expect("chaos runs where the host sees the arena").fill(byte);
    Ok(())
}

fn check(
    placed: &Placed,
    compiled: &Compiled,
    device: &mut dyn Device,
    step: u64,
    section: &str,
    at: usize,
) -> Result<(), RunError> {
    let bytes = device.direct_mut(guard_of(placed, compiled)).map_err(RunError::device(step, "watching"))?;
    let intact = bytes.is_some_and(|bytes| bytes.iter().all(|byte| *byte == CANARY));
    if intact {
        return Ok(());
    }
    let buffer = format!("{:?}", placed.buffer.content);
    Err(RunError::Canary { step, buffer, section: section.to_owned(), at })
}
