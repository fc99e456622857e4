//! The thread pool of the kernels: threads are started once and parked between kernels. Pinned threads spin before parking,
//! because the next kernel mostly arrives sooner than a wake-up would take.
//!
//! A kernel partitions its work into tasks by shape, and threads take tasks dynamically. No result may depend on which thread runs
//! a task: a task writes only its own part, and sums have a fixed order within a task.
#![allow(unsafe_code, reason = "a closure on the caller's stack is run by threads that outlive it")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::affinity::{CpuAffinity, Pinned};
use super::isa::Isa;
use super::work_partition::{Chunks, Partition};
use zeroth_kernel::{CpuShare, DeviceError};

type Work = dyn Fn(usize) + Sync;

/// Spins of a pinned thread before it parks: some tens of microseconds.
const SPINS: u32 = 2_000;

/// A closure borrowed by the workers.
#[derive(Clone, Copy)]
struct BorrowedWork(*const Work);

// SAFETY: the closure is Sync, and `Pool::run` does not return before every worker has finished with it.
unsafe impl Send for BorrowedWork {}

#[derive(Default)]
struct State {
    /// Counts the jobs, so that a worker runs each of them once.
    job: u64,
    work: Option<BorrowedWork>,
    /// Workers that have not finished the job.
    busy: usize,
    panicked: bool,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    begin: Condvar,
    done: Condvar,
    /// `State::job`, or the largest number at shutdown, for spinning without the lock. `State` is authoritative.
    job: AtomicU64,
    /// `State::busy`, likewise.
    busy: AtomicUsize,
    /// Spins before parking.
    spins: AtomicU32,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spins until `is_ready`, for a while.
    fn spin_until(&self, is_ready: impl Fn() -> bool) {
        // Relaxed, here and in the callers: afterwards only the state is read, under its lock.
        for _ in 0..self.spins.load(Ordering::Relaxed) {
            if is_ready() {
                return;
            }
            std::hint::spin_loop();
        }
    }
}

/// A fixed number of threads and the ISA of their kernels.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job the workers run.
    caller: Mutex<()>,
    isa: Isa,
    /// The thread that pinned the pool, and its previous affinity.
    pinned: Option<Pinned>,
}

impl Pool {
    /// A pool of `threads` threads, the calling one included, on the ISA that `ZEROTH_CPU` names, or on the best one where it names
    /// none that is available ([`Isa::chosen`] returns the error).
    pub fn start(threads: usize) -> Result<Self, DeviceError> {
        Self::start_on(threads, Isa::chosen().unwrap_or_else(|_| Isa::detect()))
    }

