//! The thread that makes all calls of a communicator.
//!
//! A call into NCCL may block, even on a non-blocking communicator: it allocates, connects to peers and enqueues kernels. On
//! a thread of its own it delays no other: the rank's thread waits with a deadline and for the loss of a rank, and the
//! communicator is aborted by the one thread that is then certainly not inside NCCL.
#![allow(unsafe_code, reason = "calls into the library; signatures are those of nccl.h")]

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::functions::{Communicator, Configuration, Functions, IN_PROGRESS, UINT8, UniqueId};
use crate::driver::{Address, Driver, Handle};
use crate::loss::Loss;
use zeroth_kernel::DeviceError;

/// The longest sleep of a thread that waits, and so the interval at which it notices a lost rank.
const SLICE: Duration = Duration::from_millis(20);
/// The interval at which an idle communicator is asked for errors of the network.
const LOOK: Duration = Duration::from_millis(200);
/// Polls of a call in progress before the first sleep, and the sleep.
const SPINS: u32 = 500;
const NAP: Duration = Duration::from_micros(20);
/// The time for the communicator to end, and for one that has failed to be aborted.
const CLOSE: Duration = Duration::from_secs(5);
const CLOSE_FAILED: Duration = Duration::from_secs(1);

/// A part of an exchange, with addresses in the arenas and a size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    AllGather { from: Address, to: Address, bytes: usize },
    Broadcast { root: usize, from: Address, to: Address, bytes: usize },
    Send { to: usize, from: Address, bytes: usize },
    Receive { from: usize, to: Address, bytes: usize },
}

impl Operation {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::AllGather { bytes, .. }
            | Self::Broadcast { bytes, .. }
            | Self::Send { bytes, .. }
            | Self::Receive { bytes, .. } => bytes,
        }
    }
}

/// What a communicator is made of.
pub(super) struct Membership {
    pub(super) functions: Functions,
    pub(super) driver: Driver,
    /// The context of the rank's GPU.
    pub(super) context: Handle,
    pub(super) id: UniqueId,
    pub(super) rank: usize,
    pub(super) world: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Enqueue,
    Close,
}

#[derive(Default)]
struct State {
    task: Option<Task>,
    operations: Vec<Operation>,
    stream: Handle,
    /// The result of the last task; of opening at first.
    outcome: Option<Result<(), DeviceError>>,
    /// Why there is no communicator any more.
    failed: Option<DeviceError>,
    /// Nobody waits for the thread any more.
    abandoned: bool,
    /// The thread has ended.
    ended: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    loss: Arc<Loss>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder leaves the state half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, longest: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, longest).unwrap_or_else(PoisonError::into_inner).0
    }

    fn is_lost(&self) -> bool {
        self.loss.is_declared()
    }
}

/// A communicator's thread, as the rank's thread sees it.
pub(super) struct Worker(Arc<Shared>);

impl Worker {
    /// Starts the thread, which opens the communicator; waits until all ranks have joined.
    pub(super) fn open(
        membership: Membership,
        loss: Arc<Loss>,
        deadline: Duration,
    ) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), loss });
        let worker = Self(Arc::clone(&shared));
        let thread = std::thread::Builder::new().name(format!("nccl {}", membership.rank));
        thread
            .spawn(move || Thread { membership, communicator: 0, shared }.run())
            .map_err(|error| failed("starting a thread", error.to_string()))?;
        worker.outcome("ncclCommInitRankConfig", Some(deadline))?;
        Ok(worker)
    }

    /// Enqueues what `list` lists, as one NCCL group.
    pub(super) fn enqueue(
        &self,
        stream: Handle,
        deadline: Option<Duration>,
        list: impl FnOnce(&mut Vec<Operation>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut state = self.0.lock();
        if let Some(error) = state.failed.clone() {
            return Err(error);
        }
        if self.0.is_lost() {
            return Err(rank_lost());
        }
        state.operations.clear();
        list(&mut state.operations)?;
        state.operations.retain(|operation| operation.bytes() > 0);
        if state.operations.is_empty() {
            return Ok(());
        }
        state.stream = stream;
        state.task = Some(Task::Enqueue);
        drop(state);
        self.0.changed.notify_all();
        self.outcome("an exchange", deadline)
    }

    /// Waits for the result of the thread's task.
    fn outcome(&self, what: &str, deadline: Option<Duration>) -> Result<(), DeviceError> {
        let begun = Instant::now();
        let mut state = self.0.lock();
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            let overdue = deadline.is_some_and(|deadline| begun.elapsed() > deadline);
            if overdue || self.0.is_lost() {
                state.abandoned = true;
                let reason = format!("it has not returned in {} s", begun.elapsed().as_secs());
                let error = if overdue { failed(what, reason) } else { rank_lost() };
                state.failed.get_or_insert_with(|| error.clone());
                drop(state);
                self.0.changed.notify_all();
                return Err(error);
            }
            state = self.0.wait(state, SLICE);
        }
    }

    /// Why exchanges do not work any more, where that is so: what they wrote is undefined.
    pub(super) fn failure(&self) -> Option<DeviceError> {
        self.0.lock().failed.clone()
    }

    /// Aborts the communicator, so that streams do not wait for it any more.
    pub(super) fn abort(&self) {
        self.0.lock().abandoned = true;
        self.0.changed.notify_all();
    }

    /// Ends the communicator. All streams must be idle. A thread that does not return is left behind.
    pub(super) fn close(self) {
        let begun = Instant::now();
        let mut state = self.0.lock();
        state.task = Some(Task::Close);
        let longest = if state.failed.is_some() { CLOSE_FAILED } else { CLOSE };
        self.0.changed.notify_all();
        while !state.ended && begun.elapsed() < longest {
            state = self.0.wait(state, SLICE);
        }
        state.abandoned = true;
    }
}

