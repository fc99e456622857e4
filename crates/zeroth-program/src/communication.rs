//! Bytes that a rank sends in one optimizer step, and that cross between hosts, counted from the program's collectives.

use std::ops::Range;

use zeroth_base::{Axis, DType};

use super::{Action, Chunk, Flat, Program, Section, World};

impl Program {
    /// Bytes that rank 0 sends in one optimizer step, once for every receiver. Parameters that other ranks read through
    /// a mapping count as sent.
    pub fn bytes_sent_per_step(&self) -> u64 {
        Axis::ALL.into_iter().map(|axis| self.bytes_sent_per_step_along(axis)).sum()
    }

    /// As [`Self::bytes_sent_per_step`], to ranks along an axis.
    pub fn bytes_sent_per_step_along(&self, axis: Axis) -> u64 {
        if self.layout.ranks() == 1 {
            return 0;
        }
        self.in_one_step(|section| {
            let actions = section.instructions.iter().map(|instruction| &instruction.action);
            let along = actions.filter(|action| action.collective_axis() == Some(axis));
            along.map(|action| self.bytes_sent(action, axis)).sum()
        })
    }

    /// Bytes that the first of several hosts with `ranks_per_host` ranks each receives from the others in one optimizer step.
    pub fn bytes_between_hosts_per_step(&self, ranks_per_host: u64) -> u64 {
        self.in_one_step(|section| {
            let actions = section.instructions.iter().map(|instruction| &instruction.action);
            actions.map(|action| self.bytes_into_host(action, ranks_per_host)).sum()
        })
    }

    fn in_one_step(&self, of: impl Fn(&Section) -> u64) -> u64 {
        self.sections.iter().map(|section| of(section) * self.repetitions(section.kind)).sum()
    }

    /// Bytes that rank 0 sends along the axis of a collective.
    fn bytes_sent(&self, action: &Action, axis: Axis) -> u64 {
        let world = self.layout.world;
        let (ranks, communication) = (world.along(axis), self.summand_type(axis).bytes());
        let peers = ranks - 1;
        match action {
            Action::AllToAll(chunk, _) | Action::ReduceScatter(chunk, ..) => {
                let all = self.parts_of_chunk(chunk, axis, 0, 0..ranks);
                let sent = if self.reduce_scatter {
                    all - self.part_of_chunk(chunk, axis, 0, 0)
                } else {
                    peers * all
                };
                sent * communication
            }
            // What it gives is the same for every receiver.
            action => peers * self.bytes_moved(action, axis, 0..1, 0),
        }
    }

    /// Bytes that the ranks of host 0 receive from other hosts in a collective.
    fn bytes_into_host(&self, action: &Action, ranks_per_host: u64) -> u64 {
        let (world, Some(axis)) = (self.layout.world, action.collective_axis()) else { return 0 };
        // Groups within hosts send nothing between them.
        if axis == Axis::Group && ranks_per_host.is_multiple_of(world.group) {
            return 0;
        }
        let of_receiver = |to: u64| {
            // Hosts have consecutive ranks, so that along an axis the first numbers are those of host 0.
            let first = match axis {
                Axis::Group => ranks_per_host.saturating_sub(world.group_of(to) * world.group),
                Axis::Rail => ranks_per_host.saturating_sub(world.place(to)).div_ceil(world.group),
            };
            let ranks = world.along(axis);
            self.bytes_moved(action, axis, first.min(ranks)..ranks, to)
        };
        (0..ranks_per_host.min(world.ranks)).map(of_receiver).sum()
    }

