//! All ranks of a job on several hosts, where tensors travel between GPUs: all other bytes pass along the control connection.
//!
//! Every transfer gathers the parts of all ranks, in pieces of bounded size, and each rank keeps what is meant for it. So all
//! ranks of the job make the same calls in the same order, those along a rail included. It is for what ranks tell each other and
//! for what they write, not for tensors in every step: each byte reaches every host.

use std::cell::Cell;
use std::ops::Range;

use super::HostLink;
use crate::comm::{Comm, DeviceBarrier, Handle, JobControl, MeshAxes, PendingTransfer};
use crate::error::{CommError, LostReason};
use crate::op_name::OpName;
use crate::place::Place;
use crate::transfer::Transfer;

/// Bytes of all ranks that are gathered at once, and the least of one rank.
const ROUND: usize = if cfg!(test) { 64 << 10 } else { 16 << 20 };
const LEAST: usize = if cfg!(test) { 1 << 10 } else { 16 << 10 };

/// One rank of a job on several hosts. Its group is on its host.
pub struct ControlComm {
    rail: ControlRail,
    order: CallOrder,
}

/// The ranks with the same place in their groups.
struct ControlRail {
    host: Box<dyn Comm>,
    link: HostLink,
    /// Ranks of a group.
    group: usize,
    order: CallOrder,
}

/// Collectives started and finished: they are waited for in the order of the calls.
#[derive(Default)]
struct CallOrder {
    started: Cell<u64>,
    finished: Cell<u64>,
}

impl CallOrder {
    fn start(&self) -> u64 {
        let ticket = self.started.get();
        self.started.set(ticket + 1);
        ticket
    }

    /// Whether it is the turn of a collective.
    fn is_next(&self, ticket: u64) -> bool {
        ticket == self.finished.get()
    }

    fn finish(&self) {
        self.finished.set(self.finished.get() + 1);
    }
}

impl ControlComm {
    /// Ranks in groups of `group`, which divides the ranks of every host. `host` are those of this host, joined with groups of that
    /// size where it is smaller than the host.
    pub fn new(host: Box<dyn Comm>, link: HostLink, group: usize) -> Self {
        let rail = ControlRail { host, link, group, order: CallOrder::default() };
        Self { rail, order: CallOrder::default() }
    }
}

impl ControlRail {
    fn place(&self) -> Place {
        self.link.place()
    }

    /// Every rank's bytes, of any length: `put` gets a rank, an offset and what is there.
    fn gather(
        &self,
        op: OpName,
        own: &[u8],
        mut put: impl FnMut(usize, usize, &[u8]),
    ) -> Result<(), CommError> {
        const HEADER: usize = size_of::<u64>();
        let piece = (ROUND / self.place().world).max(LEAST);
        let (mut at, mut longest) = (0, 0);
        loop {
            let rest = &own[at.min(own.len())..];
            let mut message = Vec::with_capacity(HEADER + piece.min(rest.len()));
            message.extend((own.len() as u64).to_le_bytes());
            message.extend_from_slice(&rest[..rest.len().min(piece)]);
            for (rank, part) in self.link.gather(&*self.host, op, &message)?.iter().enumerate() {
                let Some((length, bytes)) = part.split_first_chunk::<HEADER>() else {
                    return Err(self.link.end_here(op, LostReason::BadFrame));
                };
                longest = longest.max(u64::from_le_bytes(*length) as usize);
                put(rank, at, bytes);
            }
            at += piece;
            if at >= longest {
                return Ok(());
            }
        }
    }

