//! Collectives as operations of MPI: which bytes of the buffers go where, round by round.
#![allow(unsafe_code, reason = "hands buffers to MPI")]

use std::ffi::c_int;

use super::calls::{Layout, MpiRequest};
use super::rail_comm::RailComm;
use super::rounds::TransferRounds;
use crate::error::CommError;
use crate::op_name::OpName;
use crate::transfer::Transfer;

/// What MPI reads while a collective is in progress. Kept from one to the next, so that a step allocates nothing.
#[derive(Default)]
pub(super) struct Operands {
    /// The part of the send buffer for each rank.
    sends: Vec<Part>,
    /// The part of the receive buffer from each rank.
    receives: Vec<Part>,
    send_layout: Layout,
    receive_layout: Layout,
    pub(super) requests: Vec<MpiRequest>,
}

/// A part of a buffer, in bytes.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: usize,
    bytes: usize,
}

/// The buffers of a transfer.
#[derive(Clone, Copy)]
struct Buffers {
    send: *const u8,
    receive: *mut u8,
    /// The longer of both.
    bytes: usize,
}

/// The function that moves all parts at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    AllGather { in_place: bool },
    AllToAll,
    Gather { root: usize },
}

impl Call {
    fn name(self) -> &'static str {
        match self {
            Self::AllGather { .. } => "MPI_Iallgatherv",
            Self::AllToAll => "MPI_Ialltoallv",
            Self::Gather { .. } => "MPI_Igatherv",
        }
    }
}

impl RailComm {
    /// Runs a transfer.
    pub(super) fn move_all(&self, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        let mut operands = self.operands.borrow_mut();
        let operands = &mut *operands;
        operands.requests.clear();
        let (rank, world) = (self.rank, self.world);
        let (call, buffers) = match transfer {
            Transfer::AllGather { send, recv, counts } => {
                let bytes = recv.len();
                let buffers = Buffers { send: address(send), receive: address_mut(recv), bytes };
                operands.set(
                    std::iter::repeat_n(Part { start: 0, bytes: counts[rank] }, world),
                    in_order(counts),
                );
                (Call::AllGather { in_place: false }, buffers)
            }
            Transfer::AllGatherInPlace { buffer, starts, counts } => {
                let (bytes, receive) = (buffer.len(), address_mut(buffer));
                let own = Part { start: starts[rank], bytes: counts[rank] };
                let parts =
                    starts.iter().zip(*counts).map(|(start, bytes)| Part { start: *start, bytes: *bytes });
                operands.set(std::iter::repeat_n(own, world), parts);
                (Call::AllGather { in_place: true }, Buffers { send: receive, receive, bytes })
            }
            Transfer::AllToAll { send, recv, counts } => {
                // The same on all ranks.
                let bytes = counts.iter().sum::<usize>().max(world * counts.iter().max().unwrap_or(&0));
                let buffers = Buffers { send: address(send), receive: address_mut(recv), bytes };
                let own = counts[rank];
                let receives = (0..world).map(|from| Part { start: from * own, bytes: own });
                operands.set(in_order(counts), receives);
                (Call::AllToAll, buffers)
            }
            Transfer::Gather { root, send, recv, counts } => {
                let bytes = counts.iter().sum();
                let buffers = Buffers { send: address(send), receive: address_mut(recv), bytes };
                let (root, own) = (*root, counts[rank]);
                let sends = (0..world).map(|to| Part { start: 0, bytes: if to == root { own } else { 0 } });
                let here = usize::from(rank == root);
                let receives = in_order(counts).map(|part| Part { bytes: part.bytes * here, ..part });
                operands.set(sends, receives);
                (Call::Gather { root }, buffers)
            }
            Transfer::Broadcast { root, buffer } => return self.broadcast(op, *root, buffer, operands),
            Transfer::Barrier => {
                let requests = &mut operands.requests;
                self.begin(op, "MPI_Ibarrier", requests, |calls| calls.barrier(self.communicator))?;
                return self.complete(op, "MPI_Ibarrier", requests);
            }
        };
        let (Transfer::AllGather { counts, .. }
        | Transfer::AllGatherInPlace { counts, .. }
        | Transfer::AllToAll { counts, .. }
        | Transfer::Gather { counts, .. }) = transfer
        else {
            return Ok(());
        };
        let rounds = self.rounds.count(counts);
        if self.rounds.reaches(buffers.bytes) {
            (0..rounds).try_for_each(|round| self.round(op, call, buffers, round, operands))
        } else {
            self.keep_own(buffers, operands);
            (0..rounds).try_for_each(|round| self.round_one_by_one(op, buffers, round, operands))
        }
    }

    /// Moves a round's pieces of all parts by one function.
    fn round(
        &self,
        op: OpName,
        call: Call,
        buffers: Buffers,
        round: usize,
        operands: &mut Operands,
    ) -> Result<(), CommError> {
        let Operands { sends, receives, send_layout, receive_layout, requests } = operands;
        describe(sends, self.rounds, round, send_layout);
        describe(receives, self.rounds, round, receive_layout);
        let kept =
            (call == Call::AllToAll).then(|| keep(self.rank, (&mut *send_layout, &mut *receive_layout)));
        let to = if let Call::Gather { root } = call { root } else { self.rank };
        let (from, count) = (send_layout.displacements[to] as usize, send_layout.counts[to]);
        self.begin(op, call.name(), requests, |calls| {
            // SAFETY: all parts are within the buffers, as `Transfer::check` found. The transfer borrows the buffers until
            // `complete` returns, and this rank's operands are not changed before. Where it fails, MPI is not called again.
            unsafe {
                let own = (buffers.send.add(from), count);
                match call {
                    Call::AllGather { in_place } => {
                        let own = (!in_place).then_some(own);
                        calls.all_gather(own, buffers.receive, receive_layout, self.communicator)
                    }
                    Call::AllToAll => {
                        let (send, receive) =
                            ((buffers.send, &*send_layout), (buffers.receive, &*receive_layout));
                        calls.all_to_all(send, receive, self.communicator)
                    }
                    Call::Gather { root } => {
                        calls.gather(own, buffers.receive, receive_layout, root as c_int, self.communicator)
                    }
                }
            }
        })?;
        if let Some((from, to, count)) = kept {
            // SAFETY: parts of two buffers, which MPI reads, and writes nothing to.
            unsafe { std::ptr::copy_nonoverlapping(buffers.send.add(from), buffers.receive.add(to), count) };
        }
        self.complete(op, call.name(), requests)
    }

