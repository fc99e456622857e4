//! Bytes that a rank sends in one optimizer step, and that cross between hosts, counted from the program's collectives.

use std::ops::Range;

use zeroth_base::{Axis, DType};

use super::{Action, Chunk, Flat, Program, Section};
use crate::launches::within;

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
        let flat = |flat: usize| &self.layout.flats[flat];
        match action {
            Action::AllToAll(chunk, _) | Action::ReduceScatter(chunk, ..) => {
                let all = match axis {
                    Axis::Group => all_parts(flat(chunk.flat), world.ranks, &chunk.range),
                    Axis::Rail => (0..ranks).map(|to| self.part_of_chunk(chunk, axis, 0, to)).sum(),
                };
                let sent = if self.reduce_scatter {
                    all - self.part_of_chunk(chunk, axis, 0, 0)
                } else {
                    peers * all
                };
                sent * communication
            }
            // What it gives is the same for every receiver.
            action => peers * self.bytes_moved(action, axis, 0, 0),
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
            let sender = |number: u64| match axis {
                Axis::Group => world.group_of(to) * world.group + number,
                Axis::Rail => number * world.group + world.place(to),
            };
            let others = (0..world.along(axis)).filter(|number| sender(*number) >= ranks_per_host);
            others.map(|number| self.bytes_moved(action, axis, number, to)).sum::<u64>()
        };
        (0..ranks_per_host.min(world.ranks)).map(of_receiver).sum()
    }

    /// Bytes that a rank receives in a collective from the one with number `from` along its axis.
    fn bytes_moved(&self, action: &Action, axis: Axis, from: u64, to: u64) -> u64 {
        let world = self.layout.world;
        let extent = |flat: usize| self.layout.flats[flat].extent(axis, world.place(to), from, world);
        let bytes =
            |flat: usize, range: Range<u64>| self.layout.flats[flat].storage.bytes(range.end - range.start);
        match action {
            Action::AllGather(flat, _) => bytes(*flat, extent(*flat)),
            Action::BroadcastWeights { flat, root, .. } if *root as u64 == from => {
                bytes(*flat, extent(*flat))
            }
            Action::AllGatherWeights(Chunk { flat, range }, _) => bytes(*flat, within(&extent(*flat), range)),
            Action::AllGatherGrad(flat, _) => {
                let extent = extent(*flat);
                (extent.end - extent.start) * DType::F32.bytes()
            }
            Action::AllToAll(chunk, _) | Action::ReduceScatter(chunk, ..) => {
                let of = |number: u64| self.part_of_chunk(chunk, axis, world.place(to), number);
                let moved = if self.reduce_scatter {
                    of(world.number(axis, to))
                } else {
                    (0..world.along(axis)).map(of).sum()
                };
                moved * self.summand_type(axis).bytes()
            }
            Action::AllGatherReports(_) => {
                let reports = if axis == Axis::Rail { world.group } else { 1 };
                reports * self.report().bytes() as u64
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
        let (flat, world) = (&self.layout.flats[chunk.flat], self.layout.world);
        let groups = world.groups();
        let count = |position: u64| {
            let part = within(&flat.shard(position, world.ranks), &chunk.range);
            part.end - part.start
        };
        match axis {
            Axis::Group => (number * groups..(number + 1) * groups).map(count).sum(),
            Axis::Rail => count(place * groups + number),
        }
    }
}

/// Elements of a chunk in a shard of `elements` elements.
fn part(elements: u64, range: &Range<u64>) -> u64 {
    range.end.min(elements) - range.start.min(elements)
}

/// Elements of a chunk in the shards of all ranks: whole shards, a shorter one, and empty ones.
fn all_parts(flat: &Flat, ranks: u64, range: &Range<u64>) -> u64 {
    let (shard, padded) = (flat.shard_capacity(ranks), flat.padded());
    padded / shard * part(shard, range) + part(padded % shard, range)
}
