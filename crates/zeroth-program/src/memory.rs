//! Memory of a program: exact sizes and offsets, computed before it runs.
//!
//! Sizes, categories and lifetimes follow from the instructions. Statically allocated buffers come first; the sections
//! share the memory after them, since they run one after the other. The largest end is the arena size.
//!
//! With one micro-batch per step, gradients reuse the memory of activations ([`super::cross_section_buffers`]).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::Target;
use zeroth_graph::{Backward, Graph};
use zeroth_kernel::{Span, Tier};

use super::buffers::BufferAnalysis;
use super::cross_section_buffers::{CrossSectionBuffers, SectionAccesses};
use super::cross_step_waits::{self, CrossStepWaits};
use super::launches::Lowering;
use super::placement::{ALIGNMENT, TransientBuffer, guard_reuse};
use super::views::{VIEW, Views};
use super::waits::{self, Waits};
use super::{Buffer, BufferId, Category, Program, SectionKind};
use crate::Bytes;

/// A buffer in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedBuffer {
    /// The buffer.
    pub buffer: Buffer,
    /// Its offset in the arena.
    pub at: u64,
    /// The first and last instruction of its section that access it.
    pub lifetime: RangeInclusive<usize>,
    /// All instructions that access it; empty for statically allocated buffers.
    pub accessed_by: Vec<usize>,
    /// The sections it is live in.
    pub live_range: LiveRange,
}

/// The sections in which a buffer is live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveRange {
    /// All sections.
    Always,
    /// Only its own.
    Section,
    /// Its own and the next, which reads it.
    IntoNext,
    /// The previous one, which wrote it, and its own.
    FromPrevious,
    /// A mapping of other ranks' memory after the arena; it takes no memory here.
    Mapped,
}

/// The transient memory of a section.
#[derive(Debug, Clone, PartialEq)]
pub struct SectionMemory {
    /// The section.
    pub kind: SectionKind,
    /// Its transient buffers.
    pub buffers: Vec<PlacedBuffer>,
    /// For each instruction, the instructions of other queues it waits for.
    pub waits: Waits,
    /// For each instruction, the instructions of earlier sections it waits for, as (section, index). Empty where all
    /// queues join between sections.
    pub cross_step_waits: CrossStepWaits,
}

/// The memory of a program; equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    /// The statically allocated buffers.
    pub static_buffers: Vec<PlacedBuffer>,
    /// Per tier, offset and bytes of the part of the arena that sections share.
    pub shared: [(u64, u64); 2],
    /// Offset and bytes of the mappings of other ranks' parameters after the device's arena: address space, not memory.
    pub views: (u64, u64),
    /// The transient buffers of each section, in program order.
    pub sections: Vec<SectionMemory>,
    /// Guard bytes after every buffer; 0 except for the chaos executor.
    pub guard: u64,
}

/// Places the buffers of a program. Scratch sizes are the maximum over all `row_sizes` for the kernels of `target`.
pub fn plan_memory(
    program: &Program,
    graph: &Graph,
    backward: &Backward,
    target: Target,
    row_sizes: &[u64],
) -> Memory {
    plan_memory_guarded(program, graph, backward, target, row_sizes, 0)
}

