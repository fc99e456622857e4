//! Memory planning: exact sizes and offsets of all buffers, computed before a program runs.
//!
//! Sizes, categories and lifetimes follow from the instructions and their operands. Statically allocated buffers come first; the sections
//! share the memory after them, since they run one after the other. The largest end is the arena size.
//!
//! With one micro-batch per step, gradients reuse the memory of activations ([`super::cross_section_buffers`]).

use std::collections::BTreeSet;

use zeroth_graph::{Backward, Graph};
use zeroth_kernel::{ByTier, Target, Tier};

use super::buffer_analysis::BufferAnalysis;
use super::cross_section_buffers::CrossSectionBuffers;
use super::cross_step_waits;
use super::placement::{TransientBuffer, guard_reuse};
use super::views::{VIEW, Views};
use super::waits::{self, CrossStepWaits, Waits};
use crate::launches::Lowering;
use crate::{
    Buffer, BufferId, LiveRange, Memory, PlacedBuffer, Program, SectionKind, SectionMemory, StreamSizes,
};

/// Places the buffers of a program. Scratch sizes are the maximum over all `row_sizes` for the kernels of `target`.
pub fn plan_memory(
    program: &Program,
    graph: &Graph,
    backward: &Backward,
    target: &dyn Target,
    row_sizes: &StreamSizes,
) -> Memory {
    place_buffers(program, graph, backward, target, row_sizes, MemoryDetail::Runnable { guard: 0 })
}

/// How much of a memory plan is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryDetail {
    /// All of it, with a number of unused bytes after every buffer.
    Runnable { guard: u64 },
    /// The bytes: no waits are derived.
    Bytes,
}

/// As [`plan_memory()`], in this detail.
pub(crate) fn place_buffers(
    program: &Program,
    graph: &Graph,
    backward: &Backward,
    target: &dyn Target,
    row_sizes: &StreamSizes,
    detail: MemoryDetail,
) -> Memory {
    let (guard, has_waits) = match detail {
        MemoryDetail::Runnable { guard } => (guard, true),
        MemoryDetail::Bytes => (0, false),
    };
    let source = BufferAnalysis { program, graph, backward, target };
    let lowering = Lowering::new(program, graph, backward, target);
    let scratch = program.sections.iter().map(|section| lowering.scratch(section, row_sizes)).collect();
    let mut static_buffers = source.static_buffers();
    let cross_section_buffers = CrossSectionBuffers::find(program, &mut static_buffers);
    let planner = Planner { source, guard, has_waits, scratch, cross_section_buffers };
    let mut shared = ByTier::<(u64, u64)>::default();
    let static_buffers = planner.place_static(static_buffers, &mut shared);
    let static_ids: BTreeSet<BufferId> = static_buffers.iter().map(|placed| placed.buffer.id).collect();
    let views = Views::new(program);
    let is_transient = |id| views.offset(id).is_none() && !static_ids.contains(&id);
    let transient: Vec<Vec<TransientBuffer>> =
        (0..program.sections.len()).map(|at| planner.transient(at, is_transient)).collect();
    let derived = |section| if has_waits { waits::derive(section) } else { Waits::new() };
    let mut waits: Vec<Waits> = program.sections.iter().map(derived).collect();
    let offsets = planner.place_transient(&transient, &mut shared, &mut waits);
    let (at, bytes) = shared[Tier::Device];
    let views_at = (at + bytes).next_multiple_of(VIEW);
    let mut sections: Vec<SectionMemory> = Vec::with_capacity(program.sections.len());
    for (at, ((transient, offsets), waits)) in transient.into_iter().zip(&offsets).zip(waits).enumerate() {
        let placed = |(transient, offset): (TransientBuffer, &u64)| PlacedBuffer {
            at: shared[transient.buffer.tier].0 + offset,
            live_range: planner.cross_section_buffers.live_range(at, transient.buffer.id),
            buffer: transient.buffer,
            lifetime: transient.lifetime,
            accessed_by: transient.accessed_by,
        };
        let mut buffers: Vec<PlacedBuffer> = transient.into_iter().zip(offsets).map(placed).collect();
        buffers.extend(views.seen(&source, &program.sections[at], &planner.scratch[at], views_at));
        sections.push(SectionMemory {
            kind: program.sections[at].kind,
            buffers,
            waits,
            cross_step_waits: CrossStepWaits::new(),
        });
    }
    if has_waits && waits::update_overlaps(&program.sections) {
        let found = cross_step_waits::derive(&program.sections, &sections);
        sections.iter_mut().zip(found).for_each(|(section, waits)| section.cross_step_waits = waits);
    }
    Memory { static_buffers, shared, views: (views_at, views.bytes), sections, guard }
}

