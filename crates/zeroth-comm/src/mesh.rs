//! A mesh of several groups: collectives of all ranks, composed of those of a group and those of a rail.
//!
//! Rank `h · G + l` has place `l` in group `h`. Bytes cross a rail once for each receiver on it: gathers run along the rail
//! first, an all-to-all within the group first, so that a rail carries what its own ranks send and receive.

use std::cell::Cell;

use crate::comm::{Comm, Handle, JobControl, MeshAxes, PendingTransfer};
use crate::error::CommError;
use crate::op_name::OpName;
use crate::transfer::Transfer;

/// One rank of a mesh, over the communicators of its group, which is on one machine, and of its rail.
pub struct MeshComm {
    group: Box<dyn Comm>,
    rail: Box<dyn Comm>,
    control: Box<dyn Fn() -> Box<dyn JobControl> + Send>,
    started: Cell<u64>,
    finished: Cell<u64>,
}

impl MeshComm {
    /// The mesh whose groups and rails these are: a rank's number in its group is its place, that in its rail the number
    /// of its group. `control` gives its ends of the control plane.
    pub fn new(
        group: Box<dyn Comm>,
        rail: Box<dyn Comm>,
        control: impl Fn() -> Box<dyn JobControl> + Send + 'static,
    ) -> Self {
        let (started, finished) = (Cell::new(0), Cell::new(0));
        Self { group, rail, control: Box::new(control), started, finished }
    }

    /// Ranks of a group, and groups.
    fn shape(&self) -> (usize, usize) {
        (self.group.world(), self.rail.world())
    }

    /// Every rank's part, in the order of the places and then of the groups.
    fn gather_all(&self, op: OpName, own: &[u8], counts: &[usize]) -> Result<Vec<u8>, CommError> {
        let (group, groups) = self.shape();
        let of_rail = |place: usize| (0..groups).map(move |number| counts[number * group + place]);
        let along: Vec<usize> = of_rail(self.group.rank()).collect();
        let mut rail = vec![0; along.iter().sum()];
        self.rail.all_gather(op, own, &mut rail, &along)?.wait()?;
        let across: Vec<usize> = (0..group).map(|place| of_rail(place).sum()).collect();
        let mut all = vec![0; across.iter().sum()];
        self.group.all_gather(op, &rail, &mut all, &across)?.wait()?;
        Ok(all)
    }

    /// Takes the parts of [`Self::gather_all`] apart: `put` gets each rank and its part.
    fn each_part(&self, all: &[u8], counts: &[usize], mut put: impl FnMut(usize, &[u8])) {
        let (group, groups) = self.shape();
        let mut rest = all;
        for (place, number) in (0..group).flat_map(|place| (0..groups).map(move |number| (place, number))) {
            let rank = number * group + place;
            let part;
            (part, rest) = rest.split_at(counts[rank]);
            put(rank, part);
        }
    }

    fn all_to_all(
        &self,
        op: OpName,
        send: &[u8],
        recv: &mut [u8],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let (group, groups) = self.shape();
        // For each place, what its rail's ranks get.
        let mut packed = Vec::with_capacity(send.len());
        for (place, number) in (0..group).flat_map(|place| (0..groups).map(move |number| (place, number))) {
            let to = number * group + place;
            let start: usize = counts[..to].iter().sum();
            packed.extend_from_slice(&send[start..start + counts[to]]);
        }
        let of_rail = |place: usize| (0..groups).map(move |number| counts[number * group + place]);
        let across: Vec<usize> = (0..group).map(|place| of_rail(place).sum()).collect();
        let from_each = across[self.group.rank()];
        let mut received = vec![0; group * from_each];
        let exchange = Transfer::AllToAll { send: &packed, recv: &mut received, counts: &across };
        self.group.start(op, exchange)?.wait()?;
        // For each group, the parts of all senders of this one.
        packed.clear();
        let along: Vec<usize> = of_rail(self.group.rank()).collect();
        for number in 0..groups {
            let start: usize = along[..number].iter().sum();
            for sender in 0..group {
                let first = sender * from_each + start;
                packed.extend_from_slice(&received[first..first + along[number]]);
            }
        }
        let along: Vec<usize> = along.into_iter().map(|count| group * count).collect();
        self.rail.start(op, Transfer::AllToAll { send: &packed, recv, counts: &along })?.wait()
    }

