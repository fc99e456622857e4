//! Zero-copy gathers: a flat's shards are mapped contiguously after the arena of every rank.
//!
//! A shard is a whole number of 2,048-element blocks, so it starts and ends on a 4 KiB page in every dtype, and the
//! shards of all ranks can be mapped next to each other. The mappings are addresses and take no memory; an all-gather
//! is then only a barrier.

use std::collections::BTreeMap;

use super::buffer_analysis::BufferAnalysis;
use crate::{BufferId, LiveRange, PlacedBuffer, Program, Section};

/// The alignment of the first view: a multiple of every page size.
pub(crate) const VIEW: u64 = 64 << 10;

/// The mapped flats and their offsets.
pub(crate) struct Views {
    offsets: BTreeMap<usize, u64>,
    /// Bytes of address space.
    pub(crate) bytes: u64,
}

impl Views {
    pub(crate) fn new(program: &Program) -> Self {
        let mut views = Self { offsets: BTreeMap::new(), bytes: 0 };
        for flat in (0..program.layout.flats.len()).filter(|flat| program.is_viewed(*flat)) {
            views.offsets.insert(flat, views.bytes);
            views.bytes += program.layout.flats[flat].bytes();
        }
        views
    }

    /// The offset of a gathered flat's view, relative to the first view.
    pub(crate) fn offset(&self, id: BufferId) -> Option<u64> {
        match id {
            BufferId::Gathered { flat, .. } => self.offsets.get(&flat).copied(),
            _ => None,
        }
    }

    /// The views that a section reads, the first of which is at `at`.
    pub(crate) fn seen(
        &self,
        source: &BufferAnalysis<'_>,
        section: &Section,
        scratch: &[u64],
        at: u64,
    ) -> Vec<PlacedBuffer> {
        let mut accessed_by: BTreeMap<BufferId, Vec<usize>> = BTreeMap::new();
        for (at, instruction) in section.instructions.iter().enumerate() {
            for (id, _) in instruction.operands.accesses().filter(|(id, _)| self.offset(*id).is_some()) {
                accessed_by.entry(id).or_default().push(at);
            }
        }
        let placed = |(id, accessed_by): (BufferId, Vec<usize>)| PlacedBuffer {
            buffer: source.transient(section, id, scratch),
            at: at + self.offset(id).unwrap_or(0),
            lifetime: accessed_by[0]..=accessed_by[accessed_by.len() - 1],
            accessed_by,
            live_range: LiveRange::Mapped,
        };
        accessed_by.into_iter().map(placed).collect()
    }
}
