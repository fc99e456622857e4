//! `bytes`: how much memory a program needs, exactly, before it starts.
//!
//! Every buffer has a size, a category and a life, read off the instructions: a value lives from the instruction that
//! writes it to the last that reads it, a gathered flat from its gather to its release, a unit's gradient from its
//! clearing to its last reduction. [`Memory::place`] gives every buffer an offset; the largest end is the arena.
//! Kernels' scratch is not counted yet: it comes with the kernels' own sizes.

use std::ops::RangeInclusive;

use zeroth_base::DType;
use zeroth_graph::{Backward, Graph, Kind, Value};

use super::{Action, Program, Section, SectionKind};
use crate::{Bytes, FlatKind};

/// Offsets are multiples of this: a cache line of any device, and a vector of any instruction set.
const ALIGNMENT: u64 = 256;

/// The types a run stores numbers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Parameters and activations.
    pub run: DType,
    /// Gradients on their way between ranks.
    pub communication: DType,
}

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// Parameters that are always there.
    Parameters,
    /// Gradients that stay until the update.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Values of forward and backward.
    Activations,
    /// Gathered flats, gradients of one unit, chunks on their way.
    Buffers,
}

/// A buffer of one section: its size and its life, as the first and last instruction that need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// What it holds, for people.
    pub name: String,
    /// What it is for.
    pub category: Category,
    /// Its size, rounded up to the alignment.
    pub bytes: u64,
    /// Its life within its section.
    pub life: RangeInclusive<usize>,
}

/// The memory of a program on one rank's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// What is there all the time, by category.
    pub always: Bytes,
    /// The buffers of each section that come and go, and their offsets behind what is always there.
    pub sections: Vec<(SectionKind, Vec<Buffer>, Vec<u64>)>,
    /// The largest end of any buffer: bytes of the part of the arena that sections share.
    pub shared: u64,
}

/// Counts and places the memory of a program on the fullest rank.
pub fn bytes(program: &Program, graph: &Graph, backward: &Backward, types: Types) -> Memory {
    let counter = Counter { program, graph, backward, types };
    let mut shared = 0;
    let sections = program
        .sections
        .iter()
        .map(|section| {
            let buffers = counter.section(section);
            let (offsets, end) = place(&buffers);
            shared = shared.max(end);
            (section.kind, buffers, offsets)
        })
        .collect();
    Memory { always: counter.always(), sections, shared }
}

impl Memory {
    /// The arena: what is always there and what sections share.
    pub fn arena(&self) -> u64 {
        self.always.total + self.shared
    }

    /// The most bytes of a category that live at the same time in any section.
    pub fn peak(&self, category: Category) -> u64 {
        let of_section = |buffers: &[Buffer]| {
            let ours: Vec<&Buffer> = buffers.iter().filter(|buffer| buffer.category == category).collect();
            let at =
                |place: usize| ours.iter().filter(|b| b.life.contains(&place)).map(|b| b.bytes).sum::<u64>();
            ours.iter().map(|buffer| at(*buffer.life.start())).max().unwrap_or(0)
        };
        self.sections.iter().map(|(_, buffers, _)| of_section(buffers)).max().unwrap_or(0)
    }
}

struct Counter<'a> {
    program: &'a Program,
    graph: &'a Graph,
    backward: &'a Backward,
    types: Types,
}

fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

