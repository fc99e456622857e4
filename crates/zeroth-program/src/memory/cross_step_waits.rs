//! Cross-step waits. Where the update overlaps the neighbouring micro-batches, an instruction waits for earlier
//! sections' accesses to its data or its memory, and for nothing else.
//!
//! Sections run in a fixed order: the last micro-batch, the update, the first micro-batch of the next step. All queues
//! join between micro-batches, and around evaluation and state access.

use std::collections::{BTreeMap, BTreeSet};

use zeroth_kernel::{Access, Queue, Tier};

use super::address_accesses::AddressAccesses;
use super::occupancy::Accesses;
use super::waits::CrossStepWaits;
use crate::{BufferId, Section, SectionKind, SectionMemory};

/// The sections that may still be running when a section starts.
fn before(sections: &[Section], kind: SectionKind) -> Vec<usize> {
    let is = |wanted: &[SectionKind]| {
        (0..sections.len()).filter(|at| wanted.contains(&sections[*at].kind)).collect::<Vec<_>>()
    };
    match kind {
        // With one micro-batch per step, this includes the update of the previous step.
        SectionKind::Update => is(&[SectionKind::Only, SectionKind::Last, SectionKind::Update]),
        SectionKind::Only | SectionKind::First => is(&[SectionKind::Update]),
        _ => Vec::new(),
    }
}

/// Derives the cross-step waits of every section.
pub(crate) fn derive(sections: &[Section], memory: &[SectionMemory]) -> Vec<CrossStepWaits> {
    let uses: Vec<Uses> =
        sections.iter().zip(memory).map(|(section, memory)| Uses::of(section, memory)).collect();
    let of = |at: usize| {
        let mut found = vec![Found::new(); sections[at].instructions.len()];
        for earlier in before(sections, sections[at].kind) {
            let follows = Follows { section: &sections[at], is_again: earlier == at, earlier };
            follows.data(&memory[at], &uses[earlier], &mut found);
            follows.memory(&memory[at], &uses[earlier], &mut found);
        }
        let waits = |found: Found| found.into_iter().map(|((section, _), place)| (section, place)).collect();
        found.into_iter().map(waits).collect()
    };
    (0..sections.len()).map(of).collect()
}

/// The last instruction waited for, by (section, queue).
type Found = BTreeMap<(usize, Queue), usize>;

/// The last accesses of a section.
struct Uses {
    written: BTreeMap<BufferId, Accesses>,
    used: BTreeMap<BufferId, Accesses>,
    /// Transient memory of each tier.
    memory: BTreeMap<Tier, AddressAccesses>,
}

impl Uses {
    fn of(section: &Section, memory: &SectionMemory) -> Self {
        let (mut written, mut used) = (BTreeMap::<_, Accesses>::new(), BTreeMap::<_, Accesses>::new());
        for (at, instruction) in section.instructions.iter().enumerate() {
            let queue = instruction.queue as usize;
            for (id, access) in instruction.operands.accesses() {
                used.entry(id).or_default()[queue] = Some(at);
                if access == Access::Write {
                    written.entry(id).or_default()[queue] = Some(at);
                }
            }
        }
        let mut ranges: BTreeMap<Tier, Vec<_>> = BTreeMap::new();
        for placed in &memory.buffers {
            let mut accesses = Accesses::default();
            for at in &placed.accessed_by {
                accesses[section.instructions[*at].queue as usize] = Some(*at);
            }
            let range = placed.at..placed.at + placed.buffer.bytes;
            ranges.entry(placed.buffer.tier).or_default().push((range, accesses));
        }
        let memory = ranges.into_iter().map(|(tier, ranges)| (tier, AddressAccesses::of(&ranges)));
        Self { written, used, memory: memory.collect() }
    }
}

/// A section and an earlier one that may still be running.
struct Follows<'a> {
    section: &'a Section,
    /// Whether the earlier one is the same section of the previous step.
    is_again: bool,
    earlier: usize,
}

impl Follows<'_> {
    fn wait(&self, at: usize, last: &Accesses, found: &mut [Found]) {
        for (queue, place) in Queue::ALL.into_iter().zip(last) {
            let Some(place) = *place else { continue };
            // Earlier instructions of the same list are covered by the waits within the section.
            let is_implied = self.is_again && place < at;
            if queue != self.section.instructions[at].queue && !is_implied {
                let known = found[at].entry((self.earlier, queue)).or_default();
                *known = (*known).max(place);
            }
        }
    }

    /// Statically allocated buffers: a read follows the last write, a write follows every access.
    fn data(&self, memory: &SectionMemory, uses: &Uses, found: &mut [Found]) {
        let transient = memory.buffers.iter().filter(|placed| placed.buffer.bytes > 0);
        let transient: BTreeSet<BufferId> = transient.map(|placed| placed.buffer.id).collect();
        for (at, instruction) in self.section.instructions.iter().enumerate() {
            for (id, access) in instruction.operands.accesses() {
                let last = match access {
                    Access::Read => uses.written.get(&id),
                    Access::Write => uses.used.get(&id),
                };
                if let Some(last) = last.filter(|_| !transient.contains(&id)) {
                    self.wait(at, last, found);
                }
            }
        }
    }

    /// Transient buffers: the first access follows every earlier access to the same memory.
    fn memory(&self, memory: &SectionMemory, uses: &Uses, found: &mut [Found]) {
        for placed in &memory.buffers {
            let range = placed.at..placed.at + placed.buffer.bytes;
            if let Some(memory) = uses.memory.get(&placed.buffer.tier) {
                self.wait(*placed.lifetime.start(), &memory.latest(&range), found);
            }
        }
    }
}
