//! Lowering of sub-group loads and stores: optimizer states streamed through the device.

use zeroth_base::DType;
use zeroth_kernel::{Kernel, Moment};

use super::flats::{copy, within};
use super::{At, Span};
use crate::sub_group::SubGroupLayout;
use crate::{BufferId, Chunk};

/// A part of a sub-group: its spans on the device and in host memory, and its dtype.
struct Part {
    here: Span,
    there: Span,
    dtype: DType,
}

impl At<'_> {
    /// The sub-group buffer that this instruction accesses, and its layout.
    pub(super) fn tile(&self, chunk: &Chunk) -> Option<(BufferId, SubGroupLayout)> {
        let found = self.operands().find_map(|id| matches!(id, BufferId::SubGroup(_)).then_some(id));
        let parts = SubGroupLayout::of(self.program(), chunk.flat, chunk.range.end - chunk.range.start);
        found.map(|id| (id, parts))
    }

    /// A sub-group's states, after its gradient where that is in host memory and asked for.
    fn parts_of_tile(&self, chunk: &Chunk, with_gradient: bool) -> Vec<Part> {
        let (program, flat) = (self.program(), chunk.flat);
        let updated = program.update_range(flat, self.binding.rank);
        let range = within(&updated, &chunk.range);
        let count = range.end - range.start;
        if count == 0 {
            return Vec::new();
        }
        let (tile, parts) = self.tile(chunk).expect("states that pass through have a tile");
        let here = |at: u64, dtype: DType| self.part(tile, at, count * dtype.bytes(), 1);
        let state = |at: u64, id: BufferId, dtype: DType| Part {
            here: here(at, dtype),
            there: self.part(id, range.start - updated.start, count, dtype.bytes()),
            dtype,
        };
        let gradient = parts.gradient.filter(|_| with_gradient).map(|at| {
            let (there, dtype) = self.summed(flat, &range);
            Part { here: here(at, dtype), there, dtype }
        });
        // Without master weights, the parameters take their place.
        let master = if program.has_master(flat) { BufferId::Master(flat) } else { BufferId::Weights(flat) };
        let mut all: Vec<Part> =
            gradient.into_iter().chain([state(parts.master, master, DType::F32)]).collect();
        for (moment, at) in Moment::ALL.into_iter().zip(parts.moments) {
            all.extend(at.map(|at| state(at, BufferId::Moment(moment, flat), program.moment_dtype)));
        }
        all
    }

    pub(super) fn load(&self, chunk: &Chunk) -> Vec<Kernel> {
        let parts = self.parts_of_tile(chunk, true);
        parts.into_iter().map(|part| copy(part.there, part.here, part.dtype)).collect()
    }

    pub(super) fn store(&self, chunk: &Chunk) -> Vec<Kernel> {
        let states = self.parts_of_tile(chunk, false);
        states.into_iter().map(|part| copy(part.here, part.there, part.dtype)).collect()
    }
}
