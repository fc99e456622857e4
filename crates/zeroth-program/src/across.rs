//! Waits from one section to the next: where the update's lines run on beside the next micro-batch, and the micro-batch's
//! beside the update, an instruction waits for what touched its data or its memory before, and for nothing else.
//!
//! Sections follow each other in one order: the last micro-batch, the update, the first micro-batch of the next step. All
//! lines meet between micro-batches, and around everything that is no step.

use std::collections::BTreeMap;

use zeroth_kernel::{Access, Queue, Tier};

use super::carried::Draft;
use super::{Content, Section, SectionKind, SectionMemory};

/// For each instruction, those of the sections before it that it waits for, by section and place.
pub(super) type Across = Vec<Vec<(usize, usize)>>;

/// What each instruction of a section touches.
pub(super) type Touches = Vec<Vec<(Content, Access)>>;

/// The last instruction of each line that touched something.
type Last = BTreeMap<Queue, usize>;

/// Whether a section runs beside its neighbours: where more than one line is busy in the update.
pub(super) fn runs_on(sections: &[Section]) -> bool {
    sections.iter().any(|section| {
        let lines = |queue| section.instructions.iter().any(|instruction| instruction.queue == queue);
        section.kind == SectionKind::Update && (lines(Queue::Load) || lines(Queue::Store))
    })
}

/// The sections that may still run when a section begins.
fn before(sections: &[Section], kind: SectionKind) -> Vec<usize> {
    let is = |wanted: &[SectionKind]| {
        (0..sections.len()).filter(|at| wanted.contains(&sections[*at].kind)).collect::<Vec<_>>()
    };
    match kind {
        // With one micro-batch a step, the update of the step before as well.
        SectionKind::Update => is(&[SectionKind::Only, SectionKind::Last, SectionKind::Update]),
        SectionKind::Only | SectionKind::First => is(&[SectionKind::Update]),
        _ => Vec::new(),
    }
}

/// The waits of every section for those before it.
pub(super) fn derive(sections: &[Section], drafts: &[Draft], memory: &[SectionMemory]) -> Vec<Across> {
    let uses: Vec<Uses> =
        (0..sections.len()).map(|at| Uses::of(&sections[at], &drafts[at].touches, &memory[at])).collect();
    let of = |at: usize| {
        let mut found = vec![Found::new(); sections[at].instructions.len()];
        for earlier in before(sections, sections[at].kind) {
            let follows = Follows { section: &sections[at], is_again: earlier == at, earlier };
            follows.data(&drafts[at].touches, &memory[at], &uses[earlier], &mut found);
            follows.memory(&memory[at], &uses[earlier], &mut found);
        }
        let waits = |found: Found| found.into_iter().map(|((section, _), place)| (section, place)).collect();
        found.into_iter().map(waits).collect()
    };
    (0..sections.len()).map(of).collect()
}

/// The last instruction that is waited for, by its section and line.
type Found = BTreeMap<(usize, Queue), usize>;

/// Who touched what last in a section.
struct Uses {
    written: BTreeMap<Content, Last>,
    used: BTreeMap<Content, Last>,
    /// Memory of buffers that come and go: its tier, its bytes, and who touched it last.
    memory: Vec<(Tier, std::ops::Range<u64>, Last)>,
}

impl Uses {
    fn of(section: &Section, touches: &Touches, memory: &SectionMemory) -> Self {
        let (mut written, mut used) = (BTreeMap::<_, Last>::new(), BTreeMap::<_, Last>::new());
        for (at, contents) in touches.iter().enumerate() {
            let queue = section.instructions[at].queue;
            for (content, access) in contents {
                used.entry(*content).or_default().insert(queue, at);
                if *access == Access::Write {
                    written.entry(*content).or_default().insert(queue, at);
                }
            }
        }
        let memory = memory.buffers.iter().map(|placed| {
            let last = used.get(&placed.buffer.content).cloned().unwrap_or_default();
            (placed.buffer.tier, placed.at..placed.at + placed.buffer.bytes, last)
        });
        let memory = memory.collect();
        Self { written, used, memory }
    }
}

/// A section behind an earlier one.
struct Follows<'a> {
    section: &'a Section,
    /// Whether the earlier one is the same section, a step ago.
    is_again: bool,
    earlier: usize,
}

impl Follows<'_> {
    fn wait(&self, at: usize, last: &Last, found: &mut [Found]) {
        for (queue, place) in last {
            // What stands earlier in the same list is waited for within the section.
            let is_implied = self.is_again && *place < at;
            if *queue != self.section.instructions[at].queue && !is_implied {
                let known = found[at].entry((self.earlier, *queue)).or_default();
                *known = (*known).max(*place);
            }
        }
    }

    /// What stays from section to section: a read comes after the last write, a write after every use.
    fn data(&self, touches: &Touches, memory: &SectionMemory, uses: &Uses, found: &mut [Found]) {
        let passing = |content: &Content| {
            memory.buffers.iter().any(|placed| placed.buffer.content == *content && placed.buffer.bytes > 0)
        };
        for (at, contents) in touches.iter().enumerate() {
            for (content, access) in contents {
                let last = match access {
                    Access::Read => uses.written.get(content),
                    Access::Write => uses.used.get(content),
                };
                if let Some(last) = last.filter(|_| !passing(content)) {
                    self.wait(at, last, found);
                }
            }
        }
    }

    /// What comes and goes: a buffer's first use comes after every use of its memory.
    fn memory(&self, memory: &SectionMemory, uses: &Uses, found: &mut [Found]) {
        for placed in &memory.buffers {
            let range = placed.at..placed.at + placed.buffer.bytes;
            for (tier, other, last) in &uses.memory {
                if *tier == placed.buffer.tier && other.start < range.end && range.start < other.end {
                    self.wait(*placed.life.start(), last, found);
                }
            }
        }
    }
}
