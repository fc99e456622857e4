//! Early loads: instructions of an update that are enqueued during its micro-batch, and the events that queues wait
//! for.
//!
//! A device's launch queue is bounded, so loads enqueued after all of backward would start late. Loads that depend on
//! nothing of their own step are enqueued first.

use zeroth_kernel::Queue;

use zeroth_program::Action;
use zeroth_program::Compiled;

/// A load of the update that is enqueued during the last micro-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct EarlyLoad {
    /// Its index in the update.
    pub(super) instruction: usize,
    /// The micro-batch instruction before which it is enqueued, and the one it waits for.
    pub(super) before: usize,
    pub(super) behind: Option<usize>,
}

/// The fraction of a micro-batch's instructions over which loads are spread.
const SPREAD: (usize, usize) = (9, 10);

/// The first loads of the update that wait for nothing of their own step, spread over the micro-batch so that they do
/// not fill the launch queue. Where parameters are uploaded over the same bus, they also wait for the micro-batch to
/// progress: a bus serves one queue as long as it has work.
pub(super) fn early(compiled: &Compiled, update: usize) -> Vec<EarlyLoad> {
    let sections = &compiled.program.sections;
    let (Some(section), Some(memory), Some(last)) = (
        sections.get(update),
        compiled.memory.sections.get(update),
        sections.iter().find(|section| section.is_micro_batch() && section.kind.is_last()),
    ) else {
        return Vec::new();
    };
    if memory.cross_step_waits.is_empty() {
        return Vec::new();
    }
    let line = (0..section.instructions.len()).filter(|at| section.instructions[*at].queue == Queue::Load);
    let is_free = |at: &usize| {
        matches!(section.instructions[*at].action, Action::LoadStates(_))
            && memory.waits[*at].is_empty()
            && memory.cross_step_waits[*at].iter().all(|(earlier, _)| *earlier == update)
    };
    let free: Vec<usize> = line.take_while(is_free).collect();
    let on =
        |queue: Queue| (0..last.instructions.len()).filter(move |at| last.instructions[*at].queue == queue);
    let shares_the_bus = on(Queue::Upload).next().is_some();
    let compute: Vec<usize> = on(Queue::Compute).collect();
    let place = |(place, instruction): (usize, usize)| {
        let spread = compute.get(place * compute.len() * SPREAD.0 / (free.len() * SPREAD.1));
        let before = spread.map_or(0, |behind| behind + 1);
        EarlyLoad { instruction, before, behind: spread.copied().filter(|_| shares_the_bus) }
    };
    free.iter().copied().enumerate().map(place).collect()
}

/// For each section and instruction, whether another queue waits for it.
pub(super) fn awaited(compiled: &Compiled, early: &[EarlyLoad]) -> Vec<Vec<bool>> {
    let of = |memory: &zeroth_program::SectionMemory| {
        let mut awaited = vec![false; memory.waits.len()];
        memory.waits.iter().flatten().for_each(|earlier| awaited[*earlier] = true);
        awaited
    };
    let mut all: Vec<Vec<bool>> = compiled.memory.sections.iter().map(of).collect();
    for (section, place) in
        compiled.memory.sections.iter().flat_map(|memory| memory.cross_step_waits.iter().flatten())
    {
        all[*section][*place] = true;
    }
    let sections = &compiled.program.sections;
    let last = sections.iter().position(|section| section.is_micro_batch() && section.kind.is_last());
    for behind in early.iter().filter_map(|early| early.behind) {
        all[last.expect("loads are spread over the last micro-batch")][behind] = true;
    }
    all
}