    /// Bytes that a rank receives in a collective from those with the numbers `from` along its axis.
    fn bytes_moved(&self, action: &Action, axis: Axis, from: Range<u64>, to: u64) -> u64 {
        if from.is_empty() {
            return 0;
        }
        let (world, place, senders) = (self.layout.world, self.layout.world.place(to), from.end - from.start);
        let parts = |chunk: &Chunk| held_along(&self.layout.flats[chunk.flat], axis, place, world);
        let extents = |flat: usize| {
            let extent = |number| self.layout.flats[flat].extent(axis, place, number, world);
            extent(from.end - 1).end - extent(from.start).start
        };
        match action {
            Action::AllGather(flat, _) => self.layout.flats[*flat].storage.bytes(extents(*flat)),
            Action::BroadcastWeights { flat, root, .. } if from.contains(&(*root as u64)) => {
                let laid = &self.layout.flats[*flat];
                let extent = laid.extent(axis, place, *root as u64, world);
                laid.storage.bytes(extent.end - extent.start)
            }
            Action::AllGatherWeights(chunk, _) => {
                self.layout.flats[chunk.flat].storage.bytes(parts(chunk).of(from, &chunk.range))
            }
            Action::AllGatherGrad(flat, _) => extents(*flat) * DType::F32.bytes(),
            Action::AllToAll(chunk, _) | Action::ReduceScatter(chunk, ..) => {
                let numbers = if self.reduce_scatter {
                    let own = world.number(axis, to);
                    own..own + 1
                } else {
                    0..world.along(axis)
                };
                senders * self.parts_of_chunk(chunk, axis, place, numbers) * self.summand_type(axis).bytes()
            }
            Action::AllGatherReports(_) => {
                let reports = if axis == Axis::Rail { world.group } else { 1 };
                senders * reports * self.report().bytes() as u64
            }
            Action::BroadcastWeights { .. } => 0,
            action => {
                assert!(!action.is_collective(), "{} sends an unknown number of bytes", action.name());
                0
            }
        }
    }

    /// Elements of a chunk that the rank with this number along an axis gets of each; a rail is that of `place`.
    pub(super) fn part_of_chunk(&self, chunk: &Chunk, axis: Axis, place: u64, number: u64) -> u64 {
        self.parts_of_chunk(chunk, axis, place, number..number + 1)
    }

    /// As [`Self::part_of_chunk`], of ranks with consecutive numbers together.
    fn parts_of_chunk(&self, chunk: &Chunk, axis: Axis, place: u64, numbers: Range<u64>) -> u64 {
        let (flat, world) = (&self.layout.flats[chunk.flat], self.layout.world);
        let groups = world.groups();
        let positions = match axis {
            Axis::Group => numbers.start * groups..numbers.end * groups,
            Axis::Rail => place * groups + numbers.start..place * groups + numbers.end,
        };
        EqualParts { elements: flat.padded(), each: flat.shard_capacity(world.ranks), first: 0 }
            .of(positions, &chunk.range)
    }
}

/// What the ranks along an axis hold of a flat.
fn held_along(flat: &Flat, axis: Axis, place: u64, world: World) -> EqualParts {
    let each = match axis {
        Axis::Group => flat.group_shard_capacity(world),
        Axis::Rail => flat.shard_capacity(world.ranks),
    };
    let first = if axis == Axis::Rail { place * world.groups() } else { 0 };
    EqualParts { elements: flat.padded(), each, first }
}

/// A flat cut into parts of equal length: whole ones, a shorter one, and empty ones behind it. They are counted together,
/// so that a count takes as long for thousands of ranks as for two.
#[derive(Debug, Clone, Copy)]
struct EqualParts {
    elements: u64,
    each: u64,
    /// The part with number 0.
    first: u64,
}

impl EqualParts {
    /// Elements that lie in the same range of each of these parts.
    fn of(self, numbers: Range<u64>, range: &Range<u64>) -> u64 {
        let in_part = |elements: u64| range.end.min(elements) - range.start.min(elements);
        let (start, end) = (self.first + numbers.start, self.first + numbers.end);
        let (whole, rest) = (self.elements / self.each, self.elements % self.each);
        let shorter = if (start..end).contains(&whole) { in_part(rest) } else { 0 };
        (end.min(whole) - start.min(whole)) * in_part(self.each) + shorter
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_together_are_the_sum_of_each(
            elements in 1u64..200, each in 1u64..40, first in 0u64..9, start in 0u64..9, count in 0u64..9,
            range in (0u64..40, 0u64..40),
        ) {
            let range = range.0.min(range.1)..range.0.max(range.1);
            let edge = |part: u64| (part * each).min(elements);
            let of_part = |number: u64| {
                let length = edge(first + number + 1) - edge(first + number);
                (0..length).filter(|element| range.contains(element)).count() as u64
            };
            let all: u64 = (start..start + count).map(of_part).sum();
            prop_assert_eq!(EqualParts { elements, each, first }.of(start..start + count, &range), all);
        }
    }
}
