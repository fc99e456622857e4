//! Waits: the instructions of other queues that an instruction must follow. They are derived from operands, never
//! written by hand.

use std::collections::BTreeMap;

use zeroth_kernel::{Access, Queue};

use crate::{Action, BufferId, Section, SectionKind};

/// For each instruction, the instructions of other queues it waits for: at most one per queue, since queues run in
/// order.
pub(crate) type Waits = Vec<Vec<usize>>;

/// For each instruction, the instructions of earlier sections it waits for, as (section, index).
pub(crate) type CrossStepWaits = Vec<Vec<(usize, usize)>>;

/// The accesses to a buffer since its last write.
#[derive(Default)]
struct BufferAccesses {
    writer: Option<usize>,
    readers: Vec<usize>,
}

/// Derives the waits of data dependences: a read follows the last write, a write follows every access before it. An
/// all-gather also follows the last use of the flats released before it, which bounds gathered memory.
pub(crate) fn derive(section: &Section) -> Waits {
    let mut buffers: BTreeMap<BufferId, BufferAccesses> = BTreeMap::new();
    let mut last_read: BTreeMap<usize, usize> = BTreeMap::new();
    let mut released: Option<usize> = None;
    let mut waits: Waits = Vec::with_capacity(section.instructions.len());
    for (at, instruction) in section.instructions.iter().enumerate() {
        let mut after: Vec<usize> = Vec::new();
        for (id, access) in instruction.operands.accesses() {
            let buffer = buffers.entry(id).or_default();
            after.extend(buffer.writer);
            match access {
                Access::Read => buffer.readers.push(at),
                Access::Write => {
                    after.append(&mut buffer.readers);
                    buffer.writer = Some(at);
                }
            }
        }
        match instruction.action {
            Action::AllGather(..) => after.extend(released),
            Action::Release(flat) => released = released.max(last_read.get(&flat).copied()),
            _ => {}
        }
        instruction.reads.iter().for_each(|flat| _ = last_read.insert(*flat, at));
        waits.push(Vec::new());
        for earlier in after {
            add(section, &mut waits, at, earlier);
        }
    }
    waits
}

/// Adds a wait unless queue order implies it.
pub(crate) fn add(section: &Section, waits: &mut Waits, at: usize, earlier: usize) {
    let queue = |index: usize| section.instructions[index].queue;
    if earlier == at || queue(earlier) == queue(at) {
        return;
    }
    match waits[at].iter_mut().find(|other| queue(**other) == queue(earlier)) {
        Some(other) => *other = (*other).max(earlier),
        None => waits[at].push(earlier),
    }
}

/// Whether a section uses more than one queue.
pub(crate) fn has_company(section: &Section) -> bool {
    section.instructions.iter().any(|instruction| instruction.queue != Queue::Compute)
}

/// Whether the update overlaps its neighbours: it does where it uses the load or store queue.
pub(crate) fn update_overlaps(sections: &[Section]) -> bool {
    sections.iter().any(|section| {
        let lines = |queue| section.instructions.iter().any(|instruction| instruction.queue == queue);
        section.kind == SectionKind::Update && (lines(Queue::Load) || lines(Queue::Store))
    })
}
