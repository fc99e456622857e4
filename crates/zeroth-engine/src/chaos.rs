//! The chaos executor: runs instructions in any order that queues and waits allow, and makes every lifetime bug
//! visible. Unused memory holds NaN, and guard bytes after every buffer are checked. Where an update overlaps the next
//! step, work that the host does not wait for is deferred. A correct program computes the same bits as ever.

use zeroth_base::philox4x32;
use zeroth_kernel::{Device, Queue, Span, Tier};

use super::{Engine, RunError};
use zeroth_program::Compiled;
use zeroth_program::{LiveRange, PlacedBuffer};

/// NaN in f32 and bf16, -1 as an integer.
const POISON: u8 = 0xff;
const CANARY: u8 = 0xa7;

/// The executor's state; its order is a function of the seed.
#[derive(Debug, Clone)]
pub struct Chaos {
    seed: u64,
    drawn: u32,
    watching: bool,
    /// Sections that have started, oldest first.
    running: Vec<Running>,
}

/// A section that has started.
#[derive(Debug, Clone)]
struct Running {
    section: usize,
    size: usize,
    done: Vec<bool>,
    /// The remaining accesses of each buffer.
    left: Vec<usize>,
}

/// How far the executor runs before it returns to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChaosUntil {
    /// Any distance: the host enqueues the next section at once.
    Any,
    /// Until the compute and communication queues are empty, whose results the host may read.
    Seen,
    /// Until every started section has finished.
    End,
}

impl Running {
    fn new(compiled: &Compiled, section: usize, size: usize) -> Self {
        let count = compiled.program.sections[section].instructions.len();
        let buffers = &compiled.memory.sections[section].buffers;
        let left = buffers.iter().map(|placed| placed.accessed_by.len()).collect();
        Self { section, size, done: vec![false; count], left }
    }

    fn is_done(&self) -> bool {
        self.done.iter().all(|done| *done)
    }
}

impl Chaos {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, drawn: 0, watching: false, running: Vec::new() }
    }

    /// Whether an instruction of a started section may run.
    fn is_ready(&self, compiled: &Compiled, place: usize, at: usize) -> bool {
        let running = &self.running[place];
        let memory = &compiled.memory.sections[running.section];
        let of = |earlier: &(usize, usize)| {
            let newest = self.running[..place].iter().rev().find(|other| other.section == earlier.0);
            newest.is_none_or(|other| other.done[earlier.1])
        };
        // Everything before the update has finished when the next micro-batch starts.
        let is_micro_batch = |running: &Running| compiled.program.sections[running.section].is_micro_batch();
        let ended = !is_micro_batch(running)
            || self.running[..place].iter().all(|other| !is_micro_batch(other) || other.is_done());
        memory.waits[at].iter().all(|earlier| running.done[*earlier])
            && memory.cross_step_waits.get(at).is_none_or(|across| across.iter().all(of))
            && ended
    }

    /// The first pending instruction of each queue, where it may run.
    fn ready(&self, compiled: &Compiled) -> Vec<(usize, usize)> {
        let head = |queue: Queue| {
            self.running.iter().enumerate().find_map(|(place, running)| {
                let instructions = &compiled.program.sections[running.section].instructions;
                let first =
                    (0..instructions.len()).find(|at| instructions[*at].queue == queue && !running.done[*at]);
                first.map(|at| (place, at))
            })
        };
        let heads = Queue::ALL.into_iter().filter_map(head);
        heads.filter(|(place, at)| self.is_ready(compiled, *place, *at)).collect()
    }

    fn has_come(&self, compiled: &Compiled, until: ChaosUntil) -> bool {
        match until {
            ChaosUntil::Any => true,
            ChaosUntil::End => self.running.iter().all(Running::is_done),
            ChaosUntil::Seen => self.running.iter().all(|running| {
                let instructions = &compiled.program.sections[running.section].instructions;
                let seen = |at: &usize| matches!(instructions[*at].queue, Queue::Compute | Queue::Comm);
                (0..instructions.len()).filter(seen).all(|at| running.done[at])
            }),
        }
    }

    fn below(&mut self, count: usize) -> usize {
        self.drawn += 1;
        let words = philox4x32([self.drawn, 0, 0, 0], [self.seed as u32, (self.seed >> 32) as u32]);
        words[0] as usize % count
    }

    /// Checks the guard bytes of the statically allocated buffers.
    pub(super) fn check_always(
        compiled: &Compiled,
        device: &mut dyn Device,
        step: u64,
    ) -> Result<(), RunError> {
        let always = &compiled.memory.static_buffers;
        always.iter().try_for_each(|placed| check(placed, compiled, device, step, "the step", 0))
    }
}