impl Counter<'_> {
    fn always(&self) -> Bytes {
        let (layout, run) = (&self.program.layout, self.types.run.bytes());
        let ranks = layout.ranks;
        let (mut parameters, mut gradients, mut optimizer) = (0, 0, 0);
        for (index, flat) in layout.flats.iter().enumerate() {
            let shard = flat.shard_capacity(ranks);
            parameters += run * if self.program.stays_gathered(index) { flat.padded() } else { shard };
            if matches!(flat.kind, FlatKind::Frozen(_)) {
                continue;
            }
            let updated = if self.program.cuts_parameters { shard } else { flat.padded() };
            // Equal values are not stored twice: alone and without accumulation, the rounded gradient is all there is.
            let alone = ranks == 1 && self.program.accumulation == 1;
            gradients += updated * if alone { self.types.communication.bytes() } else { DType::F32.bytes() };
            // Two moments, and a master copy where the run's type is not f32 already.
            let states = if self.types.run == DType::F32 { 8 } else { 12 };
            optimizer += updated * states;
        }
        Bytes {
            parameters,
            gradients,
            optimizer,
            total: parameters + gradients + optimizer,
            ..Bytes::default()
        }
    }

    fn section(&self, section: &Section) -> Vec<Buffer> {
        let mut buffers = self.values(section);
        buffers.extend(self.flats(section));
        buffers
    }

    /// Values, from the instruction that first writes them to the last that touches them.
    fn values(&self, section: &Section) -> Vec<Buffer> {
        let mut lives: Vec<Option<RangeInclusive<usize>>> = vec![None; self.backward.values.len()];
        let mut touch = |value: Value, at: usize| {
            let life = &mut lives[value.index()];
            *life = Some(life.as_ref().map_or(at, |life| *life.start())..=at);
        };
        for (at, instruction) in section.instructions.iter().enumerate() {
            match instruction.action {
                Action::Forward(node) => {
                    let node = &self.graph.nodes[node];
                    node.inputs.iter().chain(&node.outputs).for_each(|value| touch(*value, at));
                }
                Action::Backward(node) => {
                    let node = &self.backward.nodes[node];
                    let outputs = node.outputs.iter().map(|(value, _)| value);
                    node.inputs.iter().chain(outputs).for_each(|value| touch(*value, at));
                }
                _ => {}
            }
        }
        let buffer = |(index, life): (usize, Option<RangeInclusive<usize>>)| {
            let info = self.backward.values[index];
            let element = match info.kind {
                Kind::Activation => self.types.run.bytes(),
                Kind::Statistic | Kind::Index => 4,
            };
            life.map(|life| Buffer {
                name: format!("value {index}"),
                category: Category::Activations,
                bytes: aligned(info.elements() * element),
                life,
            })
        };
        lives.into_iter().enumerate().filter_map(buffer).collect()
    }

    /// Gathered flats, gradients of one unit, and chunks on their way.
    fn flats(&self, section: &Section) -> Vec<Buffer> {
        let layout = &self.program.layout;
        let last = section.instructions.len().saturating_sub(1);
        let from = |at: usize, ends: &dyn Fn(&Action) -> bool| {
            let later = section.instructions[at..].iter().rposition(|instruction| ends(&instruction.action));
            later.map_or(last, |place| at + place)
        };
        let mut buffers = Vec::new();
        let mut push = |name: String, bytes: u64, life: RangeInclusive<usize>| {
            buffers.push(Buffer { name, category: Category::Buffers, bytes: aligned(bytes), life });
        };
        for (at, instruction) in section.instructions.iter().enumerate() {
            match &instruction.action {
                Action::Gather(flat) if !self.program.stays_gathered(*flat) => {
                    let released = section.instructions[at..]
                        .iter()
                        .position(|later| later.action == Action::Release(*flat))
                        .map_or(last, |place| at + place);
                    push(
                        format!("gathered flat {flat}"),
                        layout.flats[*flat].padded() * self.types.run.bytes(),
                        at..=released,
                    );
                }
                // At stage 0 the gradient of a flat is the one that stays.
                Action::Clear(flat) if self.program.cuts_parameters => {
                    let end = from(
                        at,
                        &|action| matches!(action, Action::Reduce { flat: other, .. } if other == flat),
                    );
                    push(format!("gradient of flat {flat}"), layout.flats[*flat].padded() * 4, at..=end);
                }
                Action::Reduce { flat, chunk, .. } if layout.ranks > 1 => {
                    // What is sent to all ranks and what comes from them.
                    let bytes =
                        2 * (chunk.end - chunk.start) * layout.ranks * self.types.communication.bytes();
                    push(format!("chunk of flat {flat}"), bytes, at..=at);
                }
                _ => {}
            }
        }
        buffers
    }
}

/// Offsets so that no two buffers that live at the same time overlap, and the largest end. The largest are placed first,
/// each as low as it fits: small ones fill what is left between them.
fn place(buffers: &[Buffer]) -> (Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|index| (std::cmp::Reverse(buffers[*index].bytes), *buffers[*index].life.start()));
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(buffers.len()); // by offset
    let mut end = 0;
    for index in order {
        let buffer = &buffers[index];
        let meets = |other: &Buffer| {
            other.life.start() <= buffer.life.end() && buffer.life.start() <= other.life.end()
        };
        let mut offset = 0;
        for other in placed.iter().filter(|other| meets(&buffers[**other])) {
            if offset + buffer.bytes <= offsets[*other] {
                break;
            }
            offset = offset.max(offsets[*other] + buffers[*other].bytes);
        }
        offsets[index] = offset;
        end = end.max(offset + buffer.bytes);
        let at = placed.partition_point(|other| offsets[*other] <= offset);
        placed.insert(at, index);
    }
    (offsets, end)
}
