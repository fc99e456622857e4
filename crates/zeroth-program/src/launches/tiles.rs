//! Copies of states that pass through the device for their update, a tile at a time.

use zeroth_base::DType;
use zeroth_kernel::Kernel;

use super::super::tile::TileParts;
use super::super::{Chunk, Content};
use super::flats::copy;
use super::{At, Span};

/// One part of a tile: where it is on the device, where it lives, and its type.
struct Part {
    here: Span,
    there: Span,
    dtype: DType,
}

impl At<'_> {
    /// The tile that this instruction touches, and where its parts are.
    pub(super) fn tile(&self, chunk: &Chunk) -> Option<(Content, TileParts)> {
        let found = self.touched.iter().find(|(content, _)| matches!(content, Content::Tile(_)));
        let parts = TileParts::of(self.program(), chunk.flat, chunk.range.end - chunk.range.start);
        found.map(|(content, _)| (*content, parts))
    }

    /// The gradient of a tile, where it is not on the device anyway, and its states.
    fn parts_of_tile(&self, chunk: &Chunk) -> (Option<Part>, Vec<Part>) {
        let (program, flat) = (self.program(), chunk.flat);
        let updated = program.updated(flat, self.binding.rank);
        let within = |place: u64| (updated.start + place).min(updated.end);
        let range = within(chunk.range.start)..within(chunk.range.end);
        let count = range.end - range.start;
        if count == 0 {
            return (None, Vec::new());
        }
        let (tile, parts) = self.tile(chunk).expect("states that pass through have a tile");
        let here = |at: u64, dtype: DType| self.part(tile, at, count * dtype.bytes(), 1);
        let state = |at: u64, content: Content, dtype: DType| Part {
            here: here(at, dtype),
            there: self.part(content, range.start - updated.start, count, dtype.bytes()),
            dtype,
        };
        let gradient = parts.gradient.map(|at| {
            let (there, dtype) = self.summed(flat, &range);
            Part { here: here(at, dtype), there, dtype }
        });
        // Parameters that are their own master weights live where these would.
        let master = if program.has_master(flat) { Content::Master(flat) } else { Content::Weights(flat) };
        let mut states = vec![state(parts.master, master, DType::F32)];
        states.extend(parts.first.map(|at| state(at, Content::First(flat), program.moments)));
        states.extend(parts.second.map(|at| state(at, Content::Second(flat), program.moments)));
        (gradient, states)
    }

    pub(super) fn load(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (gradient, states) = self.parts_of_tile(chunk);
        gradient.into_iter().chain(states).map(|part| copy(part.there, part.here, part.dtype)).collect()
    }

    pub(super) fn store(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (_, states) = self.parts_of_tile(chunk);
        states.into_iter().map(|part| copy(part.here, part.there, part.dtype)).collect()
    }
}