/// The thread with its communicator, 0 while there is none.
struct Thread {
    membership: Membership,
    communicator: Communicator,
    shared: Arc<Shared>,
}

impl Thread {
    fn run(mut self) {
        let opened = self.open();
        self.publish(opened);
        while let Some(task) = self.next() {
            match task {
                Task::Enqueue => {
                    let outcome = self.enqueue();
                    self.publish(outcome);
                }
                Task::Close => self.finalize(),
            }
        }
        self.abort();
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }

    /// Stores the result of a task. After an error there is no communicator.
    fn publish(&mut self, outcome: Result<(), DeviceError>) {
        if outcome.is_err() {
            self.abort();
        }
        let mut state = self.shared.lock();
        if let Err(error) = &outcome {
            state.failed.get_or_insert_with(|| error.clone());
        }
        state.outcome = Some(outcome);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits for a task; `None` once there is nothing more to do.
    fn next(&mut self) -> Option<Task> {
        let mut looked = Instant::now();
        loop {
            let mut state = self.shared.lock();
            loop {
                if state.abandoned || self.shared.is_lost() || self.communicator == 0 {
                    return None;
                }
                if let Some(task) = state.task.take() {
                    return Some(task);
                }
                if looked.elapsed() > LOOK {
                    break;
                }
                state = self.shared.wait(state, SLICE);
            }
            drop(state);
            looked = Instant::now();
            if let Err(error) = self.asynchronous() {
                self.abort();
                self.shared.lock().failed.get_or_insert(error);
            }
        }
    }

    fn open(&mut self) -> Result<(), DeviceError> {
        let Membership { functions, id, rank, world, .. } = self.membership;
        self.membership.driver.set_current(self.membership.context)?;
        let mut configuration = Configuration::non_blocking();
        let (world, rank) = (world as c_int, rank as c_int);
        // SAFETY: writes one handle; the configuration is read during the call.
        let code = unsafe {
            (functions.ncclCommInitRankConfig)(
                &raw mut self.communicator,
                world,
                id,
                rank,
                &raw mut configuration,
            )
        };
        self.settle("ncclCommInitRankConfig", code)
    }

    fn enqueue(&mut self) -> Result<(), DeviceError> {
        self.asynchronous()?;
        let (operations, stream) = {
            let mut state = self.shared.lock();
            (std::mem::take(&mut state.operations), state.stream)
        };
        let outcome = match operations.as_slice() {
            [operation] => self.call(*operation, stream).and_then(|(call, code)| self.settle(call, code)),
            operations => self.grouped(operations, stream),
        };
        // The next exchange uses the same memory.
        self.shared.lock().operations = operations;
        outcome
    }

    /// Makes calls as one NCCL group, which is ended even if a call fails.
    fn grouped(&self, operations: &[Operation], stream: Handle) -> Result<(), DeviceError> {
        let functions = &self.membership.functions;
        // SAFETY: no arguments.
        functions.check("ncclGroupStart", self.communicator, unsafe { (functions.ncclGroupStart)() })?;
        let called = operations.iter().try_for_each(|operation| {
            let (call, code) = self.call(*operation, stream)?;
            let code = if code == IN_PROGRESS { 0 } else { code };
            functions.check(call, self.communicator, code)
        });
        // SAFETY: no arguments; a group was started.
        let code = unsafe { (functions.ncclGroupEnd)() };
        called.and(self.settle("ncclGroupEnd", code))
    }

    /// Calls one function; returns its name and status.
    fn call(&self, operation: Operation, stream: Handle) -> Result<(&'static str, c_int), DeviceError> {
        let (functions, communicator) = (&self.membership.functions, self.communicator);
        if self.shared.is_lost() {
            return Err(rank_lost());
        }
        // SAFETY: whoever lists operations has checked that the ranges are within arenas, which outlive all work on the streams.
        Ok(unsafe {
            match operation {
                Operation::AllGather { from, to, bytes } => {
                    let (from, to) = (from as *const c_void, to as *mut c_void);
                    ("ncclAllGather", (functions.ncclAllGather)(from, to, bytes, UINT8, communicator, stream))
                }
                Operation::Broadcast { root, from, to, bytes } => {
                    let (from, to, root) = (from as *const c_void, to as *mut c_void, root as c_int);
                    let code = (functions.ncclBroadcast)(from, to, bytes, UINT8, root, communicator, stream);
                    ("ncclBroadcast", code)
                }
                Operation::Send { to, from, bytes } => {
                    let (from, to) = (from as *const c_void, to as c_int);
                    ("ncclSend", (functions.ncclSend)(from, bytes, UINT8, to, communicator, stream))
                }
                Operation::Receive { from, to, bytes } => {
                    let (to, from) = (to as *mut c_void, from as c_int);
                    ("ncclRecv", (functions.ncclRecv)(to, bytes, UINT8, from, communicator, stream))
                }
            }
        })
    }

    /// Waits until a call is no longer in progress.
    fn settle(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code != IN_PROGRESS {
            self.membership.functions.check(call, self.communicator, code)?;
        }
        let mut polls = 0;
        loop {
            let state = self.state()?;
            if state != IN_PROGRESS {
                return self.membership.functions.check(call, self.communicator, state);
            }
            if self.shared.is_lost() {
                return Err(rank_lost());
            }
            polls += 1;
            if polls < SPINS {
                std::hint::spin_loop();
            } else if self.shared.lock().abandoned {
                return Err(failed(call, "it was given up".to_owned()));
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    /// The status of the communicator.
    fn state(&self) -> Result<c_int, DeviceError> {
        let (functions, mut state) = (&self.membership.functions, 0);
        // SAFETY: a live communicator; writes one status.
        let code = unsafe { (functions.ncclCommGetAsyncError)(self.communicator, &raw mut state) };
        functions.check("ncclCommGetAsyncError", self.communicator, code)?;
        Ok(state)
    }

    /// Returns the error of an earlier exchange, if there is one.
    fn asynchronous(&self) -> Result<(), DeviceError> {
        let state = self.state()?;
        let state = if state == IN_PROGRESS { 0 } else { state };
        self.membership.functions.check("an earlier exchange", self.communicator, state)
    }

    /// Ends the communicator in order, if all goes well.
    fn finalize(&mut self) {
        let functions = self.membership.functions;
        // SAFETY: a live communicator, on which nothing is in progress.
        let code = unsafe { (functions.ncclCommFinalize)(self.communicator) };
        if self.settle("ncclCommFinalize", code).is_err() {
            return self.abort();
        }
        // SAFETY: finalized, and destroyed once. Nothing depends on the status.
        unsafe { (functions.ncclCommDestroy)(std::mem::take(&mut self.communicator)) };
    }

    fn abort(&mut self) {
        let communicator = std::mem::take(&mut self.communicator);
        if communicator == 0 {
            return;
        }
        let begun = Instant::now();
        // SAFETY: taken out of its place, so this is its last use. Nothing depends on the status.
        unsafe { (self.membership.functions.ncclCommAbort)(communicator) };
        self.shared.loss.aborted(begun.elapsed());
    }
}

fn failed(call: &str, reason: String) -> DeviceError {
    DeviceError::Call { device: "cuda".to_owned(), call: format!("NCCL: {call}"), reason }
}

fn rank_lost() -> DeviceError {
    failed("an exchange", "the communicator was aborted because a rank was lost".to_owned())
}
