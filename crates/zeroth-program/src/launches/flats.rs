//! Kernels and collectives of flats: rounding, exchange and sums of gradients, the norm, the optimizer, gathers.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_kernel::ExactSum;
use zeroth_kernel::{Access, Kernel, Report, Rounding, Tier};

use super::super::buffers::{record_bytes, report_bytes};
use super::super::{Action, Addition, Chunk, Content, GradientHome};
use super::{At, Collective, Span};

impl At<'_> {
    /// The part of a chunk that a rank owns, as a range of the flat.
    fn owned(&self, chunk: &Chunk, rank: u64) -> Range<u64> {
        let shard = self.program().layout.flats[chunk.flat].shard(rank, self.program().layout.ranks);
        let at = |place: u64| (shard.start + place).min(shard.end);
        at(chunk.range.start)..at(chunk.range.end)
    }

    /// Bytes of a chunk that each rank owns, in the communication type.
    fn chunk_counts(&self, chunk: &Chunk) -> Vec<usize> {
        let size = self.program().types.communication.bytes();
        let count = |rank: u64| {
            let owned = self.owned(chunk, rank);
            ((owned.end - owned.start) * size) as usize
        };
        (0..self.program().layout.ranks).map(count).collect()
    }

    /// The chunk's buffer that this instruction reads or writes beside the gradient.
    fn chunk_buffer(&self, wanted: Access) -> Content {
        let found = self.touched.iter().find(|(content, access)| {
            *access == wanted
                && matches!(content, Content::Sent(_) | Content::Received(_) | Content::Rounded(_))
        });
        found.expect("a chunk has its buffer").0
    }

    /// What of a flat's gradient landed in f32, beside what landed in the communication type.
    pub(super) fn round_rest(&self, flat: usize) -> Vec<Kernel> {
        let (program, kind) = (self.program(), self.section.kind);
        let (to_type, rounded) = (program.types.communication, program.rounded(flat));
        let of_rounded = |elements: &Range<u64>| {
            self.part(rounded, elements.start, elements.end - elements.start, to_type.bytes())
        };
        let convert = |(first, elements): (u64, Range<u64>)| Kernel::Convert {
            from: self.part(Content::Gradient(flat), first, elements.end - elements.start, 4),
            from_type: DType::F32,
            to: of_rounded(&elements),
            to_type,
            found_inf: Some(self.broken(flat)),
        };
        let look = |elements: Range<u64>| Kernel::CheckFinite {
            values: of_rounded(&elements),
            value_type: to_type,
            found_inf: self.broken(flat),
        };
        let converted = program.unrounded(kind, flat).into_iter().map(convert);
        converted.chain(program.unseen(kind, flat).into_iter().map(look)).collect()
    }

    /// The ranks' parts of a chunk end to end.
    pub(super) fn pack(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (dtype, to) = (self.program().types.communication, Content::Sent(self.index));
        let mut at = 0;
        let part = |rank: u64| {
            let owned = self.owned(chunk, rank);
            let count = owned.end - owned.start;
            let first = at;
            at += count;
            let from = self.part(Content::Rounded(chunk.flat), owned.start, count, dtype.bytes());
            (count > 0).then(|| copy(from, self.part(to, first, count, dtype.bytes()), dtype))
        };
        (0..self.program().layout.ranks).filter_map(part).collect()
    }

    pub(super) fn round(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (to_type, to) = (self.program().types.communication, self.chunk_buffer(Access::Write));
        let mut at = 0;
        let convert = |rank: u64| {
            let owned = self.owned(chunk, rank);
            let count = owned.end - owned.start;
            let first = at;
            at += count;
            (count > 0).then(|| Kernel::Convert {
                from: self.part(Content::Gradient(chunk.flat), owned.start, count, 4),
                from_type: DType::F32,
                to: self.part(to, first, count, to_type.bytes()),
                to_type,
                found_inf: Some(self.broken(chunk.flat)),
            })
        };
        (0..self.program().layout.ranks).filter_map(convert).collect()
    }

    pub(super) fn add(&self, chunk: &Chunk, addition: Addition) -> Vec<Kernel> {
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

    /// Where the sums of what this rank owns of a chunk go.
    fn sums(&self, chunk: &Chunk, addition: Addition) -> Sums {
        let owned = self.owned(chunk, self.binding.rank);
        let count = owned.end - owned.start;
        let kept = self.program().sums;
        let (to, to_type) = match self.written(&[
            Content::Gradient(chunk.flat),
            Content::Kept(chunk.flat),
            Content::Summed(self.index),
        ]) {
            content @ Content::Gradient(_) => (self.part(content, owned.start, count, 4), DType::F32),
            // A rank that owns nothing of the chunk may have its end before the chunk begins.
            content @ Content::Kept(_) if count > 0 => {
                (self.part(content, chunk.range.start, count, kept.bytes()), kept)
            }
            content @ Content::Kept(_) => (self.part(content, 0, count, kept.bytes()), kept),
            content => {
                let dtype = self.program().summed_type(addition);
                (self.part(content, 0, count, dtype.bytes()), dtype)
            }
        };
        // On its way to host memory a sum is added there.
        let add = addition == Addition::Add && self.program().held[chunk.flat].gradients == Tier::Device;
        Sums { to, to_type, add }
    }

    /// The ranks' parts of what this rank owns of a chunk, end to end; cut out of all there is where every rank got
    /// everything.
    fn parts(&self, chunk: &Chunk, count: u64) -> (Vec<Kernel>, Span) {
        let program = self.program();
        let (ranks, dtype, from) =
            (program.layout.ranks, program.types.communication, self.chunk_buffer(Access::Read));
        if let (Content::Rounded(_), 1) = (from, ranks) {
            return (Vec::new(), self.part(from, chunk.range.start, count, dtype.bytes()));
        }
        if program.reduce_scatter || ranks == 1 {
            return (Vec::new(), self.part(from, 0, ranks * count, dtype.bytes()));
        }
        let owned: Vec<u64> =
            (0..ranks).map(|rank| self.owned(chunk, rank)).map(|range| range.end - range.start).collect();
        let (all, before): (u64, u64) =
            (owned.iter().sum(), owned[..self.binding.rank as usize].iter().sum());
        let slices = self.sink(ranks * count * dtype.bytes());
        let slice = |rank: u64| {
            let from = self.part(from, rank * all + before, count, dtype.bytes());
            copy(from, slices.part(rank * count, count, dtype.bytes()), dtype)
        };
        ((0..ranks).map(slice).collect(), slices)
    }

    /// A flat's complete gradient over a range of the flat, and its type.
    pub(super) fn summed(&self, flat: usize, range: &Range<u64>) -> (Span, DType) {
        let (content, dtype, first) = self.program().complete_gradient(flat, self.binding.rank);
        (self.part(content, range.start - first, range.end - range.start, dtype.bytes()), dtype)
    }

    /// The buffer that this instruction reads among those that chunks travel in.
    fn travelling(&self) -> Content {
        let found = self.touched.iter().find(|(content, access)| {
            *access == Access::Read
                && matches!(
                    content,
                    Content::Summed(_) | Content::Staged(_) | Content::Updated(_) | Content::Rounded(_)
                )
        });
        found.expect("a chunk has its buffer").0
    }

    pub(super) fn save_gradient(&self, chunk: &Chunk, addition: Addition) -> Vec<Kernel> {
        let program = self.program();
        if program.gradient_home() == GradientHome::Rounded {
            let (count, dtype) = (chunk.range.end, program.types.communication);
            let from = self.part(self.travelling(), 0, count, dtype.bytes());
            return vec![copy(from, self.part(Content::Kept(chunk.flat), 0, count, dtype.bytes()), dtype)];
        }
        let owned = self.owned(chunk, self.binding.rank);
        let count = owned.end - owned.start;
        if count == 0 {
            return Vec::new();
        }
        let (from, from_type) = if program.gradient_home() == GradientHome::Landed {
            (self.part(Content::Gradient(chunk.flat), owned.start, count, 4), DType::F32)
        } else {
            let dtype = program.summed_type(addition);
            (self.part(self.travelling(), 0, count, dtype.bytes()), dtype)
        };
        let (_, to_type, _) = program.complete_gradient(chunk.flat, self.binding.rank);
        let to = self.part(Content::Kept(chunk.flat), chunk.range.start, count, to_type.bytes());
        vec![match addition {
            Addition::Write => Kernel::Convert { from, from_type, to, to_type, found_inf: None },
            Addition::Add => Kernel::SumRanks { ranks: 1, parts: from, from_type, to, to_type, add: true },
        }]
    }

    pub(super) fn stage(&self, chunk: &Chunk) -> Vec<Kernel> {
        let owned = self.owned(chunk, self.binding.rank);
        let (count, dtype) = (owned.end - owned.start, self.program().types.run);
        let from = |count| self.part(Content::Weights(chunk.flat), chunk.range.start, count, dtype.bytes());
        let to = |count| self.part(Content::Staged(self.index), 0, count, dtype.bytes());
        if count > 0 { vec![copy(from(count), to(count), dtype)] } else { Vec::new() }
    }

    pub(super) fn bring(&self, chunk: &Chunk) -> Vec<Kernel> {
        let owned = self.owned(chunk, self.binding.rank);
        let (count, dtype) = (owned.end - owned.start, self.program().types.run);
        if count == 0 {
            return Vec::new();
        }
        let is_staged = self.touched.iter().any(|(content, _)| matches!(content, Content::Staged(_)));
        let from = if is_staged {
            self.part(self.travelling(), 0, count, dtype.bytes())
        } else {
            self.part(Content::Weights(chunk.flat), chunk.range.start, count, dtype.bytes())
        };
        let to = self.part(self.gathered(chunk.flat), owned.start, count, dtype.bytes());
        vec![copy(from, to, dtype)]
    }

    pub(super) fn put_back(&self, chunk: &Chunk) -> Vec<Kernel> {
        let program = self.program();
        let updated = program.updated(chunk.flat, self.binding.rank);
        let count = (updated.end - updated.start).min(chunk.range.end).saturating_sub(chunk.range.start);
        if count == 0 {
            return Vec::new();
        }
        let dtype = program.types.run;
        let first = if program.stays_gathered(chunk.flat) { updated.start } else { 0 };
        let to = self.part(Content::Weights(chunk.flat), first + chunk.range.start, count, dtype.bytes());
        vec![copy(self.part(self.travelling(), 0, count, dtype.bytes()), to, dtype)]
    }

    /// The flat that is being gathered.
    fn gathered(&self, flat: usize) -> Content {
        let is =
            |content: &Content| matches!(content, Content::Gathered { flat: other, .. } if *other == flat);
        let found = self.touched.iter().map(|(content, _)| *content).find(is);
        found.expect("what is gathered has its buffer")
    }

    /// Where a rank notes that its own gradient of a flat was not finite: behind its loss and sums.
    pub(super) fn broken(&self, flat: usize) -> Span {
        let flats = self.program().layout.flats.len();
        let at = size_of::<Report>() + flats * size_of::<ExactSum>() + 8 * flat;
        self.part(Content::Report, at as u64, 8, 1)
    }

    /// Where a rank counts the squares of what it owns of a flat's gradient.
    fn exact_sum(&self, flat: usize) -> Span {
        let at = size_of::<Report>() + flat * size_of::<ExactSum>();
        let all = self.part(Content::Report, 0, report_bytes(self.program().layout.flats.len()), 1);
        all.part(at as u64, size_of::<ExactSum>() as u64, 1)
    }

    pub(super) fn squares(&self, flat: usize) -> Vec<Kernel> {
        let program = self.program();
        // At stage 0 too each rank counts what it reduced; the others' sums come with their reports.
        let shard = program.layout.flats[flat].shard(self.binding.rank, program.layout.ranks);
        let sum = self.exact_sum(flat);
        if shard.is_empty() {
            return vec![Kernel::Zero { to: sum }];
        }
        let passing = self.touched.iter().find(|(content, _)| matches!(content, Content::Rounded(_)));
        let (values, value_type) = match passing {
            Some((content, _)) => {
                let dtype = program.types.communication;
                (self.part(*content, shard.start, shard.end - shard.start, dtype.bytes()), dtype)
            }
            None => self.summed(flat, &shard),
        };
        vec![Kernel::Squares { values, value_type, sum }]
    }

    pub(super) fn control(&self) -> Kernel {
        let (ranks, flats) = (self.program().layout.ranks, self.program().layout.flats.len());
        let reports = if ranks > 1 { Content::Reports } else { Content::Report };
        Kernel::Control {
            ranks: ranks as usize,
            flats,
            recipe: self.whole(Content::Recipe, size_of::<zeroth_kernel::Recipe>() as u64),
            input: self.whole(Content::Input, size_of::<zeroth_kernel::StepInput>() as u64),
            reports: self.whole(reports, ranks * report_bytes(flats)),
            control: self.whole(Content::Control, size_of::<zeroth_kernel::Control>() as u64),
            record: self.whole(Content::Record, record_bytes(flats)),
        }
    }

    /// The optimizer over a tile of what this rank updates of a flat, run by run of parameters that decay alike.
    pub(super) fn update(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (program, flat) = (self.program(), chunk.flat);
        let updated = program.updated(flat, self.binding.rank);
        let within = |place: u64| (updated.start + place).min(updated.end);
        let tile = within(chunk.range.start)..within(chunk.range.end);
        let laid = &program.layout.flats[flat];
        // (group, range of the flat): slots touch each other, padding belongs to the slot before it.
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
        let (mut grads, grad_type) = self.summed(flat, range);
        // Where states pass through the device, each is a part of the tile.
        let tile_parts = self.tile(chunk);
        let in_tile = |at: u64, size: u64| {
            let (content, _) = tile_parts.expect("states that pass through have a tile");
            self.part(content, 0, at + (range.end - tile.start) * size, 1).part(
                at + (range.start - tile.start) * size,
                count * size,
                1,
            )
        };
        if let Some(at) = tile_parts.and_then(|(_, parts)| parts.gradient) {
            grads = in_tile(at, grad_type.bytes());
        }
        let state = |content, size| match (tile_parts, content) {
            (None, content) => self.part(content, range.start - updated.start, count, size),
            (Some((_, parts)), Content::First(_)) => {
                in_tile(parts.first.expect("it has first moments"), size)
            }
            (Some((_, parts)), Content::Second(_)) => {
                in_tile(parts.second.expect("it has second moments"), size)
            }
            (Some((_, parts)), _) => in_tile(parts.master, size),
        };
        let weights = match self.written(&[Content::Weights(flat), Content::Updated(self.index)]) {
            content @ Content::Updated(_) => {
                self.part(content, range.start - tile.start, count, self.run_bytes())
            }
            content => {
                let first = if program.stays_gathered(flat) { 0 } else { updated.start };
                self.part(content, range.start - first, count, self.run_bytes())
            }
        };
        let [has_first, has_second] = program.optimizer.moments();
        let moment = |content| state(content, program.moments.bytes());
        let rounds = program.moments != DType::F32 && program.stochastic_rounding;
        let (has_master, master_form) = (program.has_master(flat), program.master_form(flat));
        Kernel::Optimize {
            optimizer: program.optimizer,
            group,
            control: self.whole(Content::Control, size_of::<zeroth_kernel::Control>() as u64),
            grads,
            grad_type,
            master: if has_master || tile_parts.is_some() {
                state(Content::Master(flat), master_form.bytes())
            } else {
                weights
            },
            master_form,
            first: has_first.then(|| moment(Content::First(flat))),
            second: has_second.then(|| moment(Content::Second(flat))),
            moment_type: program.moments,
            rounding: rounds.then_some(Rounding {
                seed: self.binding.seed,
                flat: flat as u32,
                first: range.start,
            }),
            weights: has_master.then_some(weights),
        }
    }

    /// Bytes of each rank's shard of a flat.
    fn shard_counts(&self, flat: usize, size: u64) -> Vec<usize> {
        let layout = &self.program().layout;
        let bytes = |rank: u64| {
            let shard = layout.flats[flat].shard(rank, layout.ranks);
            ((shard.end - shard.start) * size) as usize
        };
        (0..layout.ranks).map(bytes).collect()
    }

    pub(super) fn collective(&self) -> Collective {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::Gather(flat) => {
                let counts = self.shard_counts(*flat, self.run_bytes());
                let own = counts[self.binding.rank as usize] as u64;
                let all = self.whole(self.gathered(*flat), counts.iter().sum::<usize>() as u64);
                if program.held[*flat].weights == Tier::Host {
                    // This rank's part was brought to its place already.
                    return Collective::InPlace { buffer: all, starts: starts_of(&counts), counts };
                }
                Collective::AllGather { send: self.whole(Content::Weights(*flat), own), recv: all, counts }
            }
            Action::GatherWeights(chunk) => {
                let all = self.shard_counts(chunk.flat, self.run_bytes()).iter().sum::<usize>() as u64;
                let bytes = |elements: u64| (elements * self.run_bytes()) as usize;
                let owned: Vec<Range<u64>> =
                    (0..program.layout.ranks).map(|rank| self.owned(chunk, rank)).collect();
                Collective::InPlace {
                    buffer: self.whole(Content::Weights(chunk.flat), all),
                    starts: owned.iter().map(|range| bytes(range.start)).collect(),
                    counts: owned.iter().map(|range| bytes(range.end - range.start)).collect(),
                }
            }
            Action::SpreadWeights { flat, root } => {
                let shard = program.layout.flats[*flat].shard(*root as u64, program.layout.ranks);
                let count = shard.end - shard.start;
                let buffer = self.part(Content::Weights(*flat), shard.start, count, self.run_bytes());
                Collective::Broadcast { root: *root, buffer }
            }
            Action::GatherGradient(flat) => {
                let counts = self.shard_counts(*flat, 4);
                let all = counts.iter().sum::<usize>() as u64;
                let starts = starts_of(&counts);
                Collective::InPlace { buffer: self.whole(Content::Gradient(*flat), all), starts, counts }
            }
            Action::Exchange(chunk) => {
                let counts = self.chunk_counts(chunk);
                let all = counts.iter().sum::<usize>() as u64;
                if !program.reduce_scatter {
                    return Collective::AllGather {
                        send: self.whole(self.chunk_buffer(Access::Read), all),
                        recv: self.whole(self.chunk_buffer(Access::Write), counts.len() as u64 * all),
                        counts: vec![all as usize; counts.len()],
                    };
                }
                let own = (counts.len() * counts[self.binding.rank as usize]) as u64;
                Collective::AllToAll {
                    send: self.whole(self.chunk_buffer(Access::Read), all),
                    recv: self.whole(self.chunk_buffer(Access::Write), own),
                    counts,
                }
            }
            Action::Reduce(chunk, addition) => {
                let (counts, from_type) = (self.chunk_counts(chunk), program.types.communication);
                let from = self.chunk_buffer(Access::Read);
                let (send, starts) = if let Content::Rounded(flat) = from {
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
            Action::Reports => {
                let (ranks, bytes) = (program.layout.ranks, report_bytes(program.layout.flats.len()));
                Collective::AllGather {
                    send: self.whole(Content::Report, bytes),
                    recv: self.whole(Content::Reports, ranks * bytes),
                    counts: vec![bytes as usize; ranks as usize],
                }
            }
            other => unreachable!("{other:?} is no collective"),
        }
    }
}

/// Where sums over ranks go, in which type, and whether they are added to what is there.
struct Sums {
    to: Span,
    to_type: DType,
    add: bool,
}

/// Where parts begin that lie end to end.
fn starts_of(counts: &[usize]) -> Vec<usize> {
    (0..counts.len()).map(|rank| counts[..rank].iter().sum()).collect()
}

/// Elements as they are, from one place to another.
pub(super) fn copy(from: Span, to: Span, dtype: DType) -> Kernel {
    Kernel::Convert { from, from_type: dtype, to, to_type: dtype, found_inf: None }
}
