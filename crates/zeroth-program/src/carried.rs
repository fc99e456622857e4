//! What one section makes and the next one reads, and that is not there before or after.
//!
//! With one micro-batch a step, gradients are made by its backward, one unit after the other, as activations leave; they
//! end with the update's section. So they need no memory of their own in forward: the micro-batch and the update are placed
//! as one line of instructions, on which a gradient lives from its first write to the end. With accumulation gradients are
//! there in every forward but the first, and stay always; so they do where an update runs beside the next micro-batch.

use std::ops::RangeInclusive;

use zeroth_kernel::{Access, Tier};

use super::across::{self, Touches};
use super::place::{Passing, place};
use super::{Buffer, Category, Content, Program, Reach, SectionKind};

/// A section before its buffers are placed: what its instructions touch, and what they scribble on.
pub(super) struct Draft {
    pub(super) touches: Touches,
    pub(super) scratch: Vec<u64>,
}

/// Buffers that a step's only micro-batch makes and its update reads.
pub(super) struct Carried {
    /// The places of the two sections.
    sections: [usize; 2],
    buffers: Vec<Buffer>,
}

impl Carried {
    /// Takes what is carried out of what would always be there.
    pub(super) fn find(program: &Program, drafts: &[Draft], always: &mut Vec<Buffer>) -> Self {
        let place = |kind| program.sections.iter().position(|section| section.kind == kind);
        let runs_on = program.window.is_some() || across::runs_on(&program.sections);
        let (Some(only), Some(update), false) =
            (place(SectionKind::Only), place(SectionKind::Update), runs_on)
        else {
            return Self { sections: [0, 0], buffers: Vec::new() };
        };
        let first = |section: usize, content: Content| {
            drafts[section].touches.iter().flatten().find(|(touched, _)| *touched == content)
        };
        let is_carried = |buffer: &Buffer| {
            buffer.category == Category::Gradients
                && matches!(first(only, buffer.content), Some((_, Access::Write)))
                && first(update, buffer.content).is_some()
        };
        let (buffers, rest) = always.drain(..).partition(is_carried);
        *always = rest;
        Self { sections: [only, update], buffers }
    }

    /// The buffer of a content that is carried.
    pub(super) fn buffer(&self, content: Content) -> Option<Buffer> {
        self.buffers.iter().find(|buffer| buffer.content == content).copied()
    }

    /// Which sections a content of a section is there in.
    pub(super) fn reach(&self, section: usize, content: Content) -> Reach {
        match self.buffer(content) {
            None => Reach::Section,
            Some(_) if section == self.sections[0] => Reach::ToNext,
            Some(_) => Reach::FromBefore,
        }
    }

    /// The life of a content in a section that touches it so.
    pub(super) fn life(
        &self,
        program: &Program,
        section: usize,
        content: Content,
        touched: RangeInclusive<usize>,
    ) -> RangeInclusive<usize> {
        let last = program.sections[section].instructions.len() - 1;
        match self.reach(section, content) {
            Reach::ToNext => *touched.start()..=last,
            // To the end, and not to its last use: what the update read may be asked for after it.
            Reach::FromBefore => 0..=last,
            Reach::Always | Reach::Section | Reach::Seen => touched,
        }
    }

    /// Sections that are placed together, of `count` in all.
    pub(super) fn groups(&self, count: usize) -> Vec<Vec<usize>> {
        if self.buffers.is_empty() {
            return (0..count).map(|section| vec![section]).collect();
        }
        let alone = (0..count).filter(|section| !self.sections.contains(section));
        std::iter::once(self.sections.to_vec()).chain(alone.map(|section| vec![section])).collect()
    }

    /// Offsets of the buffers that a group's sections have in a tier, section by section, and the largest end.
    pub(super) fn place(
        &self,
        program: &Program,
        group: &[usize],
        passing: &[Vec<Passing>],
        tier: Tier,
    ) -> (u64, Vec<Vec<u64>>) {
        // One line of instructions: a section's begin where those of the one before end.
        let mut all: Vec<Passing> = Vec::new();
        let mut places: Vec<Vec<usize>> = Vec::new();
        let mut begin = 0;
        for section in group {
            let mut of_section = Vec::new();
            for passing in passing[*section].iter().filter(|passing| passing.buffer.tier == tier) {
                let life = begin + passing.life.start()..=begin + passing.life.end();
                let content = passing.buffer.content;
                let before = match self.reach(*section, content) {
                    Reach::FromBefore => all.iter().position(|other| other.buffer.content == content),
                    _ => None,
                };
                of_section.push(before.unwrap_or(all.len()));
                match before {
                    Some(before) => all[before].life = *all[before].life.start()..=*life.end(),
                    None => all.push(Passing { life, ..passing.clone() }),
                }
            }
            places.push(of_section);
            begin += program.sections[*section].instructions.len();
        }
        let (offsets, end) = place(&all);
        let of = |places: Vec<usize>| places.into_iter().map(|place| offsets[place]).collect();
        (end, places.into_iter().map(of).collect())
    }
}