/// As [`plan_memory()`], with `guard` bytes after every buffer.
pub fn plan_memory_guarded(
    program: &Program,
    graph: &Graph,
    backward: &Backward,
    target: Target,
    row_sizes: &[u64],
    guard: u64,
) -> Memory {
    let source = BufferAnalysis { program, graph, backward, target };
    let guarded =
        |buffer: Buffer| Buffer { bytes: (buffer.bytes + guard).next_multiple_of(ALIGNMENT), ..buffer };
    let lowering = Lowering::new(program, graph, backward, target);
    let accesses: Vec<SectionAccesses> = program
        .sections
        .iter()
        .map(|section| {
            let scratch = lowering.scratch(section, row_sizes);
            SectionAccesses { touches: source.touches(section, &scratch), scratch }
        })
        .collect();
    let mut static_buffers = source.static_buffers();
    let cross_section_buffers = CrossSectionBuffers::find(program, &accesses, &mut static_buffers);
    let mut shared = [(0, 0); 2];
    let static_buffers = static_buffers.into_iter().map(|buffer| {
        let buffer = guarded(buffer);
        let at = shared[buffer.tier as usize].0;
        shared[buffer.tier as usize].0 += buffer.bytes;
        PlacedBuffer {
            buffer,
            at,
            lifetime: 0..=usize::MAX,
            accessed_by: Vec::new(),
            live_range: LiveRange::Always,
        }
    });
    let static_buffers: Vec<PlacedBuffer> = static_buffers.collect();
    let views = Views::new(program);
    let passing = |at: usize| {
        let (section, accesses) = (&program.sections[at], &accesses[at]);
        let mut lives: BTreeMap<BufferId, Vec<usize>> = BTreeMap::new();
        for (at, touched) in accesses.touches.iter().enumerate() {
            for (id, _) in touched {
                lives.entry(*id).or_default().push(at);
            }
        }
        lives.retain(|id, _| views.offset(*id).is_none());
        lives.retain(|id, _| static_buffers.iter().all(|placed| placed.buffer.id != *id));
        let buffer = |id| {
            cross_section_buffers.buffer(id).unwrap_or_else(|| source.passing(section, id, &accesses.scratch))
        };
        let passing = lives.into_iter().map(|(id, accessed_by)| TransientBuffer {
            buffer: guarded(buffer(id)),
            lifetime: cross_section_buffers.lifetime(
                program,
                at,
                id,
                accessed_by[0]..=accessed_by[accessed_by.len() - 1],
            ),
            accessed_by,
        });
        passing.collect::<Vec<_>>()
    };
    let passing: Vec<Vec<TransientBuffer>> = (0..accesses.len()).map(passing).collect();
    let mut waits: Vec<Waits> = program
        .sections
        .iter()
        .zip(&accesses)
        .map(|(section, accesses)| waits::derive(section, &accesses.touches))
        .collect();
    let mut offsets: Vec<Vec<u64>> = passing.iter().map(|passing| vec![0; passing.len()]).collect();
    for group in cross_section_buffers.groups(accesses.len()) {
        for tier in [Tier::Device, Tier::Host] {
            let (mut end, placed) = cross_section_buffers.place(program, &group, &passing, tier);
            for (at, mut placed) in group.iter().copied().zip(placed) {
                let section = &program.sections[at];
                let of_tier = |passing: &&TransientBuffer| passing.buffer.tier == tier;
                let ours: Vec<TransientBuffer> = passing[at].iter().filter(of_tier).cloned().collect();
                // Streamed states fill the arena from its far end, which activations leave first: they are loaded
                // during backward.
                if section.kind == SectionKind::Update
                    && program.update_window.is_some()
                    && tier == Tier::Device
                {
                    end = end.max(shared[tier as usize].1 + program.update_window.unwrap_or(0));
                    let flipped =
                        placed.iter().zip(&ours).map(|(at, passing)| end - at - passing.buffer.bytes);
                    placed = flipped.collect();
                }
                guard_reuse(section, &ours, &placed, &mut waits[at]);
                let ours = (0..passing[at].len()).filter(|place| of_tier(&&passing[at][*place]));
                ours.zip(placed).for_each(|(place, offset)| offsets[at][place] = offset);
            }
            let most = &mut shared[tier as usize].1;
            *most = end.max(*most);
        }
    }
    let views_at = (shared[0].0 + shared[0].1).next_multiple_of(VIEW);
    let mut sections: Vec<SectionMemory> = Vec::with_capacity(accesses.len());
    for (at, ((passing, offsets), waits)) in passing.into_iter().zip(&offsets).zip(waits).enumerate() {
        let placed = |(passing, offset): (TransientBuffer, &u64)| PlacedBuffer {
            at: shared[passing.buffer.tier as usize].0 + offset,
            live_range: cross_section_buffers.live_range(at, passing.buffer.id),
            buffer: passing.buffer,
            lifetime: passing.lifetime,
            accessed_by: passing.accessed_by,
        };
        let mut buffers: Vec<PlacedBuffer> = passing.into_iter().zip(offsets).map(placed).collect();
        buffers.extend(views.seen(&source, &program.sections[at], &accesses[at], views_at));
        sections.push(SectionMemory {
            kind: program.sections[at].kind,
            buffers,
            waits,
            cross_step_waits: CrossStepWaits::new(),
        });
    }
    if cross_step_waits::runs_on(&program.sections) {
        let found = cross_step_waits::derive(&program.sections, &accesses, &sections);
        sections.iter_mut().zip(found).for_each(|(section, waits)| section.cross_step_waits = waits);
    }
    Memory { static_buffers, shared, views: (views_at, views.bytes), sections, guard }
}

