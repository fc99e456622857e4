//! The memory of a program: placed buffers, waits, and totals by category.

use std::ops::RangeInclusive;

use zeroth_kernel::{ByTier, Span, Tier};

use super::buffer::{Buffer, BufferId, Category};
use super::category_bytes::Bytes;
use super::waits::{CrossStepWaits, Waits};
use crate::ir::SectionKind;

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
    pub shared: ByTier<(u64, u64)>,
    /// Offset and bytes of the mappings of other ranks' parameters after the device's arena: address space, not memory.
    pub views: (u64, u64),
    /// The transient buffers of each section, in program order.
    pub sections: Vec<SectionMemory>,
    /// Guard bytes after every buffer; 0 except for the chaos executor.
    pub guard: u64,
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
        let (at, bytes) = self.shared[tier];
        at + bytes
    }

    /// The arena size of every tier.
    pub fn arenas(&self) -> ByTier<u64> {
        ByTier::new(|tier| self.arena(tier))
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
        let mut transient = self.sections.iter().flat_map(|section| &section.buffers);
        let activations = if transient.any(|placed| placed.live_range == LiveRange::FromPrevious) {
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