    /// Moves a round's pieces by a message for each, for buffers in which a displacement is more than a C int.
    fn round_one_by_one(
        &self,
        op: OpName,
        buffers: Buffers,
        round: usize,
        operands: &mut Operands,
    ) -> Result<(), CommError> {
        let Operands { sends, receives, requests, .. } = operands;
        for peer in (0..self.world).filter(|peer| *peer != self.rank) {
            let (send, receive) =
                (sends[peer].piece(self.rounds, round), receives[peer].piece(self.rounds, round));
            let rank = peer as c_int;
            if receive.bytes > 0 {
                self.begin(op, "MPI_Irecv", requests, |calls| {
                    // SAFETY: as in `round`.
                    unsafe {
                        let at = buffers.receive.add(receive.start);
                        calls.receive(at, receive.bytes as c_int, rank, self.communicator)
                    }
                })?;
            }
            if send.bytes > 0 {
                self.begin(op, "MPI_Isend", requests, |calls| {
                    // SAFETY: as in `round`.
                    unsafe {
                        let at = buffers.send.add(send.start);
                        calls.send(at, send.bytes as c_int, rank, self.communicator)
                    }
                })?;
            }
        }
        self.complete(op, "messages between two ranks", requests)
    }

    /// Copies this rank's own part, unless it is in place.
    fn keep_own(&self, buffers: Buffers, operands: &Operands) {
        let (from, to) = (operands.sends[self.rank], operands.receives[self.rank]);
        // SAFETY: both parts are within the buffers. They are one place, or in two buffers.
        unsafe {
            let (source, target) = (buffers.send.add(from.start), buffers.receive.add(to.start));
            if !std::ptr::eq(source, target) {
                std::ptr::copy_nonoverlapping(source, target, to.bytes);
            }
        }
    }

    fn broadcast(
        &self,
        op: OpName,
        root: usize,
        buffer: &mut [u8],
        operands: &mut Operands,
    ) -> Result<(), CommError> {
        let whole = [buffer.len()];
        for round in 0..self.rounds.count(&whole) {
            let piece = &mut buffer[self.rounds.range(whole[0], round)];
            let (at, count) = (address_mut(piece), piece.len() as c_int);
            self.begin(op, "MPI_Ibcast", &mut operands.requests, |calls| {
                // SAFETY: the transfer borrows the buffer until `complete` returns; where it fails, MPI is not called again.
                unsafe { calls.broadcast(at, count, root as c_int, self.communicator) }
            })?;
            self.complete(op, "MPI_Ibcast", &mut operands.requests)?;
        }
        Ok(())
    }
}

impl Operands {
    fn set(&mut self, sends: impl Iterator<Item = Part>, receives: impl Iterator<Item = Part>) {
        self.sends.clear();
        self.sends.extend(sends);
        self.receives.clear();
        self.receives.extend(receives);
    }
}

impl Part {
    /// What a round moves of it.
    fn piece(self, rounds: TransferRounds, round: usize) -> Self {
        let range = rounds.range(self.bytes, round);
        Self { start: self.start + range.start, bytes: range.len() }
    }
}

/// Takes this rank's own piece out of what an all-to-all moves, and returns its places and its bytes. MPICH sends it through its
/// transport.
fn keep(rank: usize, (send, receive): (&mut Layout, &mut Layout)) -> (usize, usize, usize) {
    let count = std::mem::take(&mut send.counts[rank]);
    receive.counts[rank] = 0;
    (send.displacements[rank] as usize, receive.displacements[rank] as usize, count as usize)
}

/// An address that MPI never follows. An empty slice has the address 1, which is `MPI_IN_PLACE` of Open MPI.
static NOTHING: u8 = 0;

fn address(bytes: &[u8]) -> *const u8 {
    if bytes.is_empty() { &raw const NOTHING } else { bytes.as_ptr() }
}

fn address_mut(bytes: &mut [u8]) -> *mut u8 {
    if bytes.is_empty() { (&raw const NOTHING).cast_mut() } else { bytes.as_mut_ptr() }
}

/// Parts one after the other.
fn in_order(counts: &[usize]) -> impl Iterator<Item = Part> {
    counts.iter().scan(0, |end, bytes| {
        let start = *end;
        *end += bytes;
        Some(Part { start, bytes: *bytes })
    })
}

/// The pieces of a round as MPI reads them.
fn describe(parts: &[Part], rounds: TransferRounds, round: usize, layout: &mut Layout) {
    layout.counts.clear();
    layout.displacements.clear();
    for part in parts {
        let piece = part.piece(rounds, round);
        layout.counts.push(piece.bytes as c_int);
        layout.displacements.push(piece.start as c_int);
    }
}