    /// [`Pool::start`] for tests and examples.
    ///
    /// # Panics
    /// When a thread cannot be started.
    pub fn new(threads: usize) -> Self {
        Self::start(threads).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A pool on a given ISA, for tests; `None` where this CPU lacks it.
    ///
    /// # Panics
    /// When a thread cannot be started.
    pub fn on_isa(threads: usize, isa: Isa) -> Option<Self> {
        let start = || Self::start_on(threads, isa).unwrap_or_else(|error| panic!("{error}"));
        Isa::available().contains(&isa).then(start)
    }

    fn start_on(threads: usize, isa: Isa) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared::default());
        let threads = threads.max(1);
        // Dropped on an error, it stops the workers that did start.
        let mut pool = Self { shared, workers: Vec::new(), caller: Mutex::new(()), isa, pinned: None };
        for number in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("kernel-{number}"))
                .spawn(move || serve(&shared, number))
                .map_err(|error| DeviceError::Threads { number, threads, reason: error.to_string() })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Pins every thread, the calling one included, to its own part of the rank's share of the CPUs. Does nothing where
    /// ranks × threads exceed the CPUs.
    ///
    /// The calling thread's affinity is restored when it drops the pool.
    pub fn pin(&mut self, share: CpuShare) {
        let allowed = CpuAffinity::allowed();
        let Some(shares) = allowed.shares(share, self.threads()) else { return };
        self.pinned.get_or_insert_with(|| Pinned::new(allowed));
        self.shared.spins.store(SPINS, Ordering::Relaxed);
        self.on_all(&|thread| shares[thread].pin_thread());
    }

    /// Threads that run tasks, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The ISA of this pool's kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Calls `task(index, thread)` once for every index below `tasks` and returns when all are done.
    ///
    /// Thread numbers are below [`Pool::threads`]; concurrent tasks have different ones. A call from inside a task, or while
    /// another thread uses the pool, runs on the calling thread alone.
    pub fn run(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        let free = match self.caller.try_lock() {
            Ok(free) => Some(free),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        };
        if free.is_none() || self.workers.is_empty() || tasks < 2 {
            (0..tasks).for_each(|index| task(index, 0));
            return;
        }
        let next = AtomicUsize::new(0);
        self.on_all(&|thread| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= tasks {
                    break;
                }
                task(index, thread);
            }
        });
    }

    /// Runs `work` once on every thread.
    fn on_all(&self, work: &(dyn Fn(usize) + Sync + '_)) {
        // SAFETY: only the lifetime is extended; this function waits until busy is 0, also when `work` panics here.
        let work_ref =
            BorrowedWork(unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync + '_), &'static Work>(work) });
        {
            let mut state = self.shared.lock();
            state.job += 1;
            state.work = Some(work_ref);
            state.busy = self.workers.len();
            self.shared.busy.store(state.busy, Ordering::Relaxed);
            self.shared.job.store(state.job, Ordering::Relaxed);
            self.shared.begin.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| work(0)));
        self.shared.spin_until(|| self.shared.busy.load(Ordering::Relaxed) == 0);
        let mut state = self.shared.lock();
        while state.busy > 0 {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.work = None;
        let panicked = std::mem::take(&mut state.panicked);
        drop(state);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!panicked, "a kernel panicked on a worker thread; its message is above");
    }

    /// Runs one task per part.
    #[allow(clippy::needless_pass_by_value, reason = "a part is handed out once")]
    pub fn each<P: Partition>(&self, parts: P, task: impl Fn(usize, P::Part) + Sync) {
        self.run(parts.count(), |index, _| {
            // SAFETY: `run` calls once for every index below count.
            task(index, unsafe { parts.part(index) });
        });
    }

    /// [`Pool::each`] with a piece of `scratch` per thread, of arbitrary contents.
    #[allow(clippy::needless_pass_by_value, reason = "a part is handed out once")]
    pub fn each_with<P: Partition>(
        &self,
        parts: P,
        scratch: &mut [f32],
        task: impl Fn(usize, P::Part, &mut [f32]) + Sync,
    ) {
        let piece = scratch.len() / self.threads();
        let pieces = Chunks::new(&mut scratch[..piece * self.threads()], piece);
        self.run(parts.count(), |index, thread| {
            // SAFETY: `run` calls once for every index below count, and a thread runs one task at a time.
            let (part, own) =
                unsafe { (parts.part(index), if piece == 0 { &mut [] } else { pieces.part(thread) }) };
            task(index, part, own);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.job.store(u64::MAX, Ordering::Relaxed);
        self.shared.begin.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks.
            let _ = worker.join();
        }
        if let Some(pinned) = self.pinned.take() {
            pinned.restore();
        }
    }
}

/// The loop of a worker.
fn serve(shared: &Shared, number: usize) {
    let mut seen = 0;
    loop {
        shared.spin_until(|| shared.job.load(Ordering::Relaxed) != seen);
        let work = {
            let mut state = shared.lock();
            while !state.stop && state.job == seen {
                state = shared.begin.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.stop {
                return;
            }
            seen = state.job;
            state.work.expect("a job has work until every worker has finished it")
        };
        // SAFETY: the caller waits in `on_all` until this worker has decremented `busy` below.
        let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)(number) }));
        let mut state = shared.lock();
        state.panicked |= outcome.is_err();
        state.busy -= 1;
        shared.busy.store(state.busy, Ordering::Relaxed);
        if state.busy == 0 {
            shared.done.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_for_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |index, thread| {
                    assert!(thread < threads);
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_nested_call_runs_on_the_calling_thread() {
        let pool = Pool::new(2);
        let total = AtomicUsize::new(0);
        pool.run(4, |_, _| {
            pool.run(5, |index, _| {
                total.fetch_add(index, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 40);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            pool.run(64, |index, _| assert!(index != 40, "task 40"));
        }));
        assert!(panic.is_err());
        let total = AtomicUsize::new(0);
        pool.run(10, |index, _| {
            total.fetch_add(index, Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 45);
    }

    #[test]
    fn pinned_threads_run_every_task_once() {
        let threads = std::thread::available_parallelism().unwrap().get().min(2);
        let mut pool = Pool::new(threads);
        pool.pin(CpuShare { number: 0, of: 1 });
        let total = AtomicUsize::new(0);
        for round in 0..2_000 {
            pool.run(3, |index, _| {
                total.fetch_add(index, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                // Long enough to park.
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        assert_eq!(total.into_inner(), 6_000);
    }
}