/// Everything that places follow from.
struct Planner<'a> {
    source: BufferAnalysis<'a>,
    /// Bytes after every buffer.
    guard: u64,
    has_waits: bool,
    /// Bytes of scratch of every instruction, by section.
    scratch: Vec<Vec<u64>>,
    cross_section_buffers: CrossSectionBuffers,
}

impl Planner<'_> {
    fn guarded(&self, buffer: Buffer) -> Buffer {
        let bytes = (buffer.bytes + self.guard).next_multiple_of(buffer.tier.alignment());
        Buffer { bytes, ..buffer }
    }

    /// Places the statically allocated buffers one after the other; sections share what follows.
    fn place_static(&self, buffers: Vec<Buffer>, shared: &mut ByTier<(u64, u64)>) -> Vec<PlacedBuffer> {
        let place = |buffer| {
            let buffer = self.guarded(buffer);
            let at = shared[buffer.tier].0;
            shared[buffer.tier].0 += buffer.bytes;
            PlacedBuffer {
                buffer,
                at,
                lifetime: 0..=usize::MAX,
                accessed_by: Vec::new(),
                live_range: LiveRange::Always,
            }
        };
        buffers.into_iter().map(place).collect()
    }

    /// The transient buffers of a section.
    fn transient(&self, at: usize, is_transient: impl Fn(BufferId) -> bool) -> Vec<TransientBuffer> {
        let (program, cross) = (self.source.program, &self.cross_section_buffers);
        let (section, scratch) = (&program.sections[at], &self.scratch[at]);
        let mut accesses: Vec<(BufferId, usize)> = Vec::new();
        for (at, instruction) in section.instructions.iter().enumerate() {
            let own = (scratch[at] > 0).then_some(BufferId::Scratch(at));
            accesses.extend(instruction.operands.accesses().map(|(id, _)| id).chain(own).map(|id| (id, at)));
        }
        accesses.sort_unstable();
        let lives = accesses.chunk_by(|(one, _), (other, _)| one == other);
        let lives = lives.map(|accesses| (accesses[0].0, accesses)).filter(|(id, _)| is_transient(*id));
        let buffer = |id| cross.buffer(id).unwrap_or_else(|| self.source.transient(section, id, scratch));
        let transient = lives.map(|(id, accesses)| TransientBuffer {
            buffer: self.guarded(buffer(id)),
            lifetime: cross.lifetime(program, at, id, accesses[0].1..=accesses[accesses.len() - 1].1),
            // Only waits and the engine follow single accesses.
            accessed_by: if self.has_waits {
                accesses.iter().map(|(_, at)| *at).collect()
            } else {
                Vec::new()
            },
        });
        transient.collect()
    }

    /// The offset of every transient buffer in what sections share, and the waits that its place needs.
    fn place_transient(
        &self,
        transient: &[Vec<TransientBuffer>],
        shared: &mut ByTier<(u64, u64)>,
        waits: &mut [Waits],
    ) -> Vec<Vec<u64>> {
        let (program, cross) = (self.source.program, &self.cross_section_buffers);
        let mut offsets: Vec<Vec<u64>> = transient.iter().map(|transient| vec![0; transient.len()]).collect();
        let groups = cross.groups(program.sections.len());
        for (group, tier) in groups.iter().flat_map(|group| Tier::ALL.map(|tier| (group, tier))) {
            let (mut end, placed) = cross.place(program, group, transient, tier);
            for (at, mut placed) in group.iter().copied().zip(placed) {
                let section = &program.sections[at];
                let of_tier = |transient: &&TransientBuffer| transient.buffer.tier == tier;
                let ours: Vec<&TransientBuffer> = transient[at].iter().filter(of_tier).collect();
                // Streamed states fill the arena from its far end, which activations leave first: they are loaded
                // during backward.
                let is_update = section.kind == SectionKind::Update && tier == Tier::Device;
                if let Some(window) = program.update_window.filter(|_| is_update) {
                    end = end.max(shared[tier].1 + window);
                    let flipped =
                        placed.iter().zip(&ours).map(|(at, transient)| end - at - transient.buffer.bytes);
                    placed = flipped.collect();
                }
                if self.has_waits {
                    guard_reuse(section, &ours, &placed, &mut waits[at]);
                }
                let ours = (0..transient[at].len()).filter(|place| of_tier(&&transient[at][*place]));
                ours.zip(placed).for_each(|(place, offset)| offsets[at][place] = offset);
            }
            let most = &mut shared[tier].1;
            *most = end.max(*most);
        }
        offsets
    }
}
