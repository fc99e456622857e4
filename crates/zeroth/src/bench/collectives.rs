//! How near the collectives of local ranks come to a plain copy of the same bytes.
//!
//! Ranks are threads of this process, joined over the shared segment as processes are. A rate counts the bytes that a rank
//! ends up with and did not have in place; a copy of n bytes counts n. `all_gather` and `all_to_all` give a part of every
//! rank, in place it is the others' parts. A reduce-scatter is `all_to_all` and our sum in rank order, and counts what is
//! added. The slower rank's time counts, and the limit is a copy past the caches by all ranks at the same time.

use std::time::Instant;

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;
use zeroth_comm::local::{Job, LocalComm, Options};
use zeroth_comm::{Comm, CommError, JoinError, OpName};
use zeroth_device::bench::{COPY, Measured, Rate, Unit, copy, fill_random};
use zeroth_device::cpu::{Arena, Pool, sum_ranks};
use zeroth_device::{DeviceError, Span};

/// Bytes of a rank's region in the shared segment, as runs have it.
const REGION: usize = 8 << 20;

/// What stops it.
#[derive(Debug, thiserror::Error)]
pub enum CollectivesError {
    /// Memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Ranks could not meet.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A rank ended without a word.
    #[error("a rank panicked")]
    Panicked,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Copy,
    AllGather,
    AllGatherInPlace,
    AllToAll,
    ReduceScatter,
}

impl Kind {
    const ALL: [Self; 5] =
        [Self::Copy, Self::AllGather, Self::AllGatherInPlace, Self::AllToAll, Self::ReduceScatter];

    const fn name(self) -> &'static str {
        match self {
            Self::Copy => COPY,
            Self::AllGather => "all_gather",
            Self::AllGatherInPlace => "all_gather in place",
            Self::AllToAll => "all_to_all",
            Self::ReduceScatter => "reduce-scatter, bf16 to f32",
        }
    }

    /// Parts that a rate counts.
    const fn parts(self, ranks: usize) -> usize {
        match self {
            Self::Copy => 1,
            Self::AllGatherInPlace => ranks - 1,
            _ => ranks,
        }
    }
}

/// One rank with its memory: what it has, what it receives, and what sums go to.
struct Member {
    comm: LocalComm,
    pool: Pool,
    own: Arena,
    all: Arena,
    sums: Arena,
    index: u32,
}

impl Member {
    fn new(comm: LocalComm, largest: usize) -> Result<Self, DeviceError> {
        let (pool, rank) = (Pool::new(1), comm.rank() as u64);
        let arena = |bytes: usize| Arena::new("device", bytes as u64);
        let all_parts = comm.world() * largest;
        let (mut own, mut all, sums) = (arena(all_parts)?, arena(all_parts)?, arena(2 * largest)?);
        for (name, arena) in [&mut own, &mut all].into_iter().enumerate() {
            let numbers = cast_slice_mut::<u8, bf16>(first(arena, all_parts)?);
            fill_random(2 * rank + name as u64, numbers);
        }
        Ok(Self { comm, pool, own, all, sums, index: 0 })
    }

