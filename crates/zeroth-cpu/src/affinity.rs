//! CPU affinity: the CPUs a process may use, and how ranks and threads divide them.
//!
//! CPUs are ordered by NUMA node, package and core; a rank's share is a contiguous range of that order, and so are the shares of
//! its threads. With more CPUs than threads a share has several CPUs, among which the system moves its thread, so that two jobs
//! on one machine do not compete for the same few.

use std::thread::ThreadId;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use zeroth_kernel::CpuShare;

/// 64-bit words of a serialized set.
const WORDS: usize = CpuSet::MAX_CPU / 64;

/// A set of CPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CpuAffinity(CpuSet);

impl CpuAffinity {
    /// The affinity mask of the calling thread; empty where it cannot be read.
    pub fn allowed() -> Self {
        Self(sched_getaffinity(None).unwrap_or_default())
    }

    /// The set as bytes, for other ranks.
    pub fn to_bytes(self) -> [u8; 8 * WORDS] {
        let mut bytes = [0; 8 * WORDS];
        for cpu in self.numbers() {
            bytes[cpu / 8] |= 1 << (cpu % 8);
        }
        bytes
    }

    /// The share of rank `rank`, given the sets of all ranks: an equal part where all sets are equal, the whole set where they are
    /// disjoint. `None` where they overlap in part: the launcher has chosen, and threads are not pinned.
    pub fn share(rank: usize, sets: &[[u8; 8 * WORDS]]) -> Option<CpuShare> {
        if sets.iter().all(|set| *set == sets[0]) {
            return Some(CpuShare { number: rank, of: sets.len() });
        }
        let overlap = |a: &[u8; 8 * WORDS], b: &[u8; 8 * WORDS]| a.iter().zip(b).any(|(a, b)| a & b != 0);
        let alone = (1..sets.len()).all(|at| sets[..at].iter().all(|other| !overlap(other, &sets[at])));
        alone.then_some(CpuShare { number: 0, of: 1 })
    }

    fn numbers(self) -> impl Iterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(move |cpu| self.0.is_set(*cpu))
    }

    /// One set per thread of a rank; `None` where ranks × threads exceed the CPUs or the process's CPU quota.
    pub(super) fn shares(self, share: CpuShare, threads: usize) -> Option<Vec<Self>> {
        let mut order: Vec<(Topology, usize)> = self.numbers().map(|cpu| (Topology::of(cpu), cpu)).collect();
        order.sort_unstable();
        let most = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(order.len());
        let wanted =
            threads.checked_mul(share.of).filter(|wanted| *wanted <= most && share.number < share.of)?;
        let set = |thread: usize| {
            let number = share.number * threads + thread;
            let range = number * order.len() / wanted..(number + 1) * order.len() / wanted;
            let mut set = CpuSet::new();
            order[range].iter().for_each(|(_, cpu)| set.set(*cpu));
            Self(set)
        };
        Some((0..threads).map(set).collect())
    }

    /// Pins the calling thread to these CPUs. Best effort: on failure it runs anywhere.
    pub(super) fn pin_thread(self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// A CPU's NUMA node, package and core; 0 where unknown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Topology([usize; 3]);

impl Topology {
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

/// A pinned thread and its previous affinity.
pub(super) struct Pinned {
    thread: ThreadId,
    before: CpuAffinity,
}

impl Pinned {
    pub(super) fn new(before: CpuAffinity) -> Self {
        Self { thread: std::thread::current().id(), before }
    }

    /// Restores the thread's affinity; does nothing on another thread.
    pub(super) fn restore(self) {
        if std::thread::current().id() == self.thread {
            self.before.pin_thread();
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
    fn equal_sets_are_divided_and_disjoint_sets_kept() {
        let [all, left, right] = [&[0, 1, 2, 70][..], &[0, 1], &[2, 70]].map(|cpus| set(cpus).to_bytes());
        assert_eq!(CpuAffinity::share(1, &[all, all]), Some(CpuShare { number: 1, of: 2 }));
        assert_eq!(CpuAffinity::share(1, &[left, right]), Some(CpuShare { number: 0, of: 1 }));
        assert_eq!(CpuAffinity::share(1, &[all, right]), None);
        assert_eq!(CpuAffinity::share(2, &[left, right, left]), None);
    }

    #[test]
    fn shares_are_disjoint_and_cover_all_cpus() {
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
    fn a_pool_pins_its_threads_until_it_is_dropped() {
        let before = CpuAffinity::allowed();
        let threads = std::thread::available_parallelism().unwrap().get().min(2);
        let share = CpuShare { number: 0, of: 1 };
        let shares = before.shares(share, threads).unwrap();
        let mut pool = Pool::new(threads);
        pool.pin(share);
        pool.run(64, |_, thread| assert!(CpuAffinity::allowed() == shares[thread]));
        drop(pool);
        assert!(CpuAffinity::allowed() == before);
    }
}
