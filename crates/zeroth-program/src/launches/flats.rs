//! Lowering of flat instructions: gradient casts, reductions, norms, optimizer steps and gathers.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_graph::ParamId;
use zeroth_kernel::ExactSum;
use zeroth_kernel::{Kernel, Rounding};

use super::{At, Collective, Span};
use crate::{Accumulate, Action, BufferId, Chunk, GradientStorage, Storage};

impl At<'_> {
    /// A rank's part of a chunk, as a range of the flat.
    fn owned(&self, chunk: &Chunk, rank: u64) -> Range<u64> {
        let shard = self.program().layout.flats[chunk.flat].shard(rank, self.program().layout.ranks);
        let at = |place: u64| (shard.start + place).min(shard.end);
        at(chunk.range.start)..at(chunk.range.end)
    }

    /// Bytes of each rank's part of a chunk, in the communication dtype.
    fn chunk_counts(&self, chunk: &Chunk) -> Vec<usize> {
        let size = self.program().types.communication.bytes();
        let count = |rank: u64| {
            let owned = self.owned(chunk, rank);
            ((owned.end - owned.start) * size) as usize
        };
        (0..self.program().layout.ranks).map(count).collect()
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

    /// Packs the ranks' parts of a chunk contiguously.
    pub(super) fn pack(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (dtype, to) = (self.program().types.communication, self.destination());
        let mut at = 0;
        let part = |rank: u64| {
            let owned = self.owned(chunk, rank);
            let count = owned.end - owned.start;
            let first = at;
            at += count;
            let from = self.part(self.source_buffer(), owned.start, count, dtype.bytes());
            (count > 0).then(|| copy(from, self.part(to, first, count, dtype.bytes()), dtype))
        };
        (0..self.program().layout.ranks).filter_map(part).collect()
    }

    pub(super) fn round(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (to_type, to) = (self.program().types.communication, self.destination());
        let mut at = 0;
        let convert = |rank: u64| {
            let owned = self.owned(chunk, rank);
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
        (0..self.program().layout.ranks).filter_map(convert).collect()
    }

    pub(super) fn add(&self, chunk: &Chunk, addition: Accumulate) -> Vec<Kernel> {
        let (program, owned) = (self.program(), self.owned(chunk, self.binding.rank));
        let (count, ranks, from_type) =
            (owned.end - owned.start, program.layout.ranks, program.types.communication);
        if count == 0 {
            return Vec::new();
        }
        let Sums { to, to_type, add } = self.sums(chunk, addition);
        let (mut kernels, parts) = self.parts(chunk, count);
        kernels.push(Kernel::SumRanks { ranks: ranks as usize, parts, from_type, to, to_type, add });
        kernels
    }

    /// The destination of this rank's part of a reduced chunk.
    fn sums(&self, chunk: &Chunk, addition: Accumulate) -> Sums {
        let owned = self.owned(chunk, self.binding.rank);
        let count = owned.end - owned.start;
        let kept = self.program().grad_accum_dtype;
        let (to, to_type) = match self.destination() {
            id @ BufferId::Grad(_) => (self.part(id, owned.start, count, 4), DType::F32),
            // A rank with an empty part may end before the chunk begins.
            id @ BufferId::ReducedGrad(_) if count > 0 => {
                (self.part(id, chunk.range.start, count, kept.bytes()), kept)
            }
            id @ BufferId::ReducedGrad(_) => (self.part(id, 0, count, kept.bytes()), kept),
            id => {
                let dtype = self.program().summed_type(addition);
                (self.part(id, 0, count, dtype.bytes()), dtype)
            }
        };
        // A chunk on its way to host memory is added there.
        let add =
            addition == Accumulate::Add && !self.program().residency[chunk.flat].gradients.is_offloaded();
        Sums { to, to_type, add }
    }

    /// The received parts of this rank's share of a chunk, contiguous; without reduce-scatter they are first sliced out
    /// of everything received.
    fn parts(&self, chunk: &Chunk, count: u64) -> (Vec<Kernel>, Span) {
        let program = self.program();
        let (ranks, dtype, from) = (program.layout.ranks, program.types.communication, self.source_buffer());
        if let (BufferId::CommGrad(_), 1) = (from, ranks) {
            return (Vec::new(), self.part(from, chunk.range.start, count, dtype.bytes()));
        }
        if program.reduce_scatter || ranks == 1 {
            return (Vec::new(), self.part(from, 0, ranks * count, dtype.bytes()));
        }
        let owned: Vec<u64> =
            (0..ranks).map(|rank| self.owned(chunk, rank)).map(|range| range.end - range.start).collect();
        let (all, before): (u64, u64) =
            (owned.iter().sum(), owned[..self.binding.rank as usize].iter().sum());
        let slices = self.reserve(ranks * count * dtype.bytes());
        let slice = |rank: u64| {
            let from = self.part(from, rank * all + before, count, dtype.bytes());
            copy(from, slices.part(rank * count, count, dtype.bytes()), dtype)
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
        let owned = self.owned(chunk, self.binding.rank);
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
        let owned = self.owned(chunk, self.binding.rank);
        let (count, flat) = (owned.end - owned.start, chunk.flat);
        let from = |count| self.kept(self.source_buffer(), flat, chunk.range.start, count);
        let to = |count| self.kept(self.destination(), flat, 0, count);
        let dtype = self.storage(flat).copied_as();
        if count > 0 { vec![copy(from(count), to(count), dtype)] } else { Vec::new() }
    }

    pub(super) fn upload_shard(&self, chunk: &Chunk) -> Vec<Kernel> {
        let owned = self.owned(chunk, self.binding.rank);
        let (count, flat) = (owned.end - owned.start, chunk.flat);
        if count == 0 {
            return Vec::new();
        }
        // A staging buffer holds the piece alone.
        let from = self.source_buffer();
        let first = if matches!(from, BufferId::StagedShard(_)) { 0 } else { chunk.range.start };
        let to = self.kept(self.destination(), flat, owned.start, count);
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
        let first = if program.stays_gathered(flat) { updated.start } else { 0 };
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
        let shard = program.layout.flats[flat].shard(self.binding.rank, program.layout.ranks);
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
        let (ranks, layout) = (self.program().layout.ranks, self.program().report());
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
        let within = |place: u64| (updated.start + place).min(updated.end);
        let tile = within(chunk.range.start)..within(chunk.range.end);
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
                BufferId::Weights(_) if program.stays_gathered(flat) => 0,
                BufferId::Weights(_) => updated.start,
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

    /// Bytes of each rank's shard of a flat.
    fn shard_counts(&self, flat: usize, storage: Storage) -> Vec<usize> {
        let layout = &self.program().layout;
        let bytes = |rank: u64| {
            let shard = layout.flats[flat].shard(rank, layout.ranks);
            storage.bytes(shard.end - shard.start) as usize
        };
        (0..layout.ranks).map(bytes).collect()
    }

    pub(super) fn collective(&self) -> Collective {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::AllGather(flat) => {
                let counts = self.shard_counts(*flat, self.storage(*flat));
                let own = counts[self.binding.rank as usize] as u64;
                let all = self.whole(self.destination(), counts.iter().sum::<usize>() as u64);
                if program.residency[*flat].weights.is_offloaded() {
                    // This rank's part is already in place.
                    return Collective::InPlace { buffer: all, starts: starts_of(&counts), counts };
                }
                Collective::AllGather { send: self.whole(self.source_buffer(), own), recv: all, counts }
            }
            Action::AllGatherWeights(chunk) => {
                let storage = self.storage(chunk.flat);
                let all = self.shard_counts(chunk.flat, storage).iter().sum::<usize>() as u64;
                let bytes = |elements: u64| storage.bytes(elements) as usize;
                let owned: Vec<Range<u64>> =
                    (0..program.layout.ranks).map(|rank| self.owned(chunk, rank)).collect();
                Collective::InPlace {
                    buffer: self.whole(self.destination(), all),
                    starts: owned.iter().map(|range| bytes(range.start)).collect(),
                    counts: owned.iter().map(|range| bytes(range.end - range.start)).collect(),
                }
            }
            Action::BroadcastWeights { flat, root } => {
                let shard = program.layout.flats[*flat].shard(*root as u64, program.layout.ranks);
                let count = shard.end - shard.start;
                let buffer = self.kept(self.destination(), *flat, shard.start, count);
                Collective::Broadcast { root: *root, buffer }
            }
            Action::AllGatherGrad(flat) => {
                let counts = self.shard_counts(*flat, Storage::Dense(DType::F32));
                let all = counts.iter().sum::<usize>() as u64;
                let starts = starts_of(&counts);
                Collective::InPlace { buffer: self.whole(self.destination(), all), starts, counts }
            }
            Action::AllToAll(chunk) => {
                let counts = self.chunk_counts(chunk);
                let all = counts.iter().sum::<usize>() as u64;
                if !program.reduce_scatter {
                    return Collective::AllGather {
                        send: self.whole(self.source_buffer(), all),
                        recv: self.whole(self.destination(), counts.len() as u64 * all),
                        counts: vec![all as usize; counts.len()],
                    };
                }
                let own = (counts.len() * counts[self.binding.rank as usize]) as u64;
                Collective::AllToAll {
                    send: self.whole(self.source_buffer(), all),
                    recv: self.whole(self.destination(), own),
                    counts,
                }
            }
            Action::ReduceScatter(chunk, addition) => {
                let (counts, from_type) = (self.chunk_counts(chunk), program.types.communication);
                let from = self.source_buffer();
                let (send, starts) = if let BufferId::CommGrad(flat) = from {
                    let bytes = |rank: u64| (self.owned(chunk, rank).start * from_type.bytes()) as usize;
                    let all = program.layout.flats[flat].padded() * from_type.bytes();
                    (self.whole(from, all), (0..program.layout.ranks).map(bytes).collect())
                } else {
                    (self.whole(from, counts.iter().sum::<usize>() as u64), starts_of(&counts))
                };
                let Sums { to, to_type, add } = self.sums(chunk, *addition);
                let is_last = program.completes(self.section.kind, chunk.flat, *addition);
                let squares = is_last.then(|| self.exact_sum(chunk.flat));
                Collective::Reduce { send, starts, counts, from_type, to, to_type, add, squares }
            }
            Action::AllGatherReports => {
                let (ranks, bytes) = (program.layout.ranks, program.report().bytes() as u64);
                Collective::AllGather {
                    send: self.whole(self.source_buffer(), bytes),
                    recv: self.whole(self.destination(), ranks * bytes),
                    counts: vec![bytes as usize; ranks as usize],
                }
            }
            other => unreachable!("{other:?} is no collective"),
        }
    }
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