    /// Runs a transfer among `world` ranks, of which this one is number `own`. `number` gives the number of a rank of the job.
    fn run(
        &self,
        op: OpName,
        transfer: &mut Transfer<'_>,
        (own, world): (usize, usize),
        number: impl Fn(usize) -> Option<usize>,
    ) -> Result<(), CommError> {
        // Where each rank's part begins here, and how long it is.
        let mut parts = vec![0..0; world];
        let in_order = |parts: &mut [Range<usize>], counts: &[usize]| {
            let mut end = 0;
            for (part, count) in parts.iter_mut().zip(counts) {
                *part = end..end + count;
                end += count;
            }
        };
        let own_bytes;
        // What of a peer's bytes is for this rank.
        let mut skip = 0;
        let (send, to): (&[u8], &mut [u8]) = match transfer {
            Transfer::AllGather { send, recv, counts } => {
                in_order(&mut parts, counts);
                (send, recv)
            }
            Transfer::AllGatherInPlace { buffer, starts, counts } => {
                for (part, (start, count)) in parts.iter_mut().zip(starts.iter().zip(*counts)) {
                    *part = *start..start + count;
                }
                own_bytes = buffer[parts[own].clone()].to_vec();
                (&own_bytes, buffer)
            }
            Transfer::AllToAll { send, recv, counts } => {
                in_order(&mut parts, &vec![counts[own]; world]);
                skip = counts[..own].iter().sum();
                (send, recv)
            }
            Transfer::Gather { root, send, recv, counts } => {
                if *root == own {
                    in_order(&mut parts, counts);
                }
                (send, recv)
            }
            Transfer::Broadcast { root, buffer } => {
                parts[*root] = 0..buffer.len();
                own_bytes = if *root == own { buffer.to_vec() } else { Vec::new() };
                (&own_bytes, buffer)
            }
            Transfer::Barrier => (&[], &mut []),
        };
        self.gather(op, send, |rank, at, bytes| {
            let Some(part) = number(rank).map(|number| parts[number].clone()) else { return };
            // The overlap of what came with what is wanted, as offsets in the peer's bytes.
            let (from, to_end) = (at.max(skip), (at + bytes.len()).min(skip + part.len()));
            if from < to_end {
                let start = part.start + from - skip;
                to[start..start + to_end - from].copy_from_slice(&bytes[from - at..to_end - at]);
            }
        })
    }
}

impl Comm for ControlComm {
    fn rank(&self) -> usize {
        self.rail.place().rank
    }

    fn world(&self) -> usize {
        self.rail.place().world
    }

    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError> {
        transfer.check(op, self.rank(), self.world())?;
        Ok(Handle::new(self, self.order.start(), op, transfer))
    }

    fn mesh(&self) -> Option<MeshAxes<'_>> {
        let host = &*self.rail.host;
        let group = host.mesh().map_or(host, |mesh| mesh.group);
        Some(MeshAxes { group, rail: &self.rail })
    }

    fn of_machine(&self) -> Option<&dyn Comm> {
        Some(&*self.rail.host)
    }

    fn control(&self) -> Box<dyn JobControl> {
        self.rail.link.control()
    }

    fn leave(&self, op: OpName) -> Result<(), CommError> {
        self.rail.link.leave(&*self.rail.host, op)
    }
}

impl PendingTransfer for ControlComm {
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        if !self.order.is_next(ticket) {
            self.abandon(op);
            return Err(CommError::OutOfOrder { op });
        }
        self.rail.run(op, transfer, (self.rank(), self.world()), Some)?;
        self.order.finish();
        Ok(())
    }

    fn abandon(&self, op: OpName) {
        self.rail.abandon(op);
    }
}

impl Comm for ControlRail {
    fn rank(&self) -> usize {
        self.place().rank / self.group
    }

    fn world(&self) -> usize {
        self.place().world / self.group
    }

    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError> {
        transfer.check(op, self.rank(), self.world())?;
        Ok(Handle::new(self, self.order.start(), op, transfer))
    }

    fn device_barrier(&self) -> Option<Box<dyn DeviceBarrier>> {
        self.link.rail_barrier()
    }

    fn control(&self) -> Box<dyn JobControl> {
        self.link.control()
    }
}

impl PendingTransfer for ControlRail {
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        if !self.order.is_next(ticket) {
            self.abandon(op);
            return Err(CommError::OutOfOrder { op });
        }
        let own = self.place().rank;
        let number = |rank: usize| (rank % self.group == own % self.group).then_some(rank / self.group);
        self.run(op, transfer, (self.rank(), self.world()), number)?;
        self.order.finish();
        Ok(())
    }

    fn abandon(&self, op: OpName) {
        let _ = self.link.end_here(op, LostReason::GaveUp);
    }
}
