//! Buffers that live across two sections: written by a step's only micro-batch and read by its update.
//!
//! With one micro-batch per step, gradients appear unit by unit during backward, while activations are freed, and die
//! with the update. They need no memory during forward, so the two sections are placed as one instruction list, on
//! which a gradient lives from its first write to the end. With accumulation, gradients are live in every forward but
//! the first and are allocated statically; so are they where the update overlaps the next micro-batch.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use zeroth_kernel::{Access, Tier};

use super::placement::{TransientBuffer, Unplaced, place};
use super::waits;
use crate::{Buffer, BufferId, Category, LiveRange, Program, SectionKind};

/// Buffers that a step's only micro-batch writes and its update reads.
pub(crate) struct CrossSectionBuffers {
    /// The indices of the two sections.
    sections: [usize; 2],
    buffers: BTreeMap<BufferId, Buffer>,
}

impl CrossSectionBuffers {
    /// Moves the cross-section buffers out of the statically allocated ones.
    pub(crate) fn find(program: &Program, static_buffers: &mut Vec<Buffer>) -> Self {
        let place = |kind| program.sections.iter().position(|section| section.kind == kind);
        let overlaps = program.update_window.is_some() || waits::update_overlaps(&program.sections);
        let (Some(only), Some(update), false) =
            (place(SectionKind::Only), place(SectionKind::Update), overlaps)
        else {
            return Self { sections: [0, 0], buffers: BTreeMap::new() };
        };
        let [first, read] = [only, update].map(|section| {
            let mut first: BTreeMap<BufferId, Access> = BTreeMap::new();
            let instructions = program.sections[section].instructions.iter();
            for (id, access) in instructions.flat_map(|instruction| instruction.operands.accesses()) {
                first.entry(id).or_insert(access);
            }
            first
        });
        let is_carried = |buffer: &Buffer| {
            buffer.category == Category::Gradients
                && first.get(&buffer.id) == Some(&Access::Write)
                && read.contains_key(&buffer.id)
        };
        let (carried, rest): (Vec<Buffer>, Vec<Buffer>) = static_buffers.drain(..).partition(is_carried);
        *static_buffers = rest;
        let buffers = carried.into_iter().map(|buffer| (buffer.id, buffer)).collect();
        Self { sections: [only, update], buffers }
    }

    /// The cross-section buffer with this id.
    pub(crate) fn buffer(&self, id: BufferId) -> Option<Buffer> {
        self.buffers.get(&id).copied()
    }

    /// The sections in which a buffer is live.
    pub(crate) fn live_range(&self, section: usize, id: BufferId) -> LiveRange {
        match self.buffer(id) {
            None => LiveRange::Section,
            Some(_) if section == self.sections[0] => LiveRange::IntoNext,
            Some(_) => LiveRange::FromPrevious,
        }
    }

    /// The lifetime of a buffer within a section that accesses it in `touched`.
    pub(crate) fn lifetime(
        &self,
        program: &Program,
        section: usize,
        id: BufferId,
        touched: RangeInclusive<usize>,
    ) -> RangeInclusive<usize> {
        let last = program.sections[section].instructions.len() - 1;
        match self.live_range(section, id) {
            LiveRange::IntoNext => *touched.start()..=last,
            // To the end of the section rather than the last use: gradients are readable after the update.
            LiveRange::FromPrevious => 0..=last,
            LiveRange::Always | LiveRange::Section | LiveRange::Mapped => touched,
        }
    }

    /// Groups of sections that are placed together, of `count` sections.
    pub(crate) fn groups(&self, count: usize) -> Vec<Vec<usize>> {
        if self.buffers.is_empty() {
            return (0..count).map(|section| vec![section]).collect();
        }
        let alone = (0..count).filter(|section| !self.sections.contains(section));
        std::iter::once(self.sections.to_vec()).chain(alone.map(|section| vec![section])).collect()
    }

    /// The end of the largest buffer, and the offset of every buffer of a group in a tier, section by section.
    pub(crate) fn place(
        &self,
        program: &Program,
        group: &[usize],
        transient: &[Vec<TransientBuffer>],
        tier: Tier,
    ) -> (u64, Vec<Vec<u64>>) {
        // Concatenate the instruction lists of the group.
        let mut all: Vec<Unplaced> = Vec::new();
        let mut places: Vec<Vec<usize>> = Vec::new();
        let mut carried: BTreeMap<BufferId, usize> = BTreeMap::new();
        let mut begin = 0;
        for section in group {
            let mut of_section = Vec::new();
            for transient in transient[*section].iter().filter(|transient| transient.buffer.tier == tier) {
                let lifetime = begin + transient.lifetime.start()..=begin + transient.lifetime.end();
                let id = transient.buffer.id;
                let before = match self.live_range(*section, id) {
                    LiveRange::FromPrevious => carried.get(&id).copied(),
                    LiveRange::IntoNext => {
                        carried.insert(id, all.len());
                        None
                    }
                    _ => None,
                };
                of_section.push(before.unwrap_or(all.len()));
                match before {
                    Some(before) => all[before].lifetime = *all[before].lifetime.start()..=*lifetime.end(),
                    None => all.push(Unplaced { id, bytes: transient.buffer.bytes, lifetime }),
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