impl PlacedBuffer {
    /// Its span without the guard bytes.
    pub fn span(&self, guard: u64) -> Span {
        Span { tier: self.buffer.tier, at: self.at, bytes: self.buffer.bytes - guard }
    }
}

impl Memory {
    /// The arena size of a tier: static buffers and the part that sections share.
    pub fn arena(&self, tier: Tier) -> u64 {
        let (at, bytes) = self.shared[tier as usize];
        at + bytes
    }

    /// How many streamed sub-groups fit into `bytes`; 0 where no state is streamed.
    pub fn sub_groups_within(&self, bytes: u64) -> u64 {
        let is_tile = |placed: &&PlacedBuffer| {
            matches!(placed.buffer.id, BufferId::SubGroup(_) | BufferId::UpdatedWeights(_))
        };
        let update = self.sections.iter().filter(|section| section.kind == SectionKind::Update);
        let sizes = update.flat_map(|section| section.buffers.iter().filter(is_tile));
        let (mut tile, mut updated, mut tiles, mut all) = (0, 0, 0, 0);
        for placed in sizes {
            all += placed.buffer.bytes;
            tiles += u64::from(matches!(placed.buffer.id, BufferId::SubGroup(_)));
            let largest = match placed.buffer.id {
                BufferId::SubGroup(_) => &mut tile,
                _ => &mut updated,
            };
            *largest = placed.buffer.bytes.max(*largest);
        }
        match tile {
            0 => 0,
            _ if all <= bytes => tiles,
            _ => bytes / (tile + updated),
        }
    }

    /// The peak bytes of a category in a tier.
    pub fn peak(&self, tier: Tier, category: Category) -> u64 {
        let is = |placed: &&PlacedBuffer| {
            let is_here = placed.live_range != LiveRange::Mapped && placed.buffer.tier == tier;
            is_here && placed.buffer.category == category
        };
        let static_buffers: u64 =
            self.static_buffers.iter().filter(is).map(|placed| placed.buffer.bytes).sum();
        let most = |section: &SectionMemory| {
            let mut grows: Vec<(usize, bool, u64)> = Vec::new();
            for placed in section.buffers.iter().filter(is) {
                // A buffer that ends with an instruction overlaps one that begins with it.
                grows.push((*placed.lifetime.start(), false, placed.buffer.bytes));
                grows.push((*placed.lifetime.end(), true, placed.buffer.bytes));
            }
            grows.sort_unstable();
            let (mut there, mut peak) = (0, 0);
            for (_, ends, bytes) in grows {
                if ends {
                    there -= bytes;
                } else {
                    there += bytes;
                }
                peak = peak.max(there);
            }
            peak
        };
        static_buffers + self.sections.iter().map(most).max().unwrap_or(0)
    }

    /// A tier's arena by category: states as allocated, activations at their peak, the rest as buffers. Where gradients
    /// reuse the memory of activations, that memory counts as gradients: of what remains, buffers count at their peak
    /// and the rest as activations.
    pub fn by_category(&self, tier: Tier) -> Bytes {
        let [parameters, gradients, optimizer, most_activations, most_buffers] = [
            Category::Parameters,
            Category::Gradients,
            Category::Optimizer,
            Category::Activations,
            Category::Buffers,
        ]
        .map(|category| self.peak(tier, category));
        let total = self.arena(tier);
        let rest = total - parameters - gradients - optimizer;
        let mut passing = self.sections.iter().flat_map(|section| &section.buffers);
        let activations = if passing.any(|placed| placed.live_range == LiveRange::FromPrevious) {
            let is_data = |placed: &&PlacedBuffer| {
                placed.buffer.category == Category::Activations && placed.buffer.tier == tier
            };
            let data: u64 =
                self.static_buffers.iter().filter(is_data).map(|placed| placed.buffer.bytes).sum();
            rest - most_buffers.min(rest - data)
        } else {
            most_activations
        };
        Bytes { parameters, gradients, optimizer, activations, buffers: rest - activations, total }
    }

    /// Bytes of parameters, gradients and optimizer states in a tier, as ZeRO's formulas count them.
    pub fn states(&self, tier: Tier) -> u64 {
        let Bytes { parameters, gradients, optimizer, .. } = self.by_category(tier);
        parameters + gradients + optimizer
    }
}
