//! `bytes`: how much memory a program needs, exactly, before it starts.
//!
//! Every buffer has a size, a category and a life, read off the instructions. What is always there lies first; the
//! sections share what follows, since they run one after the other. The largest end is the arena.
//!
//! Gradients of a step of one micro-batch are made in its backward and end with its update ([`super::carried`]): they lie
//! where activations were.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::Target;
use zeroth_graph::{Backward, Graph};
use zeroth_kernel::{Span, Tier};

use super::across::{self, Across};
use super::buffers::Source;
use super::carried::{Carried, Draft};
use super::launches::Lowering;
use super::place::{ALIGNMENT, Passing, guard_reuse};
use super::views::{VIEW, Views};
use super::waits::{self, Waits};
use super::{Buffer, Category, Content, Program, SectionKind};
use crate::Bytes;

/// A buffer in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The buffer.
    pub buffer: Buffer,
    /// Its first byte in the arena.
    pub at: u64,
    /// The first and last instruction of its section that touch it.
    pub life: RangeInclusive<usize>,
    /// All that do; empty for what is always there.
    pub touched_by: Vec<usize>,
    /// Whether it outlives one section.
    pub reach: Reach,
}

/// Which sections a buffer is there in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// All of them.
    Always,
    /// Its own.
    Section,
    /// Its own, and the next one, which reads it.
    ToNext,
    /// The one before, which made it, and its own.
    FromBefore,
    /// It is other ranks' memory, which appears behind the arena, and has none here.
    Seen,
}

/// The memory of one section.
#[derive(Debug, Clone, PartialEq)]
pub struct SectionMemory {
    /// Which section.
    pub kind: SectionKind,
    /// The buffers that come and go in it.
    pub buffers: Vec<Placed>,
    /// For each instruction, those of other queues that it waits for.
    pub waits: Waits,
    /// For each instruction, those of earlier sections that may still run and that it waits for, by section and place.
    /// Empty where all queues meet between sections.
    pub across: Across,
}

/// The memory of a program on one rank's device: every rank's is the same.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    /// What is there all the time.
    pub always: Vec<Placed>,
    /// The part of each tier's arena that sections share: where it begins, and its bytes.
    pub shared: [(u64, u64); 2],
    /// Behind the device's arena, where other ranks' parameters appear: where it begins, and its bytes, which are addresses
    /// and no memory.
    pub views: (u64, u64),
    /// What comes and goes, by section, in the program's order.
    pub sections: Vec<SectionMemory>,
    /// Bytes behind every buffer that nothing may touch: 0 but for executors that look after them.
    pub guard: u64,
}

/// Counts and places the memory of a program. Scratch is what kernels of `target` need, the most over all `row_sizes`.
pub fn bytes(
    program: &Program,
    graph: &Graph,
    backward: &Backward,
    target: Target,
    row_sizes: &[u64],
) -> Memory {
    guarded_bytes(program, graph, backward, target, row_sizes, 0)
}

