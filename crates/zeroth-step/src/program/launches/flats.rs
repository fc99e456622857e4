//! Kernels and collectives of flats: rounding, exchange and sums of gradients, the norm, the optimizer, gathers.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_device::cpu::ExactSum;
use zeroth_device::{Access, Kernel, Report};

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
            *access == wanted && matches!(content, Content::Sent(_) | Content::Received(_))
        });
        found.expect("a chunk has its buffer").0
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
        let to = match program.gradient_home() {
            GradientHome::Landed => self.part(Content::Gradient(chunk.flat), owned.start, count, 4),
            _ => self.part(Content::Kept(chunk.flat), chunk.range.start, count, 4),
        };
        vec![Kernel::SumRanks {
            ranks: ranks as usize,
            parts: self.part(self.chunk_buffer(Access::Read), 0, ranks * count, from_type.bytes()),
            from_type,
            to,
            add: addition == Addition::Add,
        }]
    }

    /// A flat's complete gradient: where it is, its type, and how many elements of it lie before `first`.
    fn summed(&self, flat: usize, range: &Range<u64>) -> (Span, DType) {
        let program = self.program();
        let count = range.end - range.start;
        let content = self.source.summed(flat);
        match program.gradient_home() {
            GradientHome::Landed => (self.part(content, range.start, count, 4), DType::F32),
            GradientHome::Rounded => {
                let dtype = program.types.communication;
                (self.part(content, range.start, count, dtype.bytes()), dtype)
            }
            GradientHome::Shard => {
                let shard = program.layout.flats[flat].shard(self.binding.rank, program.layout.ranks);
                (self.part(content, range.start - shard.start, count, 4), DType::F32)
            }
        }
    }

    pub(super) fn squares(&self, flat: usize) -> Vec<Kernel> {
        let program = self.program();
        // At stage 0 too each rank counts what it reduced; the others' sums come with their reports.
        let shard = program.layout.flats[flat].shard(self.binding.rank, program.layout.ranks);
        let sum = self.part(Content::Report, 0, report_bytes(program.layout.flats.len()), 1).part(
            (size_of::<Report>() + flat * size_of::<ExactSum>()) as u64,
            size_of::<ExactSum>() as u64,
            1,
        );
        if shard.is_empty() {
            return vec![Kernel::Zero { to: sum }];
        }
        let (values, value_type) = self.summed(flat, &shard);
        vec![Kernel::Squares { values, value_type, sum }]
    }

    pub(super) fn control(&self) -> Kernel {
        let (ranks, flats) = (self.program().layout.ranks, self.program().layout.flats.len());
        let reports = if ranks > 1 { Content::Reports } else { Content::Report };
        Kernel::Control {
            ranks: ranks as usize,
            flats,
            recipe: self.whole(Content::Recipe, size_of::<zeroth_device::Recipe>() as u64),
            input: self.whole(Content::Input, size_of::<zeroth_device::StepInput>() as u64),
            reports: self.whole(reports, ranks * report_bytes(flats)),
            control: self.whole(Content::Control, size_of::<zeroth_device::Control>() as u64),
            record: self.whole(Content::Record, record_bytes(flats)),
        }
    }

    /// AdamW over what this rank updates of a flat, run by run of parameters that decay alike.
    pub(super) fn update(&self, flat: usize) -> Vec<Kernel> {
        let program = self.program();
        let updated = program.updated(flat, self.binding.rank);
        let held = &program.layout.flats[flat];
        // (group, range of the flat): slots touch each other, padding belongs to the slot before it.
        let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
        for (place, slot) in held.slots.iter().enumerate() {
            let end = held.slots.get(place + 1).map_or(held.padded(), |next| next.start);
            let range = slot.start.max(updated.start)..end.min(updated.end);
            let group = usize::from(!(self.binding.decayed)(slot.param));
            match runs.last_mut() {
                _ if range.is_empty() => {}
                Some((last, before)) if *last == group => before.end = range.end,
                _ => runs.push((group, range)),
            }
        }
        let kernel = |(group, range): (usize, Range<u64>)| {
            let count = range.end - range.start;
            let (grads, grad_type) = self.summed(flat, &range);
            let state = |content| self.part(content, range.start - updated.start, count, 4);
            let first_weight = if program.stays_gathered(flat) { 0 } else { updated.start };
            let weights = |size| self.part(Content::Weights(flat), range.start - first_weight, count, size);
            let has_master = self.source.has_master();
            Kernel::AdamW {
                group,
                control: self.whole(Content::Control, size_of::<zeroth_device::Control>() as u64),
                grads,
                grad_type,
                master: if has_master { state(Content::Master(flat)) } else { weights(4) },
                first: state(Content::First(flat)),
                second: state(Content::Second(flat)),
                weights: has_master.then(|| weights(self.run_bytes())),
            }
        };
        runs.into_iter().map(kernel).collect()
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
                let send = self.whole(Content::Weights(*flat), own);
                let all = counts.iter().sum::<usize>() as u64;
                Collective::AllGather { send, recv: self.whole(Content::Gathered(self.index), all), counts }
            }
            Action::GatherWeights(flat) => {
                let counts = self.shard_counts(*flat, self.run_bytes());
                let all = counts.iter().sum::<usize>() as u64;
                Collective::InPlace { buffer: self.whole(Content::Weights(*flat), all), counts }
            }
            Action::GatherGradient(flat) => {
                let counts = self.shard_counts(*flat, 4);
                let all = counts.iter().sum::<usize>() as u64;
                Collective::InPlace { buffer: self.whole(Content::Gradient(*flat), all), counts }
            }
            Action::Exchange(chunk) => {
                let counts = self.chunk_counts(chunk);
                let own = (counts.len() * counts[self.binding.rank as usize]) as u64;
                let all = counts.iter().sum::<usize>() as u64;
                Collective::AllToAll {
                    send: self.whole(self.chunk_buffer(Access::Read), all),
                    recv: self.whole(self.chunk_buffer(Access::Write), own),
                    counts,
                }
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
