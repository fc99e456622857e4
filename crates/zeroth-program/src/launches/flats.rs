//! Lowering of flat instructions: gradient casts, reductions, norms, optimizer steps and gathers.

use std::ops::Range;

use zeroth_base::{Axis, DType};
use zeroth_graph::ParamId;
use zeroth_kernel::ExactSum;
use zeroth_kernel::{Kernel, Rounding};

use super::{At, Collective, Span};
use crate::{Accumulate, Action, BufferId, Chunk, GradientStorage, Layout, Storage};

impl At<'_> {
    /// The part of a chunk at a position, as a range of the flat.
    fn at_position(&self, chunk: &Chunk, position: u64) -> Range<u64> {
        let shard = self.program().layout.flats[chunk.flat].shard(position, self.program().layout.ranks());
        within(&shard, &chunk.range)
    }

    /// This rank's part of a chunk, as a range of the flat.
    fn owned(&self, chunk: &Chunk) -> Range<u64> {
        self.at_position(chunk, self.program().layout.world.position(self.binding.rank))
    }

    /// The parts of a chunk in the order of the flat.
    fn all_parts(&self, chunk: &Chunk) -> impl Iterator<Item = Range<u64>> {
        (0..self.program().layout.ranks()).map(|position| self.at_position(chunk, position))
    }

    /// This rank's number along an axis.
    fn number(&self, axis: Axis) -> usize {
        self.program().layout.world.number(axis, self.binding.rank) as usize
    }

    /// What each rank along an axis holds of a flat.
    fn extents(&self, flat: usize, axis: Axis) -> Vec<Range<u64>> {
        let Layout { world, flats, .. } = &self.program().layout;
        let (laid, place) = (&flats[flat], world.place(self.binding.rank));
        (0..world.along(axis)).map(|number| laid.extent(axis, place, number, *world)).collect()
    }

    /// Elements of a chunk that each rank along an axis gets: of a group, the parts of its rail.
    fn chunk_parts(&self, chunk: &Chunk, axis: Axis) -> Vec<u64> {
        let (program, world) = (self.program(), self.program().layout.world);
        let place = world.place(self.binding.rank);
        (0..world.along(axis)).map(|number| program.part_of_chunk(chunk, axis, place, number)).collect()
    }

    /// As [`Self::chunk_parts`], in bytes of what a reduction along the axis adds up.
    fn chunk_counts(&self, chunk: &Chunk, axis: Axis) -> Vec<usize> {
        let size = self.program().summand_type(axis).bytes();
        self.chunk_parts(chunk, axis).into_iter().map(|count| (count * size) as usize).collect()
    }

    /// The first element of a chunk's sums of the group in their buffer.
    fn first_partial_sum(&self, id: BufferId, chunk: &Chunk) -> u64 {
        match id {
            BufferId::PartialGrad(_) => self.program().layout.world.groups() * chunk.range.start,
            _ => 0,
        }
    }

    /// Casts the f32 parts of a flat's gradient and checks the others for non-finite values.
    pub(super) fn cast_rest(&self, flat: usize) -> Vec<Kernel> {
        let (program, kind) = (self.program(), self.section.kind);
        let (to_type, rounded) = (program.types.communication, self.destination());
        let of_rounded = |elements: &Range<u64>| {
            self.part(rounded, elements.start, elements.end - elements.start, to_type.bytes())
        };
        let convert = |(first, elements): (u64, Range<u64>)| Kernel::Convert {
            from: self.part(self.source_buffer(), first, elements.end - elements.start, 4),
            from_type: DType::F32,
            to: of_rounded(&elements),
            to_type,
            found_inf: Some(self.found_inf(flat)),
        };
        let look = |elements: Range<u64>| Kernel::CheckFinite {
            values: of_rounded(&elements),
            value_type: to_type,
            found_inf: self.found_inf(flat),
        };
        let converted = program.uncast(kind, flat).into_iter().map(convert);
        converted.chain(program.unchecked(kind, flat).into_iter().map(look)).collect()
    }

    /// Packs the parts of a chunk contiguously.
    pub(super) fn pack(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (dtype, to) = (self.program().types.communication, self.destination());
        let mut at = 0;
        let part = |owned: Range<u64>| {
            let count = owned.end - owned.start;
            let first = at;
            at += count;
            let from = self.part(self.source_buffer(), owned.start, count, dtype.bytes());
            (count > 0).then(|| copy(from, self.part(to, first, count, dtype.bytes()), dtype))
        };
        self.all_parts(chunk).filter_map(part).collect()
    }

    pub(super) fn round(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (to_type, to) = (self.program().types.communication, self.destination());
        let mut at = 0;
        let convert = |owned: Range<u64>| {
            let count = owned.end - owned.start;
            let first = at;
            at += count;
            (count > 0).then(|| Kernel::Convert {
                from: self.part(self.source_buffer(), owned.start, count, 4),
                from_type: DType::F32,
                to: self.part(to, first, count, to_type.bytes()),
                to_type,
                found_inf: Some(self.found_inf(chunk.flat)),
            })
        };
        self.all_parts(chunk).filter_map(convert).collect()
    }

    pub(super) fn add(&self, chunk: &Chunk, addition: Accumulate, axis: Axis) -> Vec<Kernel> {
        let (program, parts) = (self.program(), self.chunk_parts(chunk, axis));
        let (count, from_type) = (parts[self.number(axis)], program.summand_type(axis));
        if count == 0 {
            return Vec::new();
        }
        let Sums { to, to_type, add } = self.sums(chunk, addition, axis);
        let (mut kernels, parts) = self.parts(chunk, &parts, axis);
        let ranks = program.layout.world.along(axis) as usize;
        kernels.push(Kernel::SumRanks { ranks, parts, from_type, to, to_type, add });
        kernels
    }

    /// The destination of this rank's part of a chunk that is reduced along an axis.
    fn sums(&self, chunk: &Chunk, addition: Accumulate, axis: Axis) -> Sums {
        let program = self.program();
        if program.sums_partially(axis) {
            let (id, to_type) = (self.destination(), program.partial_sum_type());
            let count = self.chunk_parts(chunk, axis)[self.number(axis)];
            // A rank with an empty part may end before the chunk begins.
            let first = if count > 0 { self.first_partial_sum(id, chunk) } else { 0 };
            let to = self.part(id, first, count, to_type.bytes());
            return Sums { to, to_type, add: addition == Accumulate::Add };
        }
        let owned = self.owned(chunk);
        let count = owned.end - owned.start;
        let kept = program.grad_accum_dtype;
        let (to, to_type) = match self.destination() {
            id @ BufferId::Grad(_) => (self.part(id, owned.start, count, 4), DType::F32),
            id @ BufferId::ReducedGrad(_) if count > 0 => {
                (self.part(id, chunk.range.start, count, kept.bytes()), kept)
            }
            id @ BufferId::ReducedGrad(_) => (self.part(id, 0, count, kept.bytes()), kept),
            id => {
                let dtype = program.summed_type(addition);
                (self.part(id, 0, count, dtype.bytes()), dtype)
            }
        };
        // A chunk on its way to host memory is added there.
        let add = addition == Accumulate::Add && !program.residency[chunk.flat].gradients.is_offloaded();
        Sums { to, to_type, add }
    }

    /// The received parts of this rank's share of a chunk, contiguous; without reduce-scatter they are first sliced out
    /// of everything received. `parts` has the elements of each rank along the axis.
    fn parts(&self, chunk: &Chunk, parts: &[u64], axis: Axis) -> (Vec<Kernel>, Span) {
        let program = self.program();
        let (ranks, dtype, from) = (parts.len() as u64, program.summand_type(axis), self.source_buffer());
        let (number, size) = (self.number(axis), dtype.bytes());
        let count = parts[number];
        if let (BufferId::CommGrad(_), 1) = (from, ranks) {
            return (Vec::new(), self.part(from, chunk.range.start, count, size));
        }
        if program.reduce_scatter || ranks == 1 {
            return (Vec::new(), self.part(from, 0, ranks * count, size));
        }
        let (all, before): (u64, u64) = (parts.iter().sum(), parts[..number].iter().sum());
        let slices = self.reserve(ranks * count * size);
        let slice = |rank: u64| {
            let from = self.part(from, rank * all + before, count, size);
            copy(from, slices.part(rank * count, count, size), dtype)
        };
        ((0..ranks).map(slice).collect(), slices)
    }

    /// The reduced gradient over a range of the flat, and its dtype.
    pub(super) fn summed(&self, flat: usize, range: &Range<u64>) -> (Span, DType) {
        let (id, dtype, first) = self.program().reduced_gradient(flat, self.binding.rank);
        (self.part(id, range.start - first, range.end - range.start, dtype.bytes()), dtype)
    }

    pub(super) fn offload_gradient(&self, chunk: &Chunk, addition: Accumulate) -> Vec<Kernel> {
        let program = self.program();
        if program.gradient_storage() == GradientStorage::FlatComm {
            let (count, dtype) = (chunk.range.end, program.types.communication);
            let from = self.part(self.source_buffer(), 0, count, dtype.bytes());
            return vec![copy(from, self.part(self.destination(), 0, count, dtype.bytes()), dtype)];
        }
        let owned = self.owned(chunk);
        let count = owned.end - owned.start;
        if count == 0 {
            return Vec::new();
        }
        let (from, from_type) = if program.gradient_storage() == GradientStorage::FlatF32 {
            (self.part(self.source_buffer(), owned.start, count, 4), DType::F32)
        } else {
            let dtype = program.summed_type(addition);
            (self.part(self.source_buffer(), 0, count, dtype.bytes()), dtype)
        };
        let (_, to_type, _) = program.reduced_gradient(chunk.flat, self.binding.rank);
        let to = self.part(self.destination(), chunk.range.start, count, to_type.bytes());
        vec![match addition {
            Accumulate::Overwrite => Kernel::Convert { from, from_type, to, to_type, found_inf: None },
            Accumulate::Add => Kernel::SumRanks { ranks: 1, parts: from, from_type, to, to_type, add: true },
        }]
    }

    pub(super) fn stage(&self, chunk: &Chunk) -> Vec<Kernel> {
        let flat = chunk.flat;
        let held = within(&self.program().held_range(flat, self.binding.rank), &chunk.range);
        let count = held.end - held.start;
        let from = |count| self.kept(self.source_buffer(), flat, chunk.range.start, count);
        let to = |count| self.kept(self.destination(), flat, 0, count);
        let dtype = self.storage(flat).copied_as();
        if count > 0 { vec![copy(from(count), to(count), dtype)] } else { Vec::new() }
    }

    pub(super) fn upload_shard(&self, chunk: &Chunk) -> Vec<Kernel> {
        let flat = chunk.flat;
        let held = within(&self.program().held_range(flat, self.binding.rank), &chunk.range);
        let count = held.end - held.start;
        if count == 0 {
            return Vec::new();
        }
        // A staging buffer holds the piece alone.
        let from = self.source_buffer();
        let first = if matches!(from, BufferId::StagedShard(_)) { 0 } else { chunk.range.start };
        let to = self.kept(self.destination(), flat, held.start, count);
        vec![copy(self.kept(from, flat, first, count), to, self.storage(flat).copied_as())]
    }

    /// A parameter in the compute dtype.
    pub(super) fn unpack(&self, param: ParamId) -> Kernel {
        let (flat, slot) = self.program().layout.place(param);
        let records = self.kept(self.source_buffer(), flat, slot.start, slot.elements);
        let size = self.program().types.compute.bytes();
        Kernel::Unpack { records, y: self.part(self.destination(), 0, slot.elements, size) }
    }

    pub(super) fn write_back(&self, chunk: &Chunk) -> Vec<Kernel> {
        let program = self.program();
        let updated = program.update_range(chunk.flat, self.binding.rank);
        let count = (updated.end - updated.start).min(chunk.range.end).saturating_sub(chunk.range.start);
        if count == 0 {
            return Vec::new();
        }
        let (flat, dtype) = (chunk.flat, self.storage(chunk.flat).copied_as());
        let first = updated.start - program.held_range(flat, self.binding.rank).start;
        let to = self.kept(self.destination(), flat, first + chunk.range.start, count);
        vec![copy(self.kept(self.source_buffer(), flat, 0, count), to, dtype)]
    }

    /// The flag in this rank's report that marks a non-finite gradient of a flat.
    pub(super) fn found_inf(&self, flat: usize) -> Span {
        let at = self.program().report().flag(flat);
        self.part(BufferId::Report, at as u64, 8, 1)
    }

    /// The exact sum of squares of a flat in this rank's report.
    fn exact_sum(&self, flat: usize) -> Span {
        let report = self.program().report();
        let at = report.sum(flat);
        let all = self.part(BufferId::Report, 0, report.bytes() as u64, 1);
        all.part(at as u64, size_of::<ExactSum>() as u64, 1)
    }

    pub(super) fn squares(&self, flat: usize) -> Vec<Kernel> {
        let program = self.program();
        // Even at stage 0 each rank counts only its own shard; the reports carry the others' sums.
        let shard = program.layout.shard(flat, self.binding.rank);
        let sum = self.exact_sum(flat);
        if shard.is_empty() {
            return vec![Kernel::Zero { to: sum }];
        }
        let (values, value_type) = match self.source_buffer() {
            id @ BufferId::CommGrad(_) => {
                let dtype = program.types.communication;
                (self.part(id, shard.start, shard.end - shard.start, dtype.bytes()), dtype)
            }
            _ => self.summed(flat, &shard),
        };
        vec![Kernel::Squares { values, value_type, sum }]
    }

    pub(super) fn control(&self) -> Kernel {
        let (ranks, layout) = (self.program().layout.ranks(), self.program().report());
        let [recipe, input, reports] = self.operands().reads[..] else {
            unreachable!("control reads the recipe, the step's input and the reports")
        };
        Kernel::Control {
            ranks: ranks as usize,
            layout,
            recipe: self.whole(recipe, size_of::<zeroth_kernel::Recipe>() as u64),
            input: self.whole(input, size_of::<zeroth_kernel::StepInput>() as u64),
            reports: self.whole(reports, ranks * layout.bytes() as u64),
            control: self.whole(BufferId::Control, size_of::<zeroth_kernel::Control>() as u64),
            record: self.whole(BufferId::Record, layout.record_bytes() as u64),
        }
    }

    /// The optimizer over a sub-group of this rank's part of a flat, one launch per run of parameters with equal weight
    /// decay.
    pub(super) fn update(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (program, flat) = (self.program(), chunk.flat);
        let updated = program.update_range(flat, self.binding.rank);
        let tile = within(&updated, &chunk.range);
        let laid = &program.layout.flats[flat];
        // (parameter group, range of the flat): slots are contiguous, padding belongs to the slot before it.
        let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
        for (slot, whole) in laid.padded_slots() {
            let range = whole.start.max(tile.start)..whole.end.min(tile.end);
            let group = usize::from(!(self.binding.decayed)(slot.param));
            match runs.last_mut() {
                _ if range.is_empty() => {}
                Some((last, before)) if *last == group => before.end = range.end,
                _ => runs.push((group, range)),
            }
        }
        runs.into_iter().map(|(group, range)| self.optimize(chunk, &updated, &tile, group, &range)).collect()
    }

    fn optimize(
        &self,
        chunk: &Chunk,
        updated: &Range<u64>,
        tile: &Range<u64>,
        group: usize,
        range: &Range<u64>,
    ) -> Kernel {
        let (program, flat, count) = (self.program(), chunk.flat, range.end - range.start);
        // Streamed states are parts of the sub-group's buffer.
        let tile_parts = self.tile(chunk);
        let in_tile = |at: u64, size: u64| {
            let (id, _) = tile_parts.expect("states that pass through have a tile");
            self.part(id, 0, at + (range.end - tile.start) * size, 1).part(
                at + (range.start - tile.start) * size,
                count * size,
                1,
            )
        };
        let (grads, grad_type) = match tile_parts.and_then(|(_, parts)| parts.gradient) {
            Some(at) => {
                let (_, dtype, _) = program.reduced_gradient(flat, self.binding.rank);
                (in_tile(at, dtype.bytes()), dtype)
            }
            None => self.summed(flat, range),
        };
        let state = |id, size| match (tile_parts, id) {
            (None, id) => self.part(id, range.start - updated.start, count, size),
            (Some((_, parts)), BufferId::Moment(moment, _)) => in_tile(
                parts.moments[moment as usize].expect("the layout has every moment of the optimizer"),
                size,
            ),
            (Some((_, parts)), _) => in_tile(parts.master, size),
        };
        let weights = self.operands().writes.iter().find_map(|&id| {
            let first = match id {
                BufferId::UpdatedWeights(_) => tile.start,
                BufferId::Weights(_) => program.held_range(flat, self.binding.rank).start,
                _ => return None,
            };
            Some(self.kept(id, flat, range.start - first, count))
        });
        let moment = |moment| state(BufferId::Moment(moment, flat), program.moment_dtype.bytes());
        let rounds = program.moment_dtype != DType::F32 && program.stochastic_rounding;
        let (has_master, master_form) = (program.has_master(flat), program.master_form(flat));
        Kernel::Optimize {
            optimizer: program.optimizer,
            group,
            control: self.whole(BufferId::Control, size_of::<zeroth_kernel::Control>() as u64),
            grads,
            grad_type,
            master: if has_master || tile_parts.is_some() {
                state(BufferId::Master(flat), master_form.bytes())
            } else {
                weights.expect("without master weights the parameters are updated in place")
            },
            master_form,
            moments: program.optimizer.each_moment(moment),
            moment_type: program.moment_dtype,
            rounding: rounds.then_some(Rounding {
                seed: self.binding.seed,
                flat: flat as u32,
                first: range.start,
            }),
            weights: weights.filter(|_| has_master),
        }
    }

    /// A collective whose parts are in place, in a buffer of what lies in `all` of a flat. Parts are in the order of the flat.
    fn in_place(&self, buffer: Span, storage: Storage, all: &Range<u64>, parts: &[Range<u64>]) -> Collective {
        let bytes = |elements: u64| storage.bytes(elements) as usize;
        let (mut buffer, mut first) = (buffer, all.start);
        if let ([start, .., end], true) = (parts, self.program().layout.world.has_two_levels()) {
            // Along one axis only a part of the buffer is concerned.
            first = start.start;
            let [at, count] = [first - all.start, end.end - first].map(|elements| storage.bytes(elements));
            buffer = buffer.part(at, count, 1);
        }
        Collective::InPlace {
            buffer,
            starts: parts.iter().map(|part| bytes(part.start - first)).collect(),
            counts: parts.iter().map(|part| bytes(part.end - part.start)).collect(),
        }
    }

    /// All of a flat's parameters in a buffer.
    fn whole_flat(&self, id: BufferId, flat: usize) -> (Span, Range<u64>) {
        let laid = &self.program().layout.flats[flat];
        (self.whole(id, laid.bytes()), 0..laid.padded())
    }

    fn all_gather(&self, flat: usize, axis: Axis) -> Collective {
        let (program, storage) = (self.program(), self.storage(flat));
        let (extents, is_in_groups) = (self.extents(flat, axis), program.is_sharded_in_groups(flat));
        let (buffer, all) = self.whole_flat(self.destination(), flat);
        let is_second = axis == Axis::Group && program.layout.world.has_two_levels() && !is_in_groups;
        // This rank's part is already in place.
        if is_second || program.residency[flat].weights.is_offloaded() {
            return self.in_place(buffer, storage, &all, &extents);
        }
        let counts: Vec<usize> =
            extents.iter().map(|part| storage.bytes(part.end - part.start) as usize).collect();
        let (own, sum) = (counts[self.number(axis)] as u64, counts.iter().sum::<usize>() as u64);
        let recv = buffer.part(storage.bytes(extents[0].start), sum, 1);
        Collective::AllGather { send: self.whole(self.source_buffer(), own), recv, counts }
    }

    fn all_to_all(&self, chunk: &Chunk, axis: Axis) -> Collective {
        let counts = self.chunk_counts(chunk, axis);
        let all = counts.iter().sum::<usize>() as u64;
        let (from, size) = (self.source_buffer(), self.program().summand_type(axis).bytes());
        let first = if all > 0 { self.first_partial_sum(from, chunk) } else { 0 };
        let send = self.part(from, first, all / size, size);
        let receive = |bytes: u64| self.whole(self.destination(), bytes);
        if !self.program().reduce_scatter {
            let recv = receive(counts.len() as u64 * all);
            return Collective::AllGather { send, recv, counts: vec![all as usize; counts.len()] };
        }
        let own = (counts.len() * counts[self.number(axis)]) as u64;
        Collective::AllToAll { send, recv: receive(own), counts }
    }

    fn reduce_scatter(&self, chunk: &Chunk, addition: Accumulate, axis: Axis) -> Collective {
        let program = self.program();
        let (counts, from_type) = (self.chunk_counts(chunk, axis), program.summand_type(axis));
        let from = self.source_buffer();
        let (send, starts) = if let BufferId::CommGrad(flat) = from {
            let parts = self.extents(flat, axis).into_iter().map(|extent| within(&extent, &chunk.range));
            let all = program.layout.flats[flat].padded() * from_type.bytes();
            (self.whole(from, all), parts.map(|part| (part.start * from_type.bytes()) as usize).collect())
        } else {
            (self.whole(from, counts.iter().sum::<usize>() as u64), starts_of(&counts))
        };
        let Sums { to, to_type, add } = self.sums(chunk, addition, axis);
        let is_last = program.completes(self.section.kind, chunk.flat, addition);
        let squares = is_last.then(|| self.exact_sum(chunk.flat));
        Collective::Reduce { send, starts, counts, from_type, to, to_type, add, squares }
    }

    fn all_gather_reports(&self, axis: Axis) -> Collective {
        let (world, bytes) = (self.program().layout.world, self.program().report().bytes());
        let buffer = self.whole(self.destination(), world.ranks * bytes as u64);
        if axis == Axis::Rail && world.has_two_levels() {
            // Of all groups, in rank order.
            let of_group = world.group as usize * bytes;
            let starts = (0..world.groups() as usize).map(|group| group * of_group).collect();
            return Collective::InPlace { buffer, starts, counts: vec![of_group; world.groups() as usize] };
        }
        let (ranks, bytes) = (world.along(axis), bytes as u64);
        let first = if axis == Axis::Group { world.group_of(self.binding.rank) * world.group } else { 0 };
        Collective::AllGather {
            send: self.whole(self.source_buffer(), bytes),
            recv: buffer.part(first * bytes, ranks * bytes, 1),
            counts: vec![bytes as usize; ranks as usize],
        }
    }

    pub(super) fn collective(&self) -> Collective {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::AllGather(flat, axis) => self.all_gather(*flat, *axis),
            Action::AllGatherWeights(Chunk { flat, range }, axis) => {
                let (storage, held) = (self.storage(*flat), program.held_range(*flat, self.binding.rank));
                let parts = self.extents(*flat, *axis).into_iter().map(|extent| within(&extent, range));
                let buffer = self.whole(self.destination(), storage.bytes(held.end - held.start));
                self.in_place(buffer, storage, &held, &parts.collect::<Vec<_>>())
            }
            Action::BroadcastWeights { flat, root, axis } => {
                let extent = self.extents(*flat, *axis).swap_remove(*root);
                let (first, count) = (
                    extent.start - program.held_range(*flat, self.binding.rank).start,
                    extent.end - extent.start,
                );
                Collective::Broadcast {
                    root: *root,
                    buffer: self.kept(self.destination(), *flat, first, count),
                }
            }
            Action::AllGatherGrad(flat, axis) => {
                let storage = Storage::Dense(DType::F32);
                let all = 0..program.layout.flats[*flat].padded();
                let buffer = self.whole(self.destination(), storage.bytes(all.end));
                self.in_place(buffer, storage, &all, &self.extents(*flat, *axis))
            }
            Action::AllToAll(chunk, axis) => self.all_to_all(chunk, *axis),
            Action::ReduceScatter(chunk, addition, axis) => self.reduce_scatter(chunk, *addition, *axis),
            Action::AllGatherReports(axis) => self.all_gather_reports(*axis),
            other => unreachable!("{other:?} is no collective"),
        }
    }
}

/// A range within another, as far as that reaches.
pub(super) fn within(whole: &Range<u64>, range: &Range<u64>) -> Range<u64> {
    let at = |place: u64| (whole.start + place).min(whole.end);
    at(range.start)..at(range.end)
}

/// The destination of a reduction, its dtype, and whether it accumulates.
struct Sums {
    to: Span,
    to_type: DType,
    add: bool,
}

/// Offsets of contiguous parts.
fn starts_of(counts: &[usize]) -> Vec<usize> {
    (0..counts.len()).map(|rank| counts[..rank].iter().sum()).collect()
}

/// A copy without conversion.
pub(super) fn copy(from: Span, to: Span, dtype: DType) -> Kernel {
    Kernel::Convert { from, from_type: dtype, to, to_type: dtype, found_inf: None }
}
