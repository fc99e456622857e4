//! The processors that a process may use, and how ranks and threads divide them.
//!
//! Neighbours in the order used here share a core, a package, a memory node: a rank's part is one run of that order, and so
//! are the parts of its threads. On a machine with more processors than threads a part has several, among which the
//! system moves its thread: two jobs that divide the same machine do not sit on the same few processors.

use std::thread::ThreadId;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use zeroth_kernel::CpuShare;

/// Words of a set that is sent to other ranks.
const WORDS: usize = CpuSet::MAX_CPU / 64;

/// A set of processors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CpuAffinity(CpuSet);

impl CpuAffinity {
    /// Those that the calling thread may run on; none of them where the system does not say.
    pub fn allowed() -> Self {
        Self(sched_getaffinity(None).unwrap_or_default())
    }

    /// The set as bytes that ranks compare.
    pub fn to_bytes(self) -> [u8; 8 * WORDS] {
        let mut bytes = [0; 8 * WORDS];
        for cpu in self.numbers() {
            bytes[cpu / 8] |= 1 << (cpu % 8);
        }
        bytes
    }

    /// The seat of rank `rank` where every rank sent the bytes of its set: a part of the processors that all share, or all
    /// of those that it has alone. None where some are shared and some are not: who started the ranks knows better.
    pub fn share(rank: usize, sets: &[[u8; 8 * WORDS]]) -> Option<CpuShare> {
        if sets.iter().all(|set| *set == sets[0]) {
            return Some(CpuShare { number: rank, of: sets.len() });
        }
        let meet = |a: &[u8; 8 * WORDS], b: &[u8; 8 * WORDS]| a.iter().zip(b).any(|(a, b)| a & b != 0);
        let alone = (1..sets.len()).all(|at| sets[..at].iter().all(|other| !meet(other, &sets[at])));
        alone.then_some(CpuShare { number: 0, of: 1 })
    }

    fn numbers(self) -> impl Iterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(move |cpu| self.0.is_set(*cpu))
    }

    /// A part for each of `threads` threads of the rank on `seat`; none where they are more than there are processors, or
    /// than the system gives this process time of.
    pub(super) fn shares(self, seat: CpuShare, threads: usize) -> Option<Vec<Self>> {
        let mut order: Vec<(Place, usize)> = self.numbers().map(|cpu| (Place::of(cpu), cpu)).collect();
        order.sort_unstable();
        let most = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(order.len());
        let wanted =
            threads.checked_mul(seat.of).filter(|wanted| *wanted <= most && seat.number < seat.of)?;
        let share = |thread: usize| {
            let number = seat.number * threads + thread;
            let range = number * order.len() / wanted..(number + 1) * order.len() / wanted;
            let mut set = CpuSet::new();
            order[range].iter().for_each(|(_, cpu)| set.set(*cpu));
            Self(set)
        };
        Some((0..threads).map(share).collect())
    }

    /// Keeps the calling thread on these processors. One that has gone since is no reason to stop: then it runs anywhere.
    pub(super) fn take(self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// Where a processor sits: memory node, package, core. Unknown ones count as 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place([usize; 3]);

impl Place {
    fn of(cpu: usize) -> Self {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}");
        let number = |name: &str| {
            std::fs::read_to_string(format!("{folder}/topology/{name}")).ok()?.trim().parse().ok()
        };
        let node = std::fs::read_dir(&folder).ok().and_then(|entries| {
            let names = entries.flatten().map(|entry| entry.file_name());
            names.into_iter().find_map(|name| name.to_str()?.strip_prefix("node")?.parse().ok())
        });
        Self([node, number("physical_package_id"), number("core_id")].map(|place| place.unwrap_or(0)))
    }
}

/// A thread that was pinned, and what it was allowed before.
pub(super) struct Pinned {
    thread: ThreadId,
    before: CpuAffinity,
}

impl Pinned {
    pub(super) fn new(before: CpuAffinity) -> Self {
        Self { thread: std::thread::current().id(), before }
    }

    /// Gives the thread back what it was allowed; from another thread it stays as it is.
    pub(super) fn undo(self) {
        if std::thread::current().id() == self.thread {
            self.before.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    fn set(cpus: &[usize]) -> CpuAffinity {
        let mut set = CpuSet::new();
        for cpu in cpus {
            set.set(*cpu);
        }
        CpuAffinity(set)
    }

    #[test]
    fn ranks_that_share_all_divide_them_and_ranks_that_share_none_keep_theirs() {
        let [all, left, right] = [&[0, 1, 2, 70][..], &[0, 1], &[2, 70]].map(|cpus| set(cpus).to_bytes());
        assert_eq!(CpuAffinity::share(1, &[all, all]), Some(CpuShare { number: 1, of: 2 }));
        assert_eq!(CpuAffinity::share(1, &[left, right]), Some(CpuShare { number: 0, of: 1 }));
        assert_eq!(CpuAffinity::share(1, &[all, right]), None);
        assert_eq!(CpuAffinity::share(2, &[left, right, left]), None);
    }

    #[test]
    fn shares_are_disjoint_and_all_processors_are_used() {
        let allowed = CpuAffinity::allowed();
        let count = allowed.numbers().count();
        let most = std::thread::available_parallelism().unwrap().get().min(count);
        for threads in 1..=most {
            for ranks in 1..=most / threads {
                let of_rank = |number| allowed.shares(CpuShare { number, of: ranks }, threads).unwrap();
                let mut taken: Vec<usize> =
                    (0..ranks).flat_map(of_rank).flat_map(CpuAffinity::numbers).collect();
                taken.sort_unstable();
                assert_eq!(taken, allowed.numbers().collect::<Vec<_>>(), "{ranks} × {threads}");
            }
        }
        assert!(allowed.shares(CpuShare { number: 0, of: most + 1 }, 1).is_none());
        assert!(allowed.shares(CpuShare { number: 0, of: 1 }, most + 1).is_none());
        assert!(allowed.shares(CpuShare { number: 1, of: 1 }, 1).is_none());
    }

    #[test]
    fn a_pool_keeps_its_threads_on_their_processors_until_it_is_dropped() {
        let before = CpuAffinity::allowed();
        let threads = std::thread::available_parallelism().unwrap().get().min(2);
        let seat = CpuShare { number: 0, of: 1 };
        let shares = before.shares(seat, threads).unwrap();
        let mut pool = Pool::new(threads);
        pool.pin(seat);
        pool.run(64, |_, thread| assert!(CpuAffinity::allowed() == shares[thread]));
        drop(pool);
        assert!(CpuAffinity::allowed() == before);
    }
}
