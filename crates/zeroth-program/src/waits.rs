//! Waits: which instructions of other queues an instruction must come after. They are derived from what instructions
//! touch, never written by hand.

use std::collections::BTreeMap;

use zeroth_kernel::{Access, Queue};

use super::{Action, Content, Section};

/// For each instruction, the instructions of other queues that it waits for: at most one a queue, since a queue runs in
/// order.
pub(super) type Waits = Vec<Vec<usize>>;

/// Who touched a buffer since it was last written.
#[derive(Default)]
struct Touched {
    writer: Option<usize>,
    readers: Vec<usize>,
}

/// The waits that data needs: a read comes after the write before it, a write after all that touched the buffer before.
/// A gather also comes after the last use of what was released before it, so that no more is gathered than allowed.
pub(super) fn derive(section: &Section, touches: &[Vec<(Content, Access)>]) -> Waits {
    let mut buffers: BTreeMap<Content, Touched> = BTreeMap::new();
    let mut last_read: BTreeMap<usize, usize> = BTreeMap::new();
    let mut released: Option<usize> = None;
    let mut waits: Waits = Vec::with_capacity(touches.len());
    for (at, (instruction, touched)) in section.instructions.iter().zip(touches).enumerate() {
        let mut after: Vec<usize> = Vec::new();
        for (content, access) in touched {
            let buffer = buffers.entry(*content).or_default();
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
            Action::Gather(_) => after.extend(released),
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

/// Adds a wait, if the order of the queues does not imply it already.
pub(super) fn add(section: &Section, waits: &mut Waits, at: usize, earlier: usize) {
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
pub(super) fn has_company(section: &Section) -> bool {
    section.instructions.iter().any(|instruction| instruction.queue != Queue::Compute)
}
