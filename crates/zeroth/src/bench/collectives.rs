//! Benchmarks the collectives of a step against a plain copy of the same bytes.
//!
//! Ranks are threads of this process, joined as processes are. They exchange data as CPU ranks do in a step
//! ([`CollectiveBench`]): each reads what it needs from the others' memory in one pass. Bandwidth counts the bytes that a
//! rank receives or, in a reduce-scatter, adds; a copy of n bytes counts n. The slowest rank's time counts, and the
//! limit is a non-temporal copy by all ranks at once.

use std::time::Instant;

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, CommError, JoinError, JoinOptions, OpName};
use zeroth_cpu::{Arena, Pool};
use zeroth_engine::{BenchedCollective, CollectiveBench, RunError};
use zeroth_kernel::{DeviceError, Span};
use zeroth_machine::bench::{BenchResult, COPY, Rate, RateUnit, copy, fill_random};

/// Size of a rank's region in the shared segment, as in real runs.
const REGION: usize = 8 << 20;

/// An error of the benchmark.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum CollectivesError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("a rank panicked")]
    Panicked,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Copy,
    Met(BenchedCollective),
}

impl Kind {
    const ALL: [Self; 4] = [
        Self::Copy,
        Self::Met(BenchedCollective::Gather),
        Self::Met(BenchedCollective::GatherInPlace),
        Self::Met(BenchedCollective::Reduce),
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Copy => COPY,
            Self::Met(BenchedCollective::Gather) => "all_gather",
            Self::Met(BenchedCollective::GatherInPlace) => "all_gather in place",
            Self::Met(BenchedCollective::Reduce) => "reduce-scatter, bf16 to f32",
        }
    }

    /// Shards that the bandwidth counts.
    const fn parts(self, ranks: usize) -> usize {
        match self {
            Self::Copy => 1,
            Self::Met(BenchedCollective::GatherInPlace) => ranks - 1,
            Self::Met(BenchedCollective::Gather | BenchedCollective::Reduce) => ranks,
        }
    }
}

/// One rank with its copy buffers and its part in the collectives of one size.
struct Member {
    bench: CollectiveBench,
    pool: Pool,
    from: Arena,
    to: Arena,
    bytes: usize,
    index: u32,
}

impl Member {
    fn new(comm: Box<dyn Comm>, bytes: usize) -> Result<Self, CollectivesError> {
        let arena = || Arena::new("device", bytes as u64);
        let (mut from, to) = (arena()?, arena()?);
        let mut bench = CollectiveBench::new(comm, bytes as u64, 1)?;
        let name = 4 * bench.comm().rank() as u64;
        fill_random(name, cast_slice_mut::<u8, bf16>(whole(&mut from, bytes)?));
        fill_random(name + 1, cast_slice_mut::<u8, bf16>(bench.shard()?));
        fill_random(name + 2, cast_slice_mut::<u8, bf16>(bench.gathered()?));
        fill_random(name + 3, cast_slice_mut::<u8, bf16>(bench.gradients()?));
        Ok(Self { bench, pool: Pool::new(1), from, to, bytes, index: 0 })
    }

    /// Runs one burst after a barrier; returns this rank's seconds.
    fn burst(&mut self, kind: Kind) -> Result<f64, CollectivesError> {
        let Self { bench, pool, from, to, bytes, index } = self;
        *index += 1;
        bench.comm().barrier(OpName::new(1, "begin", *index))?.wait()?;
        let start = Instant::now();
        match kind {
            Kind::Copy => {
                copy(pool, cast_slice(whole(from, *bytes)?), cast_slice_mut(whole(to, *bytes)?));
            }
            Kind::Met(what) => bench.run(what)?,
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

fn whole(arena: &mut Arena, bytes: usize) -> Result<&mut [u8], DeviceError> {
    arena.bytes_mut(Span::device(0, bytes as u64))
}

/// Benchmarks collectives of `ranks` ranks with shards of these sizes, `rounds` bursts each, interleaved. `progress` is
/// called every round.
pub fn collectives(
    ranks: usize,
    sizes: &[usize],
    rounds: usize,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<BenchResult>, CollectivesError> {
    // Peers are mapped once per job, so each size needs its own.
    let jobs = sizes.iter().map(|_| LocalJob::create(ranks, REGION)).collect::<Result<Vec<_>, _>>()?;
    let rank = |rank: usize| -> Result<Vec<Vec<f64>>, CollectivesError> {
        let mut members = Vec::with_capacity(sizes.len());
        for (job, bytes) in jobs.iter().zip(sizes) {
            members.push(Member::new(job.join(rank, &JoinOptions::default())?, *bytes)?);
        }
        let mut seconds = vec![Vec::with_capacity(rounds); sizes.len() * Kind::ALL.len()];
        for round in 0..=rounds {
            if rank == 0 {
                progress(round);
            }
            for (member, seconds) in members.iter_mut().zip(seconds.chunks_mut(Kind::ALL.len())) {
                for (kind, seconds) in Kind::ALL.into_iter().zip(seconds) {
                    let burst = member.burst(kind)?;
                    // The first round faults the memory in.
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
            lines.push(BenchResult::new(name, ranks, RateUnit::Gigabytes, rate(place, kind), limit));
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
        assert_eq!(lines.len(), 8);
        assert!(lines.iter().all(|line| line.threads == 3 && line.best >= line.median && line.median > 0.0));
        assert_eq!(lines.iter().filter(|line| line.percent.is_some()).count(), 6);
    }

    #[test]
    fn collectives_deliver_the_other_ranks_data() {
        let job = LocalJob::create(2, REGION).unwrap();
        let bytes = 1 << 16;
        let found = std::thread::scope(|scope| {
            let threads = [0, 1].map(|rank| {
                let comm = job.join(rank, &JoinOptions::default()).unwrap();
                scope.spawn(move || {
                    let mut member = Member::new(comm, bytes).unwrap();
                    let own = member.bench.shard().unwrap().to_vec();
                    let rounded = cast_slice::<u8, bf16>(member.bench.gradients().unwrap()).to_vec();
                    for kind in Kind::ALL {
                        member.burst(kind).unwrap();
                    }
                    let gathered = member.bench.gathered().unwrap().to_vec();
                    let sums = cast_slice::<u8, f32>(member.bench.sums().unwrap()).to_vec();
                    (own, gathered, rounded, sums)
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let shards = [found[0].0.as_slice(), &found[1].0].concat();
        for (rank, (_, gathered, _, sums)) in found.iter().enumerate() {
            assert!(*gathered == shards, "rank {rank}");
            for (at, sum) in sums.iter().enumerate() {
                let place = rank * bytes / 2 + at;
                assert_eq!(*sum, found[0].2[place].to_f32() + found[1].2[place].to_f32());
            }
        }
    }
}
