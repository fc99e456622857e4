//! Collectives in rounds: the bytes of a transfer that this rank publishes and copies in each round.

use std::ops::Range;

use super::copy::{copy, past_caches};
use super::local_comm::LocalComm;
use super::segment::LINE;
use crate::error::CommError;
use crate::op_name::OpName;
use crate::transfer::Transfer;

impl LocalComm {
    /// Runs a transfer.
    pub(super) fn move_all(&self, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        let signature = transfer.signature(op);
        for round in 0..self.rounds(transfer) {
            // The first piece may have been published by the call.
            if !self.channel.has_published() {
                self.publish(op, transfer, round)?;
            }
            self.keep_own(transfer, round);
            self.receive(op, signature, transfer, round)?;
            self.channel.consume();
        }
        Ok(())
    }

    /// Publishes this rank's pieces of one round.
    pub(super) fn publish(&self, op: OpName, transfer: &Transfer<'_>, round: usize) -> Result<(), CommError> {
        let (signature, piece) = (transfer.signature(op), self.piece(transfer));
        match transfer {
            Transfer::AllGather { send, .. } => self.publish_one(op, signature, cut(send, round, piece)),
            Transfer::AllGatherInPlace { buffer, starts, counts } => {
                let start = starts[self.rank];
                let own = &buffer[start..start + counts[self.rank]];
                self.publish_one(op, signature, cut(own, round, piece))
            }
            Transfer::Gather { send, root, .. } if *root != self.rank => {
                self.publish_one(op, signature, cut(send, round, piece))
            }
            Transfer::Broadcast { root, buffer } if *root == self.rank => {
                self.publish_one(op, signature, cut(buffer, round, piece))
            }
            Transfer::AllToAll { send, counts, .. } => {
                let mut start = 0;
                let parts = counts.iter().enumerate().map(|(to, count)| {
                    let part = &send[start..start + count];
                    start += count;
                    (to, part)
                });
                let pieces = parts
                    .filter(|(to, _)| *to != self.rank)
                    .map(|(to, part)| (to * piece, cut(part, round, piece)));
                self.channel.publish(op, signature, pieces)
            }
            Transfer::Gather { .. } | Transfer::Broadcast { .. } | Transfer::Barrier => {
                self.publish_one(op, signature, &[])
            }
        }
    }

    fn publish_one(&self, op: OpName, signature: u64, bytes: &[u8]) -> Result<(), CommError> {
        self.channel.publish(op, signature, std::iter::once((0, bytes)))
    }

    /// Copies what this rank receives in one round.
    fn receive(
        &self,
        op: OpName,
        signature: u64,
        transfer: &mut Transfer<'_>,
        round: usize,
    ) -> Result<(), CommError> {
        let piece = self.piece(transfer);
        match transfer {
            Transfer::AllGatherInPlace { buffer, starts, counts } => {
                let around = past_caches(counts.iter().sum());
                for from in self.others() {
                    let part = starts[from]..starts[from] + counts[from];
                    let into = cut_mut(&mut buffer[part], round, piece);
                    self.channel.receive(op, signature, from, 0, into, around)?;
                }
            }
            Transfer::AllGather { recv, counts, .. } => {
                let around = past_caches(recv.len());
                for (from, part) in self.parts(counts) {
                    let into = cut_mut(&mut recv[part], round, piece);
                    self.channel.receive(op, signature, from, 0, into, around)?;
                }
            }
            Transfer::Gather { root, recv, counts, .. } if *root == self.rank => {
                let around = past_caches(recv.len());
                for (from, part) in self.parts(counts) {
                    let into = cut_mut(&mut recv[part], round, piece);
                    self.channel.receive(op, signature, from, 0, into, around)?;
                }
            }
            Transfer::AllToAll { recv, counts, .. } => {
                let (count, around) = (counts[self.rank], past_caches(recv.len()));
                for from in self.others() {
                    let into = cut_mut(&mut recv[from * count..(from + 1) * count], round, piece);
                    self.channel.receive(op, signature, from, self.rank * piece, into, around)?;
                }
            }
            Transfer::Broadcast { root, buffer } if *root != self.rank => {
                let around = past_caches(buffer.len());
                self.channel.receive(op, signature, *root, 0, cut_mut(buffer, round, piece), around)?;
            }
            Transfer::Barrier => {
                for from in self.others() {
                    self.channel.receive(op, signature, from, 0, &mut [], false)?;
                }
            }
            Transfer::Gather { .. } | Transfer::Broadcast { .. } => {}
        }
        Ok(())
    }

    /// Copies this rank's own part from `send` to `recv`, piece by piece: one that was just published is still in the
    /// cache.
    fn keep_own(&self, transfer: &mut Transfer<'_>, round: usize) {
        let (rank, piece) = (self.rank, self.piece(transfer));
        let (send, recv, part) = match transfer {
            Transfer::AllGather { send, recv, counts } => (*send, recv, own_part(counts, rank)),
            Transfer::Gather { root, send, recv, counts } if *root == rank => {
                (*send, recv, own_part(counts, rank))
            }
            Transfer::AllToAll { send, recv, counts } => {
                (&send[own_part(counts, rank)], recv, rank * counts[rank]..(rank + 1) * counts[rank])
            }
            Transfer::AllGatherInPlace { .. }
            | Transfer::Gather { .. }
            | Transfer::Broadcast { .. }
            | Transfer::Barrier => return,
        };
        let around = past_caches(recv.len());
        copy(cut(send, round, piece), cut_mut(&mut recv[part], round, piece), around);
    }

    /// Bytes of the largest piece: a half, or a rank's share of it where a half holds pieces for all.
    fn piece(&self, transfer: &Transfer<'_>) -> usize {
        match transfer {
            // At least a cache line, by the layout.
            Transfer::AllToAll { .. } => self.layout.half / self.lane.world / LINE * LINE,
            _ => self.layout.half,
        }
    }

    /// Equal on all ranks, because counts are; at least one, so that every rank takes part.
    fn rounds(&self, transfer: &Transfer<'_>) -> usize {
        let longest = match transfer {
            Transfer::AllGather { counts, .. }
            | Transfer::AllGatherInPlace { counts, .. }
            | Transfer::AllToAll { counts, .. }
            | Transfer::Gather { counts, .. } => counts.iter().copied().max().unwrap_or(0),
            Transfer::Broadcast { buffer, .. } => buffer.len(),
            Transfer::Barrier => 0,
        };
        longest.div_ceil(self.piece(transfer)).max(1)
    }

    /// The other ranks of the lane, starting with the next, so that not all read from rank 0 first.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world) = (self.rank, self.lane.world);
        (rank + 1..world).chain(0..rank)
    }

    /// The other ranks and their parts of a buffer of contiguous parts.
    fn parts(&self, counts: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut start = own_part(counts, self.rank).end;
        self.others().map(move |from| {
            if from == 0 {
                start = 0;
            }
            let part = start..start + counts[from];
            start = part.end;
            (from, part)
        })
    }
}

fn own_part(counts: &[usize], rank: usize) -> Range<usize> {
    let start: usize = counts[..rank].iter().sum();
    start..start + counts[rank]
}

fn range(len: usize, round: usize, piece: usize) -> Range<usize> {
    (round * piece).min(len)..((round + 1) * piece).min(len)
}

fn cut(part: &[u8], round: usize, piece: usize) -> &[u8] {
    &part[range(part.len(), round, piece)]
}

fn cut_mut(part: &mut [u8], round: usize, piece: usize) -> &mut [u8] {
    let range = range(part.len(), round, piece);
    &mut part[range]
}
