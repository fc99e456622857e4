//! Parameters that are read where ranks hold them: a flat's shards appear end to end behind the arena of every rank.
//!
//! A shard is whole blocks of 2,048 elements, so that it begins and ends with a page of 4 KiB in every type, and the system
//! maps the pages of all ranks beside each other. They are addresses and take no memory; a gather is a meeting, in which
//! nothing moves.

use std::collections::BTreeMap;

use super::buffers::Source;
use super::carried::Draft;
use super::{Content, Placed, Program, Reach, Section};

/// Where views begin: at a multiple of any system's page.
pub(super) const VIEW: u64 = 64 << 10;

/// The flats that are seen, and where.
pub(super) struct Views {
    offsets: BTreeMap<usize, u64>,
    /// Bytes of addresses that they take.
    pub(super) bytes: u64,
}

impl Views {
    pub(super) fn new(program: &Program) -> Self {
        let mut views = Self { offsets: BTreeMap::new(), bytes: 0 };
        for flat in (0..program.layout.flats.len()).filter(|flat| program.is_viewed(*flat)) {
            views.offsets.insert(flat, views.bytes);
            views.bytes += program.layout.flats[flat].padded() * program.types.run.bytes();
        }
        views
    }

    /// Where a content is seen, from the first view on.
    pub(super) fn offset(&self, content: Content) -> Option<u64> {
        match content {
            Content::Gathered { flat, .. } => self.offsets.get(&flat).copied(),
            _ => None,
        }
    }

    /// What a section sees, its places from `at` on.
    pub(super) fn seen(&self, source: &Source<'_>, section: &Section, draft: &Draft, at: u64) -> Vec<Placed> {
        let mut touched_by: BTreeMap<Content, Vec<usize>> = BTreeMap::new();
        for (at, touched) in draft.touches.iter().enumerate() {
            for (content, _) in touched.iter().filter(|(content, _)| self.offset(*content).is_some()) {
                touched_by.entry(*content).or_default().push(at);
            }
        }
        let placed = |(content, touched_by): (Content, Vec<usize>)| Placed {
            buffer: source.passing(section, content, &draft.scratch),
            at: at + self.offset(content).unwrap_or(0),
            life: touched_by[0]..=touched_by[touched_by.len() - 1],
            touched_by,
            reach: Reach::Seen,
        };
        touched_by.into_iter().map(placed).collect()
    }
}