    /// All ranks begin together; gives this rank's seconds.
    fn burst(&mut self, kind: Kind, bytes: usize) -> Result<f64, CollectivesError> {
        let Self { comm, pool, own, all, sums, index } = self;
        let ranks = comm.world();
        let (own, all) = (first(own, ranks * bytes)?, first(all, ranks * bytes)?);
        let counts = vec![bytes; ranks];
        let starts: Vec<usize> = (0..ranks).map(|rank| rank * bytes).collect();
        *index += 2;
        comm.barrier(OpName::new(1, "begin", *index))?.wait()?;
        let op = OpName::new(1, kind.name(), *index + 1);
        let start = Instant::now();
        match kind {
            Kind::Copy => copy(pool, cast_slice(&own[..bytes]), cast_slice_mut(&mut all[..bytes])),
            Kind::AllGather => comm.all_gather(op, &own[..bytes], all, &counts)?.wait()?,
            Kind::AllGatherInPlace => comm.all_gather_in_place(op, all, &starts, &counts)?.wait()?,
            Kind::AllToAll => comm.all_to_all(op, own, all, &counts)?.wait()?,
            Kind::ReduceScatter => {
                comm.all_to_all(op, own, all, &counts)?.wait()?;
                let sums = cast_slice_mut::<u8, f32>(first(sums, 2 * bytes)?);
                sum_ranks::<bf16, f32>(pool, cast_slice(all), sums, false);
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

fn first(arena: &mut Arena, bytes: usize) -> Result<&mut [u8], DeviceError> {
    arena.bytes_mut(Span::device(0, bytes as u64))
}

/// Collectives of `ranks` ranks whose parts have these bytes, `rounds` bursts of each in turns. `told` hears of every round.
pub fn collectives(
    ranks: usize,
    sizes: &[usize],
    rounds: usize,
    told: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Measured>, CollectivesError> {
    let job = Job::create(ranks, REGION)?;
    let rank = |rank: usize| -> Result<Vec<Vec<f64>>, CollectivesError> {
        let comm = job.join(rank, &Options::default())?;
        let mut member = Member::new(comm, sizes.iter().copied().max().unwrap_or(0))?;
        let mut seconds = vec![Vec::with_capacity(rounds); sizes.len() * Kind::ALL.len()];
        for round in 0..=rounds {
            if rank == 0 {
                told(round);
            }
            for (bytes, seconds) in sizes.iter().zip(seconds.chunks_mut(Kind::ALL.len())) {
                for (kind, seconds) in Kind::ALL.into_iter().zip(seconds) {
                    let burst = member.burst(kind, *bytes)?;
                    // The first touches the memory.
                    if round > 0 {
                        seconds.push(burst);
                    }
                }
            }
        }
        Ok(seconds)
    };
    let of_ranks: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..ranks).map(|number| scope.spawn(move || rank(number))).collect();
        let joined =
            threads.into_iter().map(|thread| thread.join().map_err(|_| CollectivesError::Panicked)?);
        joined.collect::<Result<_, _>>()
    })?;
    let mut lines = Vec::new();
    for (size, bytes) in sizes.iter().enumerate() {
        let rate = |place: usize, kind: Kind| {
            let seconds =
                &of_ranks.iter().map(|rank| &rank[size * Kind::ALL.len() + place]).collect::<Vec<_>>();
            let slower = (0..rounds).map(|round| seconds.iter().map(|rank| rank[round]).fold(0.0, f64::max));
            let amount = (kind.parts(ranks) * bytes) as f64;
            Rate::of(slower.map(|seconds| amount / seconds / 1e9).collect())
        };
        let limit = rate(0, Kind::Copy);
        for (place, kind) in Kind::ALL.into_iter().enumerate() {
            let name = format!("{}, {} MiB", kind.name(), bytes >> 20);
            let (against, beside) = (format!("{COPY}, {} MiB", bytes >> 20), place > 0);
            let limit = beside.then_some((against.as_str(), limit));
            lines.push(Measured::new(name, ranks, Unit::Gigabytes, rate(place, kind), limit));
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_collective_has_a_rate_beside_the_copy() {
        let lines = collectives(3, &[1 << 20, 2 << 20], 2, &|_| {}).unwrap();
        assert_eq!(lines.len(), 10);
        assert!(lines.iter().all(|line| line.threads == 3 && line.best >= line.median && line.median > 0.0));
        assert_eq!(lines.iter().filter(|line| line.percent.is_some()).count(), 8);
    }

    #[test]
    fn a_reduce_scatter_adds_what_all_ranks_have() {
        let job = Job::create(2, REGION).unwrap();
        let bytes = 1 << 16;
        let parts = std::thread::scope(|scope| {
            let threads = [0, 1].map(|rank| {
                let comm = job.join(rank, &Options::default()).unwrap();
                scope.spawn(move || {
                    let mut member = Member::new(comm, bytes).unwrap();
                    member.burst(Kind::ReduceScatter, bytes).unwrap();
                    let own = cast_slice::<u8, bf16>(first(&mut member.own, 2 * bytes).unwrap()).to_vec();
                    (own, cast_slice::<u8, f32>(first(&mut member.sums, 2 * bytes).unwrap()).to_vec())
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let half = bytes / 2;
        for (rank, (_, sums)) in parts.iter().enumerate() {
            for (at, sum) in sums.iter().enumerate() {
                let place = rank * half + at;
                assert_eq!(*sum, parts[0].0[place].to_f32() + parts[1].0[place].to_f32());
            }
        }
    }
}
