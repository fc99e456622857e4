//! What collectives must do, written as plainly as possible: nothing is shared, every rank's bytes are a formula.

use zeroth_comm::{Comm, CommError, Handle, OpName, Transfer};

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    AllGather,
    AllGatherInPlace,
    AllToAll,
    Gather,
    Broadcast,
    Barrier,
}

/// A collective of a test: the same on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) op: OpName,
    pub(crate) root: usize,
    /// One entry a rank. A broadcast moves the first.
    pub(crate) counts: Vec<usize>,
}

/// The byte at `place` of what `rank` sends: different for every rank, place and collective.
fn byte(case: &Case, rank: usize, place: usize) -> u8 {
    let mixed =
        (rank as u64 + 1) * 0x9e37_79b9 + place as u64 * 0x85eb_ca6b + u64::from(case.op.index) * 0xc2b2_ae35;
    (mixed >> 7) as u8
}

fn bytes(case: &Case, rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|place| byte(case, rank, place)).collect()
}

/// A rank's two buffers; `recv` begins with a value that no test expects to stay.
pub(crate) struct Buffers {
    send: Vec<u8>,
    recv: Vec<u8>,
    starts: Vec<usize>,
}

impl Case {
    pub(crate) fn buffers(&self, rank: usize) -> Buffers {
        let (all, own, world) = (self.counts.iter().sum(), self.counts[rank], self.counts.len());
        let (send, recv) = match self.kind {
            Kind::AllGather => (own, all),
            // Two bytes between parts.
            Kind::AllGatherInPlace => (0, all + 2 * world),
            Kind::AllToAll => (all, world * own),
            Kind::Gather => (own, if rank == self.root { all } else { 0 }),
            Kind::Broadcast => (0, self.counts[0]),
            Kind::Barrier => (0, 0),
        };
        let mut recv = vec![0xa5; recv];
        if self.kind == Kind::Broadcast && rank == self.root {
            recv = bytes(self, rank, recv.len());
        }
        if self.kind == Kind::AllGatherInPlace {
            let start = self.starts()[rank];
            recv[start..start + own].copy_from_slice(&bytes(self, rank, own));
        }
        Buffers { send: bytes(self, rank, send), recv, starts: self.starts() }
    }

    /// Where parts begin, for a gather in place.
    fn starts(&self) -> Vec<usize> {
        (0..self.counts.len()).map(|rank| self.counts[..rank].iter().sum::<usize>() + 2 * rank).collect()
    }

    pub(crate) fn start<'a>(
        &'a self,
        comm: &'a dyn Comm,
        buffers: &'a mut Buffers,
    ) -> Result<Handle<'a>, CommError> {
        let Buffers { send, recv, starts } = buffers;
        match self.kind {
            Kind::AllGather => comm.all_gather(self.op, send, recv, &self.counts),
            Kind::AllGatherInPlace => {
                comm.start(self.op, Transfer::AllGatherInPlace { buffer: recv, starts, counts: &self.counts })
            }
            Kind::AllToAll => comm.start(self.op, Transfer::AllToAll { send, recv, counts: &self.counts }),
            Kind::Gather => comm.gather(self.op, self.root, send, recv, &self.counts),
            Kind::Broadcast => comm.start(self.op, Transfer::Broadcast { root: self.root, buffer: recv }),
            Kind::Barrier => comm.barrier(self.op),
        }
    }

    /// What `rank` must have received, from the formula alone.
    pub(crate) fn check(&self, rank: usize, buffers: &Buffers) {
        let world = self.counts.len();
        let parts = || (0..world).flat_map(|from| bytes(self, from, self.counts[from]));
        let expected: Vec<u8> = match self.kind {
            Kind::AllGather => parts().collect(),
            Kind::AllGatherInPlace => (0..world)
                .flat_map(|from| bytes(self, from, self.counts[from]).into_iter().chain([0xa5; 2]))
                .collect(),
            Kind::Gather if rank == self.root => parts().collect(),
            Kind::Gather | Kind::Barrier => Vec::new(),
            Kind::Broadcast => bytes(self, self.root, self.counts[0]),
            Kind::AllToAll => {
                let start: usize = self.counts[..rank].iter().sum();
                let mine = start..start + self.counts[rank];
                (0..world).flat_map(|from| mine.clone().map(move |place| byte(self, from, place))).collect()
            }
        };
        assert!(buffers.recv == expected, "rank {rank} of {world}: wrong bytes after {self:?}");
    }

    pub(crate) fn run(&self, comm: &dyn Comm) -> Result<(), CommError> {
        let mut buffers = self.buffers(comm.rank());
        self.start(comm, &mut buffers)?.wait()?;
        self.check(comm.rank(), &buffers);
        Ok(())
    }
}

/// Every collective, with sizes that a region of `region` bytes holds, just holds, does not hold, and uneven ones.
pub(crate) fn cases(world: usize, region: usize) -> Vec<Case> {
    let uneven = |seed: usize| (0..world).map(|rank| (rank * 7919 + seed * 31) % (2 * region + 3)).collect();
    let mut sizes: Vec<Vec<usize>> = [0, 1, 63, region / 2, region / 2 + 1, 3 * region + 7]
        .iter()
        .map(|size| vec![*size; world])
        .collect();
    sizes.extend((0..3).map(uneven));
    // Only the last rank has anything.
    sizes.push((0..world).map(|rank| if rank + 1 == world { 777 } else { 0 }).collect());
    let mut cases = Vec::new();
    for counts in sizes {
        for kind in [
            Kind::AllGather,
            Kind::AllGatherInPlace,
            Kind::AllToAll,
            Kind::Gather,
            Kind::Broadcast,
            Kind::Barrier,
        ] {
            let index = cases.len() as u32;
            let (op, root) = (OpName::new(1, "case", index), index as usize % world);
            cases.push(Case { kind, op, root, counts: counts.clone() });
        }
    }
    cases
}