/// As [`bytes()`], with `guard` bytes behind every buffer.
pub fn guarded_bytes(
    program: &Program,
    graph: &Graph,
    backward: &Backward,
    target: Target,
    row_sizes: &[u64],
    guard: u64,
) -> Memory {
    let source = Source { program, graph, backward, target };
    let guarded =
        |buffer: Buffer| Buffer { bytes: (buffer.bytes + guard).next_multiple_of(ALIGNMENT), ..buffer };
    let lowering = Lowering::new(program, graph, backward, target);
    let drafts: Vec<Draft> = program
        .sections
        .iter()
        .map(|section| {
            let scratch = lowering.scratch(section, row_sizes);
            Draft { touches: source.touches(section, &scratch), scratch }
        })
        .collect();
    let mut always = source.always();
    let carried = Carried::find(program, &drafts, &mut always);
    let mut shared = [(0, 0); 2];
    let always = always.into_iter().map(|buffer| {
        let buffer = guarded(buffer);
        let at = shared[buffer.tier as usize].0;
        shared[buffer.tier as usize].0 += buffer.bytes;
        Placed { buffer, at, life: 0..=usize::MAX, touched_by: Vec::new(), reach: Reach::Always }
    });
    let always: Vec<Placed> = always.collect();
    let views = Views::new(program);
    let passing = |at: usize| {
        let (section, draft) = (&program.sections[at], &drafts[at]);
        let mut lives: BTreeMap<Content, Vec<usize>> = BTreeMap::new();
        for (at, touched) in draft.touches.iter().enumerate() {
            for (content, _) in touched {
                lives.entry(*content).or_default().push(at);
            }
        }
        lives.retain(|content, _| views.offset(*content).is_none());
        lives.retain(|content, _| always.iter().all(|placed| placed.buffer.content != *content));
        let buffer = |content| {
            carried.buffer(content).unwrap_or_else(|| source.passing(section, content, &draft.scratch))
        };
        let passing = lives.into_iter().map(|(content, touched_by)| Passing {
            buffer: guarded(buffer(content)),
            life: carried.life(program, at, content, touched_by[0]..=touched_by[touched_by.len() - 1]),
            touched_by,
        });
        passing.collect::<Vec<_>>()
    };
    let passing: Vec<Vec<Passing>> = (0..drafts.len()).map(passing).collect();
    let mut waits: Vec<Waits> = program
        .sections
        .iter()
        .zip(&drafts)
        .map(|(section, draft)| waits::derive(section, &draft.touches))
        .collect();
    let mut offsets: Vec<Vec<u64>> = passing.iter().map(|passing| vec![0; passing.len()]).collect();
    for group in carried.groups(drafts.len()) {
        for tier in [Tier::Device, Tier::Host] {
            let (mut end, placed) = carried.place(program, &group, &passing, tier);
            for (at, mut placed) in group.iter().copied().zip(placed) {
                let section = &program.sections[at];
                let of_tier = |passing: &&Passing| passing.buffer.tier == tier;
                let ours: Vec<Passing> = passing[at].iter().filter(of_tier).cloned().collect();
                // States that pass through come first where micro-batches come last: they are on their way during backward.
                if section.kind == SectionKind::Update && program.window.is_some() && tier == Tier::Device {
                    end = end.max(shared[tier as usize].1 + program.window.unwrap_or(0));
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
    let mut sections: Vec<SectionMemory> = Vec::with_capacity(drafts.len());
    for (at, ((passing, offsets), waits)) in passing.into_iter().zip(&offsets).zip(waits).enumerate() {
        let placed = |(passing, offset): (Passing, &u64)| Placed {
            at: shared[passing.buffer.tier as usize].0 + offset,
            reach: carried.reach(at, passing.buffer.content),
            buffer: passing.buffer,
            life: passing.life,
            touched_by: passing.touched_by,
        };
        let mut buffers: Vec<Placed> = passing.into_iter().zip(offsets).map(placed).collect();
        buffers.extend(views.seen(&source, &program.sections[at], &drafts[at], views_at));
        sections.push(SectionMemory {
            kind: program.sections[at].kind,
            buffers,
            waits,
            across: Across::new(),
        });
    }
    if across::runs_on(&program.sections) {
        let found = across::derive(&program.sections, &drafts, &sections);
        sections.iter_mut().zip(found).for_each(|(section, across)| section.across = across);
    }
    Memory { always, shared, views: (views_at, views.bytes), sections, guard }
}

impl Placed {
    /// Where its bytes are, without what guards them.
    pub fn span(&self, guard: u64) -> Span {
        Span { tier: self.buffer.tier, at: self.at, bytes: self.buffer.bytes - guard }
    }
}

impl Memory {
    /// A tier's arena: what is always there and what sections share.
    pub fn arena(&self, tier: Tier) -> u64 {
        let (at, bytes) = self.shared[tier as usize];
        at + bytes
    }

    /// How many tiles of states fit into so many bytes; 0 where none pass through.
    pub fn room_for_tiles(&self, bytes: u64) -> u64 {
        let is_tile =
            |placed: &&Placed| matches!(placed.buffer.content, Content::Tile(_) | Content::Updated(_));
        let update = self.sections.iter().filter(|section| section.kind == SectionKind::Update);
        let sizes = update.flat_map(|section| section.buffers.iter().filter(is_tile));
        let (mut tile, mut updated, mut tiles, mut all) = (0, 0, 0, 0);
        for placed in sizes {
            all += placed.buffer.bytes;
            tiles += u64::from(matches!(placed.buffer.content, Content::Tile(_)));
            let largest = match placed.buffer.content {
                Content::Tile(_) => &mut tile,
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

    /// The most bytes of a category that are there at the same time in a tier.
    pub fn peak(&self, tier: Tier, category: Category) -> u64 {
        let is = |placed: &&Placed| {
            let is_here = placed.reach != Reach::Seen && placed.buffer.tier == tier;
            is_here && placed.buffer.category == category
        };
        let always: u64 = self.always.iter().filter(is).map(|placed| placed.buffer.bytes).sum();
        let most = |section: &SectionMemory| {
            let mut grows: Vec<(usize, bool, u64)> = Vec::new();
            for placed in section.buffers.iter().filter(is) {
                // What ends with an instruction is still there beside what begins with it.
                grows.push((*placed.life.start(), false, placed.buffer.bytes));
                grows.push((*placed.life.end(), true, placed.buffer.bytes));
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
        always + self.sections.iter().map(most).max().unwrap_or(0)
    }

    /// A tier's arena by category: states as they are, activations at their peak, and all else as buffers. Where gradients
    /// lie in memory that activations have left, that memory counts as theirs: of what is left, buffers are what they are at
    /// their peak, and activations the rest.
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
        let activations = if passing.any(|placed| placed.reach == Reach::FromBefore) {
            let is_data = |placed: &&Placed| {
                placed.buffer.category == Category::Activations && placed.buffer.tier == tier
            };
            let data: u64 = self.always.iter().filter(is_data).map(|placed| placed.buffer.bytes).sum();
            rest - most_buffers.min(rest - data)
        } else {
            most_activations
        };
        Bytes { parameters, gradients, optimizer, activations, buffers: rest - activations, total }
    }

    /// Bytes of parameters, gradients and optimizer in a tier: what ZeRO's formulas count.
    pub fn states(&self, tier: Tier) -> u64 {
        let Bytes { parameters, gradients, optimizer, .. } = self.by_category(tier);
        parameters + gradients + optimizer
    }
}