impl Engine<'_> {
    /// Starts a section, and runs instructions of all started sections in any allowed order.
    pub(super) fn run_chaotically(
        &mut self,
        section: usize,
        size: usize,
        until: ChaosUntil,
    ) -> Result<(), RunError> {
        let compiled = self.compiled;
        let mut chaos = self.chaos.take().expect("only an unleashed engine comes here");
        if !chaos.watching {
            chaos.watching = true;
            for placed in &compiled.memory.static_buffers {
                fill(self.device.as_mut(), guard_of(placed, compiled), CANARY, self.step)?;
            }
        }
        if chaos.running.is_empty() {
            for span in unused(compiled, section) {
                fill(self.device.as_mut(), span, POISON, self.step)?;
            }
        }
        chaos.running.push(Running::new(compiled, section, size));
        self.advance_chaotically(&mut chaos, until)?;
        self.chaos = Some(chaos);
        Ok(())
    }

    /// Runs every started section to its end.
    pub(super) fn finish_chaotically(&mut self) -> Result<(), RunError> {
        let Some(mut chaos) = self.chaos.take() else { return Ok(()) };
        self.advance_chaotically(&mut chaos, ChaosUntil::End)?;
        self.chaos = Some(chaos);
        Ok(())
    }

    fn advance_chaotically(&mut self, chaos: &mut Chaos, until: ChaosUntil) -> Result<(), RunError> {
        while !chaos.has_come(self.compiled, until) {
            let ready = chaos.ready(self.compiled);
            assert!(!ready.is_empty(), "waits of a program never form a circle");
            let (place, at) = ready[chaos.below(ready.len())];
            self.run_one_chaotically(&mut chaos.running[place], at)?;
            chaos.running[place].done[at] = true;
        }
        let done = chaos.running.iter().take_while(|running| running.is_done()).count();
        chaos.running.drain(..done);
        Ok(())
    }

    fn run_one_chaotically(&mut self, running: &mut Running, at: usize) -> Result<(), RunError> {
        let compiled = self.compiled;
        let memory = &compiled.memory.sections[running.section];
        let touched: Vec<usize> = (0..memory.buffers.len())
            .filter(|place| memory.buffers[*place].accessed_by.contains(&at))
            .collect();
        for place in &touched {
            let placed = &memory.buffers[*place];
            let is_new = placed.live_range != LiveRange::FromPrevious;
            if is_new && running.left[*place] == placed.accessed_by.len() {
                fill(self.device.as_mut(), guard_of(placed, compiled), CANARY, self.step)?;
            }
        }
        self.run_instruction(running.section, running.size, at)?;
        for place in touched {
            let placed = &memory.buffers[place];
            check(placed, compiled, self.device.as_mut(), self.step, &format!("{:?}", memory.kind), at)?;
            running.left[place] -= 1;
            if running.left[place] == 0 && placed.live_range == LiveRange::Section {
                let whole = Span { tier: placed.buffer.tier, at: placed.at, bytes: placed.buffer.bytes };
                fill(self.device.as_mut(), whole, POISON, self.step)?;
            }
        }
        Ok(())
    }
}

/// The shared memory that is unused when a section starts: all but the buffers it inherits from the section before.
fn unused(compiled: &Compiled, section: usize) -> Vec<Span> {
    let mut unused = Vec::new();
    for tier in Tier::ALL {
        let buffers = compiled.memory.sections[section].buffers.iter();
        let mut left: Vec<&PlacedBuffer> = buffers
            .filter(|placed| placed.live_range == LiveRange::FromPrevious && placed.buffer.tier == tier)
            .collect();
        left.sort_unstable_by_key(|placed| placed.at);
        let (mut at, bytes) = compiled.memory.shared[tier];
        let end = at + bytes;
        for placed in left {
            unused.push(Span { tier, at, bytes: placed.at - at });
            at = placed.at + placed.buffer.bytes;
        }
        unused.push(Span { tier, at, bytes: end - at });
    }
    unused
}

fn guard_of(placed: &PlacedBuffer, compiled: &Compiled) -> Span {
    let guard = compiled.memory.guard;
    Span { tier: placed.buffer.tier, at: placed.at + placed.buffer.bytes - guard, bytes: guard }
}

fn fill(device: &mut dyn Device, span: Span, byte: u8, step: u64) -> Result<(), RunError> {
    let bytes = device.direct_mut(span).map_err(RunError::device(step, "poisoning"))?;
    bytes.expect("chaos runs where the host sees the arena").fill(byte);
    Ok(())
}

fn check(
    placed: &PlacedBuffer,
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
    let buffer = format!("{:?}", placed.buffer.id);
    Err(RunError::Canary { step, buffer, section: section.to_owned(), at })
}