    fn gather_to(
        &self,
        op: OpName,
        root: usize,
        send: &[u8],
        recv: &mut [u8],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let (group, groups) = self.shape();
        let (to_place, to_group) = (root % group, root / group);
        let of_rail = |place: usize| (0..groups).map(move |number| counts[number * group + place]);
        let along: Vec<usize> = of_rail(self.group.rank()).collect();
        let is_there = self.rail.rank() == to_group;
        let mut rail = vec![0; if is_there { along.iter().sum() } else { 0 }];
        self.rail.gather(op, to_group, send, &mut rail, &along)?.wait()?;
        if !is_there {
            return Ok(());
        }
        let across: Vec<usize> = (0..group).map(|place| of_rail(place).sum()).collect();
        let is_root = self.group.rank() == to_place;
        let mut all = vec![0; if is_root { across.iter().sum() } else { 0 }];
        self.group.gather(op, to_place, &rail, &mut all, &across)?.wait()?;
        if is_root {
            self.each_part(&all, counts, |rank, part| {
                let start: usize = counts[..rank].iter().sum();
                recv[start..start + part.len()].copy_from_slice(part);
            });
        }
        Ok(())
    }

    fn broadcast(&self, op: OpName, root: usize, buffer: &mut [u8]) -> Result<(), CommError> {
        let (group, _) = self.shape();
        let (place, number) = (root % group, root / group);
        if self.group.rank() == place {
            self.rail.start(op, Transfer::Broadcast { root: number, buffer: &mut *buffer })?.wait()?;
        }
        self.group.start(op, Transfer::Broadcast { root: place, buffer })?.wait()
    }
}

impl Comm for MeshComm {
    fn rank(&self) -> usize {
        self.rail.rank() * self.group.world() + self.group.rank()
    }

    fn world(&self) -> usize {
        self.group.world() * self.rail.world()
    }

    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError> {
        transfer.check(op, self.rank(), self.world())?;
        let ticket = self.started.get();
        self.started.set(ticket + 1);
        // Its levels run one after the other, so all of it is done where it is waited for.
        Ok(Handle::new(self, ticket, op, transfer))
    }

    fn mesh(&self) -> Option<MeshAxes<'_>> {
        Some(MeshAxes { group: &*self.group, rail: &*self.rail })
    }

    fn of_machine(&self) -> Option<&dyn Comm> {
        Some(&*self.group)
    }

    fn control(&self) -> Box<dyn JobControl> {
        (self.control)()
    }
}

impl PendingTransfer for MeshComm {
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        if ticket != self.finished.get() {
            self.abandon(op);
            return Err(CommError::OutOfOrder { op });
        }
        match transfer {
            Transfer::AllGather { send, recv, counts } => {
                let all = self.gather_all(op, send, counts)?;
                self.each_part(&all, counts, |rank, part| {
                    let start: usize = counts[..rank].iter().sum();
                    recv[start..start + part.len()].copy_from_slice(part);
                });
            }
            Transfer::AllGatherInPlace { buffer, starts, counts } => {
                let rank = self.rank();
                let own = &buffer[starts[rank]..starts[rank] + counts[rank]];
                let all = self.gather_all(op, own, counts)?;
                self.each_part(&all, counts, |rank, part| {
                    buffer[starts[rank]..starts[rank] + part.len()].copy_from_slice(part);
                });
            }
            Transfer::AllToAll { send, recv, counts } => self.all_to_all(op, send, recv, counts)?,
            Transfer::Gather { root, send, recv, counts } => self.gather_to(op, *root, send, recv, counts)?,
            Transfer::Broadcast { root, buffer } => self.broadcast(op, *root, buffer)?,
            // A rank leaves the rail's barrier after all groups have passed theirs.
            Transfer::Barrier => {
                self.group.barrier(op)?.wait()?;
                self.rail.barrier(op)?.wait()?;
            }
        }
        self.finished.set(ticket + 1);
        Ok(())
    }

    fn abandon(&self, op: OpName) {
        // Handles that are dropped without waiting notify the ranks along both axes.
        for comm in [&self.group, &self.rail] {
            drop(comm.barrier(op));
        }
    }
}
