//! Bytes that a rank sends in one optimizer step, counted from the program's collectives.

use std::ops::Range;

use zeroth_base::DType;

use super::{Action, Flat, Program};

impl Program {
    /// Bytes that rank 0 sends in one optimizer step, once for every receiver. Parameters that other ranks read through
    /// a mapping count as sent.
    pub fn bytes_sent_per_step(&self) -> u64 {
        if self.layout.ranks == 1 {
            return 0;
        }
        let sections = self.sections.iter().map(|section| {
            let sent = section.instructions.iter().map(|instruction| self.bytes_sent(&instruction.action));
            sent.sum::<u64>() * self.repetitions(section.kind)
        });
        sections.sum()
    }

    fn bytes_sent(&self, action: &Action) -> u64 {
        let (ranks, communication) = (self.layout.ranks, self.types.communication.bytes());
        let peers = ranks - 1;
        let flat = |flat: usize| &self.layout.flats[flat];
        let own_shard = |at: usize| flat(at).shard(0, ranks).end;
        match action {
            Action::AllGather(flat) | Action::BroadcastWeights { flat, root: 0 } => {
                peers * self.layout.flats[*flat].storage.bytes(own_shard(*flat))
            }
            Action::AllGatherWeights(chunk) => {
                peers * flat(chunk.flat).storage.bytes(part(own_shard(chunk.flat), &chunk.range))
            }
            Action::AllGatherGrad(flat) => peers * own_shard(*flat) * DType::F32.bytes(),
            Action::AllToAll(chunk) | Action::ReduceScatter(chunk, _) => {
                let all = all_parts(flat(chunk.flat), ranks, &chunk.range);
                let sent = if self.reduce_scatter {
                    all - part(own_shard(chunk.flat), &chunk.range)
                } else {
                    peers * all
                };
                sent * communication
            }
            Action::AllGatherReports => peers * self.report().bytes() as u64,
            Action::BroadcastWeights { .. } => 0,
            action => {
                assert!(!action.is_collective(), "{} sends an unknown number of bytes", action.name());
                0
            }
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
